"""A persistent shell inside a sandbox.

A guard (always `sh`) sets the limits and starts the shell proper, again whenever that ends.  Its stderr
is the status pipe; commands never see it:

    go N                   to the guard: start the N-th shell
    ready.N PID            from a new shell
    TOKEN CODE             a command is done; the token is drawn for each command
    exit.N CODE            from the guard: the shell is gone

- A command is one line, `command eval 'TEXT'`, so nothing in TEXT can swallow the status that follows it,
  and an error that would end a non-interactive shell ends the command alone.
- At a deadline everything younger than the command is killed, and USR1 makes the shell give the command up
  (its trap fails on purpose).  A shell that ignores this, or is bash, is killed; the guard starts another.
- One command at a time; background processes of earlier commands live on.
"""

import secrets
import shlex
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import anyio

from sostenuto.errors import SandboxError
from sostenuto.sandbox import processes
from sostenuto.sandbox.cgroups import find_cgroups
from sostenuto.sandbox.channel import Channel
from sostenuto.sandbox.output import HeadTail
from sostenuto.sandbox.protocol import Blueprint, SandboxLimits, ShellResult

SHELLS = {"sh": "/bin/sh", "bash": "bash --noprofile --norc"}
_COMMAND_BYTES = 1 << 20
_REPLY_S = 10.0
"""For answers that need no command to run; far above what a loaded machine needs."""
_PATIENCE_S = 0.05
_ATTEMPTS = 10
_NOBODY_LISTENS = 126
"""Exit code of a command that was not run, as shells have it."""


def guard_script(blueprint: Blueprint, folder: str, spawner: str, *, others: int = 0) -> str:
    """What the guard runs under `sh -c`; shells start in `folder`.

    `spawner` is what it runs first, see `execution`.  `others`: tasks outside the sandbox that the system
    counts against the same limit on processes.
    """
    limits = blueprint.limits
    tasks = limits.processes + others
    return (
        f"cd {shlex.quote(folder)} || exit; exec 9>&2 8>&1 2>&1; "
        f"ulimit -c 0; ulimit -t {limits.cpu_s}; ulimit -f {limits.file_bytes // 512}; "
        f"ulimit -n {limits.open_files}; {_address_space(limits)}"
        # The option is -p in dash and busybox, -u in bash.
        f"ulimit -p {tasks} 2>/dev/null || ulimit -u {tasks}; {spawner}; "
        'while read -r word number; do [ "$word" = go ] || continue; '
        f"{SHELLS[blueprint.shell]}; printf 'exit.%d %d\\n' $number $? >&9; done"
    )


def _address_space(limits: SandboxLimits) -> str:
    """What a process may reserve is limited only where what it uses is not."""
    cgroups = find_cgroups()
    return "" if cgroups and cgroups.bound_memory else f"ulimit -v {limits.memory_bytes // 1024}; "


def _prologue(number: int) -> str:
    trap = "trap 'exec 2>/dev/null; : \"${sostenuto_deadline:?}\"' USR1"
    # When memory runs out, the shell and its commands are ended before what stands above them.
    expendable = "{ echo 500 >/proc/self/oom_score_adj; } 2>/dev/null"
    return f"go {number}\n{expendable}; {trap}; command printf 'ready.{number} %d\\n' $$ >&9\n"


