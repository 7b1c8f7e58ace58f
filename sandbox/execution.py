"""Programs that run beside the shell of a sandbox, any number at once.

    SANDBOX/pipes/TOKEN           the spawner's commands come from here
    SANDBOX/pipes/TOKEN.sh        runs one program, with
    SANDBOX/pipes/TOKEN.in        what it reads,
    SANDBOX/pipes/TOKEN.out       the pipe it writes into, and
    SANDBOX/pipes/TOKEN.status    the pipe that says `begun`, and then the exit code
    SANDBOX/pipes/TOKEN.go        the pipe that lets it go on once it is in its cell, where it gets one

- The spawner is a shell that the guard starts beside its own: what it runs is confined as everything else.
- The folder can be entered inside, but neither written nor listed.
- A program's processes are those below its script, those of its session, and those with its token among
  their variables.  Only who leaves all three, on purpose, lives on until the sandbox ends.
"""

import os
import secrets
import shlex
import subprocess
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import anyio
import anyio.to_thread

from sostenuto.errors import SandboxError
from sostenuto.sandbox import processes
from sostenuto.sandbox.cgroups import Cell
from sostenuto.sandbox.channel import Streams
from sostenuto.sandbox.output import HeadTail
from sostenuto.sandbox.protocol import ShellResult
from sostenuto.sandbox.walk import give

_REPLY_S = 10.0
"""For a program to begin; far above what a loaded machine needs."""
_INLINE_BYTES = 1 << 18
"""Input up to this size is written at once; handing it to a thread costs more."""
_NOT_RUN = 126
"""Exit code of a program that was not run, as shells have it."""
_KILLED = 137
_GRACE_S = 0.05
"""In which the rest of a sandbox is gone, too, when it ends as a whole."""
_VARIABLE = "SOSTENUTO_EXEC"
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_PROBE_S = 10


@dataclass(frozen=True, slots=True)
class _Gate:
    """Where a program waits until it is in its cell."""

    cell: Cell
    pipe: int


