"""A persistent shell in a container; `inside` has the far end and what is said between the two.

As in the backends of this machine, `sh` survives the deadline of a command and keeps its directory and
variables, and `bash` starts afresh.
"""

import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import anyio

from sostenuto.errors import SandboxError
from sostenuto.sandbox.docker import inside
from sostenuto.sandbox.docker.stream import Stream
from sostenuto.sandbox.output import HeadTail
from sostenuto.sandbox.protocol import ShellResult
from sostenuto.sandbox.shell import refusal_of

_REPLY_S = 10.0
"""For answers that need no command to run; far above what a loaded machine needs."""
_PATIENCE_S = 0.05
_ATTEMPTS = 10
_BEGIN_S = 2.0
"""In which a command that was sent begins, if the shell is there."""
_NOBODY_LISTENS = 126
"""Exit code of a command that was not run, as shells have it."""


@dataclass(slots=True)
class _Running:
    """The command that may still be running."""

    token: str
    ticks: int = 0
    last_pid: int = 0
    """Both of the moment before it began; 0 until the shell has told them."""

    def begin(self, told: str) -> None:
        """From /proc/uptime and /proc/loadavg."""
        words = told.split()
        self.ticks = int(words[0].replace(".", ""))
        self.last_pid = int(words[-1])


class ContainerShell:
    """Runs one command at a time; background processes of earlier ones live on."""

    def __init__(self, stream: Stream, awake: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        self._stream = stream
        self._awake = awake
        """Inside it, the processes of the sandbox are not paused."""
        self._turn = anyio.Lock()
        self._name = ""
        """Of the present shell, drawn for each: what an earlier one still says is not for us."""
        self._pid = 0
        """0: there is none, or it has not said that it is ready."""
        self._asked = False
        """Whether a shell was asked for that has not said so yet."""
        self._running: _Running | None = None
        self._is_unread = False
        """Whether what the last command printed may still be on its way: it was cancelled."""
        self._news: list[str] = []
        """Lines that came while another was waited for."""
        self._kills = 0
        """Of processes, for lack of memory, since the start."""

    async def start(self) -> None:
        """Start a shell in the workspace; SandboxError, with its last words, when none comes."""
        try:
            with anyio.fail_after(_REPLY_S):
                if not self._asked:
                    self._name, self._asked = secrets.token_hex(16), True
                    await self._stream.send(inside.prologue(self._name))
                word, value = await self._expect(f"ready.{self._name}", HeadTail(1024))
        except (SandboxError, TimeoutError) as exc:
            said = self._stream.last_words()
            raise SandboxError(f"no shell came up{': ' if said else ''}{said}") from exc
        self._asked = False
        if word == self._exit:
            raise SandboxError(f"the shell ended with code {value} before it was ready")
        self._pid = int(value)

    @property
    def _exit(self) -> str:
        return f"exit.{self._name}"

    async def run(self, command: str, timeout_s: float, output_bytes: int) -> ShellResult:
        """Run one command to its end or its deadline; cancelled, it ends the command."""
        refusal = refusal_of(command)
        if refusal:
            return ShellResult(_NOBODY_LISTENS, refusal)
        async with self._turn:
            if self._running is not None:  # the last one was cancelled twice
                await self._recover(HeadTail(1024))
            if self._is_unread:
                await self._kills_until_now(HeadTail(1024))
            return await self._run(command, timeout_s, HeadTail(output_bytes))

    async def _run(self, command: str, timeout_s: float, sink: HeadTail) -> ShellResult:
        started_s = anyio.current_time()
        self._running = _Running(secrets.token_hex(16))
        self._is_unread = True
        code: int | None = None
        try:
            with anyio.move_on_after(timeout_s):
                code = await self._execute(self._running, command, sink)
                self._running = None
        finally:
            if self._running is not None and not self._stream.ended:
                await self._recover(sink)
        kills = await self._kills_until_now(sink)
        output, cut_bytes = sink.text()
        elapsed_s = anyio.current_time() - started_s
        return ShellResult(code, output, cut_bytes, elapsed_s, out_of_memory=kills > 0)

    async def _execute(self, running: _Running, command: str, sink: HeadTail) -> int:
        await self._stream.send(inside.command_line(command, running.token))
        while True:
            word, _, value = (await self._stream.line(sink)).partition(" ")
            if word == f"began.{running.token}":
                running.begin(value)
            elif word in {running.token, self._exit} and value.isdigit():
                break
        if word == self._exit:
            self._pid = 0
            await self.start()
        return int(value)

    async def _kills_until_now(self, sink: HeadTail) -> int:
        """Since the last time.  What was printed until now goes to `sink`, and no later output."""
        async with self._awake():
            return await self._ask_for_kills(sink)

    async def _ask_for_kills(self, sink: HeadTail) -> int:
        with anyio.move_on_after(_REPLY_S):
            kills = int(await self._order("check", self._stream.mark, sink=sink, marked=True))
            await self._stream.drain(sink)
            self._is_unread = False
            kills, self._kills = kills - self._kills, kills
            return kills
        raise SandboxError("the sandbox does not answer")

    async def _order(self, order: str, *words: object, sink: HeadTail, marked: bool = False) -> str:
        """Have the relay do something and tell how it went."""
        token = secrets.token_hex(16)
        said = [order, *map(str, words), token] if marked else [order, token, *map(str, words)]
        if marked:
            self._stream.mark_due()
        await self._stream.send(" ".join(said) + "\n")
        while True:
            line = await self._stream.line(sink)
            word, _, value = line.partition(" ")
            if word == token:
                return value
            self._news.append(line)

    async def _expect(self, wanted: str, sink: HeadTail) -> tuple[str, str]:
        """The next line that says `wanted` or `exit`; others are late news of ended commands."""
        while True:
            line = self._news.pop(0) if self._news else await self._stream.line(sink)
            word, _, value = line.partition(" ")
            if word in {wanted, self._exit} and value.isdigit():
                return word, value

    async def _recover(self, sink: HeadTail) -> None:
        with anyio.CancelScope(shield=True):
            async with self._awake():
                with anyio.move_on_after(2 * _REPLY_S):
                    await self._end_command(self._running or _Running(""), sink)
                    return
                raise SandboxError("a command could not be ended")

    async def _end_command(self, running: _Running, sink: HeadTail) -> None:
        """Kill what the command started and bring the shell, or a new one, to its prompt."""
        self._news.clear()
        # No shell: this was cut short before, after the shell had been killed.
        alive = self._pid != 0 and await self._give_up(running, sink)
        if running.ticks:
            await self._end_young(running, sink)
        if not alive:
            self._news.clear()
            await self.start()
        self._running = None

    async def _give_up(self, running: _Running, sink: HeadTail) -> bool:
        """Whether the shell itself survived."""
        with anyio.move_on_after(_BEGIN_S):
            await self._begins(running, sink)
        for attempt in range(_ATTEMPTS if running.ticks else 0):
            await self._end_young(running, sink, wake=attempt % 4 == 0)
            with anyio.move_on_after(_PATIENCE_S):
                word, _ = await self._expect(running.token, sink)
                if word != self._exit and await self._is_at_prompt(sink):
                    return True
                self._pid = 0
                return False
        await self._stream.send(f"kill {self._pid}\n")
        await self._expect(self._exit, sink)
        self._pid = 0
        return False

    async def _begins(self, running: _Running, sink: HeadTail) -> None:
        """A shell at its prompt says at once that it begins; what was sent to it, it will run."""
        while not running.ticks:
            line = await self._stream.line(sink)
            word, _, value = line.partition(" ")
            if word == f"began.{running.token}":
                running.begin(value)
            else:
                self._news.append(line)
                if word == self._exit:
                    return

    async def _end_young(self, running: _Running, sink: HeadTail, *, wake: bool = False) -> None:
        await self._order("end", self._pid, running.ticks, running.last_pid, int(wake), sink=sink)

    async def _is_at_prompt(self, sink: HeadTail) -> bool:
        """A second USR1 may have come too late and ended the shell."""
        token = secrets.token_hex(16)
        await self._stream.send(f":{inside.report(token)}\n")
        return (await self._expect(token, sink))[0] == token
