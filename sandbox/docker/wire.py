"""A connection to the daemon's socket that an HTTP request has turned into a stream of bytes.

The daemon sends frames: eight bytes (1 for stdout or 2 for stderr, three zeros, the length), then content.
"""

import json
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from http import HTTPStatus

import anyio

from sostenuto.errors import SandboxError

STDOUT, STDERR = 1, 2
_CHUNK_BYTES = 65536
_HEAD_BYTES = 65536
_FRAME_HEAD_BYTES = 8


class Frames:
    """Takes a stream apart as it comes."""

    def __init__(self) -> None:
        self._head = b""
        self._kind = STDOUT
        self._left = 0
        """Bytes of the present frame that have not come yet."""

    def feed(self, data: bytes) -> Generator[tuple[int, bytes]]:
        """The content in `data`, each piece with its stream."""
        while data:
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                self._left -= len(piece)
                yield self._kind, piece
                continue
            need = _FRAME_HEAD_BYTES - len(self._head)
            self._head, data = self._head + data[:need], data[need:]
            if len(self._head) == _FRAME_HEAD_BYTES:
                self._kind, self._left = self._head[0], int.from_bytes(self._head[4:], "big")
                self._head = b""


class Wire:
    """Owns its socket; `close` is idempotent.  Methods raise SandboxError once the far end is gone."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._early = b""
        """What came together with the head of the reply."""
        self._outgoing = bytearray()
        """Always whole messages: whoever is cut short while sending leaves the rest to the next one."""
        self._sending = anyio.Lock()
        self._closed = False
        try:
            self._socket.connect(path)
        except OSError as exc:
            self.close()
            raise SandboxError(f"the docker daemon at {path} cannot be reached: {exc}") from exc

    async def upgrade(self, target: str, body: dict[str, object] | None = None) -> None:
        """Ask for `target` and for the stream instead of an answer.

        Where no body is called for there must be none: Podman gives it to the process.
        """
        content = b"" if body is None else json.dumps(body).encode()
        await self.send(
            f"POST {target} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        head, self._early = await self._reply_head()
        status = int(head.split(b" ", 2)[1])
        if status not in {HTTPStatus.SWITCHING_PROTOCOLS, HTTPStatus.OK}:
            said = (self._early or await self.receive()).decode(errors="replace")
            raise SandboxError(f"the docker daemon refused with {status}: {said.strip()}")

    async def _reply_head(self) -> tuple[bytes, bytes]:
        seen = b""
        while b"\r\n\r\n" not in seen:
            chunk = await self.receive()
            seen += chunk
            if not chunk or len(seen) > _HEAD_BYTES:
                raise SandboxError(f"the docker daemon answered with no HTTP: {seen[:100]!r}")
        head, _, rest = seen.partition(b"\r\n\r\n")
        return head, rest

    @property
    def ended(self) -> bool:
        """Whether the far end is known to be gone."""
        if self._closed:
            return True
        with suppress(BlockingIOError):
            try:
                return not self._early and not self._socket.recv(1, socket.MSG_PEEK)
            except OSError as exc:
                if isinstance(exc, BlockingIOError):
                    raise
                return True
        return False

    @property
    def unsent(self) -> bool:
        return bool(self._outgoing)

    async def send(self, data: bytes) -> None:
        self._outgoing += data
        async with self._sending:
            while self._outgoing:
                try:
                    del self._outgoing[: self._socket.send(self._outgoing[:_CHUNK_BYTES])]
                except BlockingIOError:
                    await self._wait(anyio.wait_writable)
                except OSError as exc:
                    raise SandboxError("the sandbox has ended") from exc

    async def receive(self) -> bytes:
        """What comes next; nothing at the end."""
        early, self._early = self._early, b""
        while not early and not self._closed:
            try:
                return self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                await self._wait(anyio.wait_readable)
            except OSError:
                break
        return early

    async def _wait(self, for_what: Callable[[socket.socket], Awaitable[None]]) -> None:
        with suppress(anyio.ClosedResourceError):
            await for_what(self._socket)

    def end_input(self) -> None:
        """Nothing more will be sent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._socket.fileno() >= 0:
                with suppress(RuntimeError):
                    anyio.notify_closing(self._socket)
            self._socket.close()