class Spawner:
    """Runs programs in one sandbox.  `close` is idempotent and ends what waits for one."""

    def __init__(self, pipes: Path, token: str, uid: int | None) -> None:
        self._launcher = 0
        self._inside = ""
        self._pipes = pipes
        self._token = token
        self._uid = uid
        self._make_pipe(token)
        # Until the spawner has opened the far end, one of ours keeps either side from waiting.
        self._commands = os.open(pipes / token, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._running: dict[str, Streams] = {}
        self._make_cell: Callable[[], Cell | None] = lambda: None
        self._closed = False

    def _make_pipe(self, name: str) -> None:
        os.mkfifo(self._pipes / name, 0o600)
        give(str(self._pipes / name), self._uid)

    def settle(self, launcher: int, inside: str, make_cell: Callable[[], Cell | None]) -> None:
        """The spawner runs below `launcher` and sees the pipes at `inside`; we are told when it is gone."""
        self._launcher, self._inside, self._make_cell = launcher, inside, make_cell
        both_ends = self._commands
        self._commands = os.open(self._pipes / self._token, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.close(both_ends)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._commands)
            for streams in self._running.values():
                streams.close()

    def members(self, tree: list[int]) -> set[int]:
        """Those of `tree` that are the spawner's, or belong to a program that is running."""
        found = {pid for pid in tree if processes.has_word(pid, self._token)}
        found.update(child for pid in list(found) for child in processes.descendants(pid))
        for token in self._running:
            found.update(self._belonging(token, tree))
        return found

    def _belonging(self, token: str, tree: list[int]) -> list[int]:
        words = f"{self._inside}/{token}.sh", f"{_VARIABLE}={token}"
        named = [pid for pid in tree if processes.has_word(pid, *words)]
        sessions = {pid for pid in named if processes.session(pid) == pid}
        below = [child for pid in named for child in processes.descendants(pid)]
        return [*{*named, *below, *(pid for pid in tree if processes.session(pid) in sessions)}]

    async def run(
        self, argv: Sequence[str], stdin: bytes, timeout_s: float, output_bytes: int
    ) -> ShellResult:
        """Run one program to its end or its deadline; cancelled, it ends the program."""
        refusal = _refusal(argv)
        if refusal:
            return ShellResult(_NOT_RUN, refusal)
        started_s = anyio.current_time()
        sink = HeadTail(output_bytes)
        async with self._prepared(argv, stdin) as (token, streams, gate):
            code: int | None = None
            try:
                with anyio.move_on_after(timeout_s):
                    code = await self._follow(token, streams, sink, gate)
            finally:
                if code is None:
                    await self._end(token)
            if self._closed:
                raise SandboxError("the sandbox has ended")
            streams.drain(sink)
            killed = gate is not None and gate.cell.kills() > 0
        output, cut_bytes = sink.text()
        return ShellResult(code, output, cut_bytes, anyio.current_time() - started_s, killed)

    async def _follow(self, token: str, streams: Streams, sink: HeadTail, gate: "_Gate | None") -> int:
        self._ask(f"{_spawn()} {shlex.quote(f'{self._inside}/{token}.sh')}\n")
        try:
            with anyio.fail_after(_REPLY_S):
                await streams.line(sink)
        except TimeoutError as exc:
            raise SandboxError("the sandbox starts no programs any more") from exc
        if gate is not None:
            self._confine(token, gate)
        try:
            return int(await streams.line(sink))
        except (SandboxError, ValueError):
            if self._closed:
                raise
            # Killed with the script above it, so that nobody is left to tell the code; or all of it ends.
            await anyio.sleep(_GRACE_S)
            self._ask("\n")
            return _KILLED

    def _confine(self, token: str, gate: "_Gate") -> None:
        """Nothing of the program has run: its script waits."""
        script = f"{self._inside}/{token}.sh"
        for pid in reversed(processes.descendants(self._launcher)):
            if processes.has_word(pid, script):
                gate.cell.take(pid)
        os.write(gate.pipe, b"\n")

    def _ask(self, line: str) -> None:
        try:
            os.write(self._commands, line.encode())  # shorter than what a pipe takes at once
        except OSError as exc:
            raise SandboxError(f"the sandbox starts no programs any more: {exc}") from exc

    async def _end(self, token: str) -> None:
        # A script that has not been opened by now never will be; one that has, is found by its name.
        with suppress(FileNotFoundError):
            (self._pipes / f"{token}.sh").unlink()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(processes.end_found, lambda: self._members_of(token))

    def _members_of(self, token: str) -> list[int]:
        return self._belonging(token, processes.descendants(self._launcher))

    @asynccontextmanager
    async def _prepared(
        self, argv: Sequence[str], stdin: bytes
    ) -> AsyncGenerator[tuple[str, Streams, "_Gate | None"]]:
        """The token of a program, what it writes into, and where it waits for its cell, if it gets one."""
        token = secrets.token_hex(16)
        try:
            if len(stdin) > _INLINE_BYTES:
                await anyio.to_thread.run_sync(self._give, f"{token}.in", stdin)
            else:
                self._give(f"{token}.in", stdin)
            with self._gate(token) as gate:
                streams = self._running[token] = self._make(token, argv, waits=gate is not None)
                try:
                    yield token, streams, gate
                finally:
                    del self._running[token]
                    streams.close()
        finally:
            for kind in ("sh", "in", "out", "status", "go"):
                with suppress(OSError):
                    (self._pipes / f"{token}.{kind}").unlink()

    @contextmanager
    def _gate(self, token: str) -> Generator["_Gate | None"]:
        cell = self._make_cell()
        if cell is None:
            yield None
            return
        try:
            self._make_pipe(f"{token}.go")
            # Both ends, and as long as it may be read: what is written into a pipe without readers is lost.
            pipe = os.open(self._pipes / f"{token}.go", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                yield _Gate(cell, pipe)
            finally:
                os.close(pipe)
        finally:
            cell.remove()

    def _make(self, token: str, argv: Sequence[str], *, waits: bool) -> Streams:
        try:
            for kind in ("out", "status"):
                self._make_pipe(f"{token}.{kind}")
            self._write(f"{token}.sh", _script(f"{self._inside}/{token}", token, argv, waits=waits).encode())
            output = os.open(self._pipes / f"{token}.out", _OPEN)
            try:
                return Streams(output, os.open(self._pipes / f"{token}.status", _OPEN))
            except OSError:
                os.close(output)
                raise
        except OSError as exc:
            raise SandboxError(f"a program cannot be started: {exc}") from exc

    def _give(self, name: str, content: bytes) -> None:
        try:
            self._write(name, content)
        except OSError as exc:
            raise SandboxError(f"a program cannot be given its input: {exc}") from exc

    def _write(self, name: str, content: bytes) -> None:
        path = self._pipes / name
        path.write_bytes(content)
        path.chmod(0o400)
        give(str(path), self._uid)


def _script(path: str, token: str, argv: Sequence[str], *, waits: bool) -> str:
    words = " ".join(map(shlex.quote, argv))
    at = shlex.quote(path)
    wait = f"read -r _ <{at}.go; " if waits else ""
    return (
        f"exec <{at}.in >{at}.out 2>&1 9>{at}.status; export {_VARIABLE}={token}; echo begun >&9; {wait}\n"
        f"(exec 9>&-; exec {words}); echo $? >&9\n"
    )


def spawner_script(pipes: str, token: str) -> str:
    """What the guard runs to start the spawner, which speaks to nobody."""
    return f"{_spawn()} -s {token} <{shlex.quote(pipes)}/{token} >/dev/null 2>&1 8>&- 9>&-"


@cache
def _spawn() -> str:
    """Starts a shell in a session of its own and does not wait for it.

    `setsid --fork` where the system has it: a shell's own `&` would make its programs ignore interrupts.
    """
    try:
        subprocess.run(["setsid", "--fork", "true"], check=True, capture_output=True, timeout=_PROBE_S)
    except (OSError, subprocess.SubprocessError):
        return '_() { { sh "$@" <&7 7<&- & } 7<&0; }; _'
    return "setsid --fork sh"


def _refusal(argv: Sequence[str]) -> str:
    if not argv or not argv[0] or argv[0].startswith("-"):
        return "no program is named"
    if any("\0" in word for word in argv):
        return "an argument has a zero byte"
    with suppress(UnicodeEncodeError):
        "".join(argv).encode()
        return ""
    return "an argument cannot be encoded"
