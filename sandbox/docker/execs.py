"""One program run beside the shell: `docker exec`, with its traffic over a connection of its own."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import anyio

from sostenuto.errors import ConfigError, SandboxError
from sostenuto.sandbox.docker import inside
from sostenuto.sandbox.docker.calls import Calls
from sostenuto.sandbox.docker.stream import Stream
from sostenuto.sandbox.docker.typed import Conflict, Daemon
from sostenuto.sandbox.docker.wire import Wire
from sostenuto.sandbox.output import HeadTail
from sostenuto.sandbox.protocol import ShellResult

T = TypeVar("T")

_END_S = 10.0
_HEARS_S = 3.0
_ASKS_AGAIN_S = 0.02
_PATIENCE_S = 0.05
_NOT_RUN = 126
_KILLED = 137
_LIMIT_REACHED = "temporarily unavailable"
_REFUSED = "OCI runtime exec failed"
"""What a daemon says when a container is full of processes, and in other cases."""
"""What the system says when the sandbox's own processes leave no room for another."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a program is to be run, and how its sandbox is spoken to."""

    daemon: Daemon
    calls: Calls
    container: str
    order: Callable[[str], Awaitable[None]]
    """Sends a line to the relay."""
    awake: Callable[[], AbstractAsyncContextManager[None]]
    """Inside it, the processes of the sandbox are not paused."""


async def once_awake(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again while the daemon says that the container is paused, for a while.

    It hears of pauses and their ends from the runtime, and of a pause that is over already sometimes after
    its end.
    """
    with anyio.move_on_after(_HEARS_S):
        while True:
            try:
                return await ask()
            except Conflict as error:
                if "is paused" not in str(error):
                    raise
            await anyio.sleep(_ASKS_AGAIN_S)
    return await ask()


async def execute(
    site: Site, argv: Sequence[str], *, stdin: bytes, timeout_s: float, output_bytes: int
) -> ShellResult:
    """Run a program to its end or its deadline; cancelled, it is ended."""
    if not argv or any("\0" in word for word in argv):
        raise ConfigError(f"argv {list(argv)!r}: name a program, without zero bytes")
    started_s = anyio.current_time()
    execution = _Execution(site, HeadTail(output_bytes))
    code: int | None = None
    try:
        with anyio.move_on_after(timeout_s):
            await execution.start(list(argv))
            code = await execution.finish(stdin)
    finally:
        with anyio.CancelScope(shield=True):
            await execution.end()
    return execution.result(code, anyio.current_time() - started_s)


class _Execution:
    def __init__(self, site: Site, sink: HeadTail) -> None:
        self._site = site
        self._sink = sink
        self._wire = Wire(site.daemon.socket)
        self._stream = Stream(self._wire)
        self._stream.mark_due()
        self._identity = ""
        self._asked = False
        self._begun = False
        self._told: dict[str, int] = {}
        """What the far end has reported: pid, exit, kills."""

    async def start(self, argv: list[str]) -> None:
        daemon, calls = self._site.daemon, self._site.calls
        prepare = partial(
            daemon.prepare_exec,
            self._site.container,
            inside.exec_command(argv),
            {inside.EXEC_VARIABLE: self._stream.mark},
        )
        self._identity = await once_awake(partial(calls.run, prepare))
        version = await calls.run(daemon.version_path)
        self._asked = True
        target = f"{version}/exec/{self._identity}/start"
        await self._wire.upgrade(target, {"Detach": False, "Tty": False})
        self._begun = True

    async def finish(self, stdin: bytes) -> int:
        """The exit code, when all of the output has come."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._feed, stdin)
            await self._listen()
            group.cancel_scope.cancel()
        if "exit" in self._told:
            await self._stream.drain(self._sink)
            return self._told["exit"]
        return await self._site.calls.run(self._code_of_dead)

    async def _feed(self, stdin: bytes) -> None:
        try:
            await self._wire.send(stdin)
        except SandboxError:
            return  # whoever listens notices
        self._wire.end_input()

    async def _listen(self) -> None:
        """Until the end has been reported, or cannot be any more."""
        while "kills" not in self._told:
            try:
                word, _, value = (await self._stream.line(self._sink)).partition(" ")
            except SandboxError:
                return
            if value.isdigit():
                self._told[word] = int(value)

    def _code_of_dead(self) -> int:
        """Of a program whose wrapper was ended, or was never started."""
        daemon, container = self._site.daemon, self._site.container
        said = self._sink.text()[0].strip()
        if not daemon.exists(container):
            raise SandboxError("the sandbox has ended")
        if "pid" in self._told:
            return daemon.exec_code(self._identity) or _KILLED
        if _LIMIT_REACHED in said or (_REFUSED in said and daemon.counters(container).is_full):
            return _NOT_RUN
        raise SandboxError(f"no program could be started: {said}")

    async def end(self) -> None:
        """Kill whatever of it may still be running."""
        try:
            may_run = self._begun or (self._asked and not self._wire.unsent)
            if may_run and "exit" not in self._told and not self._stream.ended:
                async with self._site.awake():
                    await self._kill()
        finally:
            self._stream.close()

    async def _kill(self) -> None:
        patience_s = _PATIENCE_S
        with anyio.move_on_after(_END_S):
            while "exit" not in self._told and not self._stream.ended:
                await self._site.order(f"stop {self._stream.mark} {self._told.get('pid', 0)}")
                with anyio.move_on_after(patience_s):
                    await self._listen()
                patience_s *= 4  # where an order takes long, many would keep the relay from the shell's
            return
        raise SandboxError("a program could not be ended")

    def result(self, code: int | None, elapsed_s: float) -> ShellResult:
        output, cut_bytes = self._sink.text()
        out_of_memory = self._told.get("kills", 0) > 0
        return ShellResult(code, output, cut_bytes, elapsed_s, out_of_memory=out_of_memory)