class PersistentShell:
    """Runs commands through `channel`; `launcher` is the process above the guard.

    `others`, given a sandbox's processes, says which of them are not of the shell's commands.
    """

    def __init__(
        self, channel: Channel, launcher: int, others: Callable[[list[int]], set[int]] = lambda _: set()
    ) -> None:
        self._channel = channel
        self._launcher = launcher
        self._others = others
        self._shell_pid = 0
        """As the sandbox counts."""
        self._number = 0
        """Of the present shell; what an earlier one still says is not for us."""
        self._asked = False
        """Whether a shell was asked for and has not yet said that it is ready."""
        self._strays: deque[str] = deque(maxlen=10)
        """Status lines that nobody waited for: a launcher that gives up says why."""
        self._turn = anyio.Lock(fast_acquire=True)
        self._unfinished_since: int | None = None
        """Start of a command that may still be running, in clock ticks."""
        self._idle_since = 0
        """End of the last command, in clock ticks."""
        self._last_pid = 0
        """Given out before the command began: for what started within the same clock tick."""

    async def start(self) -> None:
        """Start a shell in the workspace; raises SandboxError with the launcher's words when none comes."""
        try:
            with anyio.fail_after(_REPLY_S):
                if not self._asked:
                    self._number += 1
                    self._asked = True
                    await self._channel.send(_prologue(self._number))
                word, value = await self._expect(f"ready.{self._number}", HeadTail(1024))
        except (SandboxError, TimeoutError) as exc:
            said = " ".join([*self._strays, self._channel.last_words()]).strip()
            raise SandboxError(f"no shell came up{': ' if said else ''}{said}") from exc
        self._asked = False
        if word == self._exit:
            raise SandboxError(f"the shell ended with code {value} before it was ready")
        self._shell_pid = int(value)
        self._idle_since = processes.now_ticks()

    def host_pid(self) -> int:
        """Of the shell; raises SandboxError when it is gone."""
        guard = self._guarded()
        if not guard:
            raise SandboxError("the shell is gone")
        return guard[0]

    @property
    def _exit(self) -> str:
        return f"exit.{self._number}"

    async def run(self, command: str, timeout_s: float, output_bytes: int) -> ShellResult:
        """Run one command to its end or its deadline; cancelled, it ends the command."""
        refusal = refusal_of(command)
        if refusal:
            return ShellResult(_NOBODY_LISTENS, refusal)
        async with self._turn:
            if self._unfinished_since is not None:  # the last one was cancelled twice
                await self._recover(HeadTail(1024))
            return await self._run(command, timeout_s, HeadTail(output_bytes))

    async def _run(self, command: str, timeout_s: float, sink: HeadTail) -> ShellResult:
        started_s = anyio.current_time()
        self._unfinished_since = processes.now_ticks()
        self._last_pid = processes.last_pid() if self._unfinished_since <= self._idle_since else 0
        code: int | None = None
        try:
            with anyio.move_on_after(timeout_s):
                code = await self._execute(command, sink)
                self._unfinished_since = None
        finally:
            if self._unfinished_since is not None and not self._channel.ended:
                await self._recover_twice(sink)
        if self._channel.ended:
            raise SandboxError("the sandbox has ended")
        self._idle_since = processes.now_ticks()
        self._channel.drain(sink)
        output, cut_bytes = sink.text()
        return ShellResult(code, output, cut_bytes, anyio.current_time() - started_s)

    async def _execute(self, command: str, sink: HeadTail) -> int:
        token = secrets.token_hex(16)
        await self._channel.send(
            f"command eval {shlex.quote(command)} </dev/null >&8 2>&8 8>&- 9>&-; {_report(token)}\n"
        )
        word, code = await self._expect(token, sink)
        if word == self._exit:
            await self.start()
        return int(code)

    async def _expect(self, wanted: str, sink: HeadTail) -> tuple[str, str]:
        """The next status line that says `wanted` or `exit`; others are late news of ended commands."""
        while True:
            word, _, value = (await self._channel.line(sink)).partition(" ")
            if word in {wanted, self._exit} and value.isdigit():
                return word, value
            self._strays.append(f"{word} {value}".strip())

    async def _recover_twice(self, sink: HeadTail) -> None:
        """`_recover`, also in a task that is cancelled by itself: that is said once and knows no shield."""
        try:
            await self._recover(sink)
        except anyio.get_cancelled_exc_class():
            await self._recover(sink)
            raise

    async def _recover(self, sink: HeadTail) -> None:
        with anyio.move_on_after(2 * _REPLY_S, shield=True) as scope:
            await self._end_command(sink)
            # It is nobody's output now, and no part of that of the next command.
            self._channel.drain(sink)
        if scope.cancelled_caught:
            raise SandboxError("a command could not be ended")

    async def _end_command(self, sink: HeadTail) -> None:
        """Kill what the unfinished command started and bring the shell, or a new one, to its prompt."""
        # Asked: this was cut short when all of the command was dead, and a new shell, as young, is coming up.
        if self._asked or not await self._kill_command(sink):
            await self.start()
        self._unfinished_since = None

    async def _kill_command(self, sink: HeadTail) -> bool:
        """Whether the shell itself survived."""
        since_ticks = self._unfinished_since or 0
        guard = self._guarded()
        processes.send(guard, signal.SIGCONT)  # a paused shell could not answer
        # No shell: this was cut short before, after the shell had been killed.
        alive = bool(guard) and await self._give_up(guard, since_ticks, sink)
        self._kill_young(guard, since_ticks)
        return alive

    async def _give_up(self, guard: list[int], since_ticks: int, sink: HeadTail) -> bool:
        """Whether the shell itself survived."""
        for attempt in range(_ATTEMPTS):
            if attempt % 4 == 0:
                processes.send(guard[:1], signal.SIGUSR1)
            self._kill_young(guard, since_ticks)
            with anyio.move_on_after(_PATIENCE_S):
                return await self._is_at_prompt(await self._channel.line(sink))
        processes.send(guard[:1], signal.SIGKILL)
        with anyio.fail_after(_REPLY_S):
            await self._expect(self._exit, sink)
        return False

    async def _is_at_prompt(self, line: str) -> bool:
        """After the command's last line: a second USR1 may have come too late and ended the shell."""
        if line.startswith(f"{self._exit} "):
            return False
        token = secrets.token_hex(16)
        await self._channel.send(f"{_report(token)}\n")
        return (await self._expect(token, HeadTail(1024)))[0] == token

    def _guarded(self) -> list[int]:
        """Host pids of the shell and of what stands above it, which a deadline spares; the shell first."""
        tree = processes.descendants(self._launcher)
        for pid in tree:
            if processes.namespaced_pid(pid) == self._shell_pid:
                return [pid, *processes.ancestors(pid, among=tree)]
        return []

    def _kill_young(self, guard: list[int], since_ticks: int) -> None:
        tree = processes.descendants(self._launcher)
        spared = {*guard, *self._others(tree)}
        young = [pid for pid in tree if pid not in spared and self._is_young(pid, since_ticks)]
        processes.send(young, signal.SIGKILL)

    def _is_young(self, pid: int, since_ticks: int) -> bool:
        began_ticks = processes.start_ticks(pid) or 0
        return began_ticks > since_ticks or (began_ticks == since_ticks and pid > self._last_pid)


def _report(token: str) -> str:
    return f"command printf '%s %d\\n' {token} $? >&9"


def refusal_of(command: str) -> str:
    """Why no shell could be given it; empty when one can."""
    with suppress(UnicodeEncodeError):
        if len(command.encode()) > _COMMAND_BYTES:
            return f"the command is longer than {_COMMAND_BYTES} bytes; write it to a file and run that"
    return "the command has a zero byte" if "\0" in command else ""
