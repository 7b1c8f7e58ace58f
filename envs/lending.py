"""The server's side of `self.sandbox`: uses the sandboxes lent to programs for the worker that asks."""

from collections.abc import Callable
from typing import assert_never

from sostenuto.envs.cancellation import Cancellable
from sostenuto.envs.frames import (
    MOST_BYTES,
    Cancel,
    Channel,
    Download,
    Exec,
    Lent,
    Read,
    Request,
    Shell,
    Upload,
    Write,
)
from sostenuto.errors import SandboxError, ToolServerError
from sostenuto.sandbox.protocol import Sandbox


class Lending:
    """Serves the requests of one worker; a program that gave its sandbox back has none."""

    def __init__(self, channel: Channel, start_soon: Callable[..., None]) -> None:
        self._channel = channel
        self._start_soon = start_soon
        self._sandboxes: dict[str, Sandbox] = {}
        self._serving: dict[int, Cancellable] = {}

    def lend(self, program_id: str, sandbox: Sandbox) -> None:
        self._sandboxes[program_id] = sandbox

    def take_back(self, program_id: str) -> None:
        """End what the program still does in its sandbox, and refuse it from now on."""
        self._sandboxes.pop(program_id, None)
        for work in list(self._serving.values()):
            if work.program_id == program_id:
                work.cancel()

    def take_back_all(self) -> None:
        for program_id in list(self._sandboxes):
            self.take_back(program_id)

    def receive(self, frame: Request | Cancel) -> None:
        """Begin to serve a request, or cancel one."""
        if isinstance(frame, Cancel):
            if frame.id in self._serving:
                self._serving[frame.id].cancel()
        elif isinstance(frame, Lent):
            work = self._serving[frame.id] = Cancellable(frame.program_id)
            self._start_soon(self._serve, frame, work)
        else:
            self._channel.fail(
                frame.id, ToolServerError(f"the server does not answer {type(frame).__name__}")
            )

    async def _serve(self, frame: Lent, work: Cancellable) -> None:
        try:
            with work.scope() as scope:
                self._channel.reply(frame.id, await self._use(frame))
            if scope.cancelled_caught:
                self._channel.fail(frame.id, SandboxError(f"program {frame.program_id}: cancelled"))
        # The boundary to whatever backend runs the sandbox: its error is the environment's to see.
        except Exception as error:  # noqa: BLE001
            self._channel.fail(frame.id, error)
        finally:
            del self._serving[frame.id]

    async def _use(self, frame: Lent) -> object:
        sandbox = self._sandboxes.get(frame.program_id)
        if sandbox is None:
            raise SandboxError(f"program {frame.program_id} has no sandbox any more")
        match frame:
            case Shell():
                return await sandbox.shell(
                    frame.command, timeout_s=frame.timeout_s, output_bytes=_fitting(frame.output_bytes)
                )
            case Exec():
                return await sandbox.exec(
                    frame.argv,
                    stdin=frame.stdin,
                    timeout_s=frame.timeout_s,
                    output_bytes=_fitting(frame.output_bytes),
                )
            case Read():
                return await sandbox.read(frame.path, max_bytes=_fitting(frame.max_bytes))
            case Write():
                return await sandbox.write(frame.path, frame.content)
            case Upload():
                return await sandbox.upload(frame.archive, frame.path)
            case Download():
                return await sandbox.download(frame.path, max_bytes=_fitting(frame.max_bytes))
            case _:
                assert_never(frame)


def _fitting(wanted_bytes: int) -> int:
    """No more than an answer can carry, so that nothing larger is gathered for one."""
    return min(wanted_bytes, MOST_BYTES)
