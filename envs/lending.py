"""The server's side of `self.sandbox`: uses the sandboxes lent to programs for the worker that asks."""

import anyio
from anyio.abc import TaskGroup

from sostenuto.envs.frames import Cancel, Channel, Read, Request, Shell, Write
from sostenuto.errors import SandboxError, ToolServerError
from sostenuto.sandbox.protocol import Sandbox


class Lending:
    """Serves the requests of one worker; a program that gave its sandbox back has none."""

    def __init__(self, channel: Channel, group: TaskGroup) -> None:
        self._channel = channel
        self._group = group
        self._sandboxes: dict[str, Sandbox] = {}
        self._serving: dict[int, tuple[str, anyio.CancelScope]] = {}

    def lend(self, program_id: str, sandbox: Sandbox) -> None:
        self._sandboxes[program_id] = sandbox

    def take_back(self, program_id: str) -> None:
        """End what the program still does in its sandbox, and refuse it from now on."""
        self._sandboxes.pop(program_id, None)
        for owner, scope in list(self._serving.values()):
            if owner == program_id:
                scope.cancel()

    def take_back_all(self) -> None:
        for program_id in list(self._sandboxes):
            self.take_back(program_id)

    def receive(self, frame: Request | Cancel) -> None:
        """Begin to serve a request, or cancel one."""
        if isinstance(frame, Cancel):
            if frame.id in self._serving:
                self._serving[frame.id][1].cancel()
        elif isinstance(frame, Shell | Read | Write):
            scope = anyio.CancelScope()
            self._serving[frame.id] = (frame.program_id, scope)
            self._group.start_soon(self._serve, frame, scope)
        else:
            self._channel.fail(
                frame.id, ToolServerError(f"the server does not answer {type(frame).__name__}")
            )

    async def _serve(self, frame: Shell | Read | Write, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                self._channel.reply(frame.id, await self._use(frame))
            if scope.cancelled_caught:
                self._channel.fail(frame.id, SandboxError(f"program {frame.program_id}: cancelled"))
        # The boundary to whatever backend runs the sandbox: its error is the environment's to see.
        except Exception as error:  # noqa: BLE001
            self._channel.fail(frame.id, error)
        finally:
            del self._serving[frame.id]

    async def _use(self, frame: Shell | Read | Write) -> object:
        sandbox = self._sandboxes.get(frame.program_id)
        if sandbox is None:
            raise SandboxError(f"program {frame.program_id} has no sandbox any more")
        match frame:
            case Shell():
                return await sandbox.shell(
                    frame.command, timeout_s=frame.timeout_s, output_bytes=frame.output_bytes
                )
            case Read():
                return await sandbox.read(frame.path, max_bytes=frame.max_bytes)
            case Write():
                return await sandbox.write(frame.path, frame.content)
