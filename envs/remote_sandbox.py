"""The sandbox that the server lent to a program, as its environment sees it, in another process."""

from collections.abc import Sequence
from typing import IO

import msgspec

from sostenuto.envs.frames import Channel, Download, Exec, Read, Shell, Upload, Write
from sostenuto.errors import ToolServerError
from sostenuto.sandbox.protocol import SandboxUsage, ShellResult, Snapshot

_SHELL_RESULT = msgspec.msgpack.Decoder(ShellResult)
_BYTES = msgspec.msgpack.Decoder(bytes)
_NONE = msgspec.msgpack.Decoder(type(None))


class RemoteSandbox:
    """See `sostenuto.sandbox.protocol.Sandbox`; its rungs are the tool server's to decide."""

    def __init__(self, channel: Channel, program_id: str) -> None:
        self._channel = channel
        self._program_id = program_id

    async def shell(self, command: str, *, timeout_s: float, output_bytes: int = 65536) -> ShellResult:
        frame = Shell(self._channel.next_id(), self._program_id, command, timeout_s, output_bytes)
        return await self._channel.ask(frame, _SHELL_RESULT)

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, output_bytes: int = 65536
    ) -> ShellResult:
        frame = Exec(
            self._channel.next_id(), self._program_id, tuple(argv), stdin, timeout_s, output_bytes
        )  # fmt: skip
        return await self._channel.ask(frame, _SHELL_RESULT)

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        frame = Read(self._channel.next_id(), self._program_id, path, max_bytes)
        return await self._channel.ask(frame, _BYTES)

    async def write(self, path: str, data: bytes) -> None:
        await self._channel.ask(Write(self._channel.next_id(), self._program_id, path, data), _NONE)

    async def upload(self, archive: bytes | IO[bytes], path: str = ".") -> None:
        content = archive if isinstance(archive, bytes) else archive.read()
        await self._channel.ask(Upload(self._channel.next_id(), self._program_id, path, content), _NONE)

    async def download(self, path: str = ".", *, max_bytes: int = 64 << 20) -> bytes:
        frame = Download(self._channel.next_id(), self._program_id, path, max_bytes)
        return await self._channel.ask(frame, _BYTES)

    async def download_to(self, target: IO[bytes], path: str = ".", *, max_bytes: int) -> None:
        target.write(await self.download(path, max_bytes=max_bytes))

    async def snapshot(self) -> Snapshot:
        raise ToolServerError("a snapshot is taken by the tool server, not by an environment")

    async def usage(self) -> SandboxUsage:
        raise ToolServerError("a sandbox is measured by the tool server, not by an environment")

    async def is_quiet(self) -> bool:
        raise ToolServerError("a sandbox is moved by the tool server, not by an environment")

    async def reclaim(self) -> None:
        raise ToolServerError("a sandbox is reclaimed by the tool server, not by an environment")

    async def pause(self) -> None:
        raise ToolServerError("a sandbox is paused by the tool server, not by an environment")

    async def resume(self) -> None:
        raise ToolServerError("a sandbox is resumed by the tool server, not by an environment")

    async def stop(self) -> None:
        raise ToolServerError("a sandbox is stopped by the tool server, not by an environment")
