"""What crosses between the tool server and a worker: msgpack frames, each after its length.

Both sides ask and answer over one stream socket.  A request has an id of its sender's; `Reply`, `Failure`
and `Cancel` name that id.  Several requests are under way at a time; answers come in any order.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import TypeVar, cast

import msgspec

from sostenuto.errors import (
    ConfigError,
    EnvironmentFailure,
    JudgeError,
    PathError,
    SandboxError,
    ToolError,
    ToolServerError,
    Unsupported,
)
from sostenuto.sandbox.protocol import Blueprint
from sostenuto.tools.setup import Setup
from sostenuto.types import Episode

T = TypeVar("T")

MAX_FRAME_BYTES = 256 << 20
MOST_BYTES = MAX_FRAME_BYTES - (1 << 20)
"""Of the content of one frame, besides names and paths."""
_LENGTH = struct.Struct(">I")
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        ConfigError, EnvironmentFailure, JudgeError, PathError, SandboxError, ToolError, ToolServerError,
        Unsupported,
        FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError, ValueError,
    )
}  # fmt: skip


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: int


class Hello(Frame, frozen=True, tag=True):
    """The first frame to a worker."""

    secrets: dict[str, str]
    import_paths: list[str]


class Load(Frame, frozen=True, tag=True):
    """Answered with Declared."""

    environment: int
    """How later frames name it."""
    ref_json: bytes


class Prepare(Frame, frozen=True, tag=True):
    """Answered with the conversation's first messages; with none when it resumes."""

    program_id: str
    environment: int
    task_json: bytes
    seed: int
    timeout_s: float
    has_sandbox: bool
    state_json: bytes | None
    """What Save was answered with, to resume from; None: `reset` is run."""


class Save(Frame, frozen=True, tag=True):
    """Answered with JSON of what the environment resumes from."""

    program_id: str
    timeout_s: float


class Call(Frame, frozen=True, tag=True):
    """Answered with a ToolResult."""

    program_id: str
    name: str
    arguments: str


class Score(Frame, frozen=True, tag=True):
    """Answered with a Verdict."""

    program_id: str
    episode: Episode
    timeout_s: float


class Release(Frame, frozen=True, tag=True):
    """Answered with what went wrong in `close`, or nothing."""

    program_id: str


class Ping(Frame, frozen=True, tag=True):
    """Answered at once by a loop that turns."""


class Shell(Frame, frozen=True, tag=True):
    """To the server: use the sandbox lent to a program.  Answered with a ShellResult."""

    program_id: str
    command: str
    timeout_s: float
    output_bytes: int


class Exec(Frame, frozen=True, tag=True):
    """Answered with a ShellResult."""

    program_id: str
    argv: tuple[str, ...]
    stdin: bytes
    timeout_s: float
    output_bytes: int


class Read(Frame, frozen=True, tag=True):
    program_id: str
    path: str
    max_bytes: int


class Write(Frame, frozen=True, tag=True):
    program_id: str
    path: str
    content: bytes


class Upload(Frame, frozen=True, tag=True):
    program_id: str
    path: str
    archive: bytes


class Download(Frame, frozen=True, tag=True):
    """Answered with a tar."""

    program_id: str
    path: str
    max_bytes: int


class Reply(Frame, frozen=True, tag=True):
    value: msgspec.Raw


class Failure(Frame, frozen=True, tag=True):
    error: str
    message: str


class Cancel(Frame, frozen=True, tag=True):
    """Stop working on a request.  It is answered all the same."""


Lent = Shell | Exec | Read | Write | Upload | Download
"""What a worker asks of the sandboxes that are lent to its programs."""
Request = Hello | Load | Prepare | Save | Call | Score | Release | Ping | Lent


class Declared(msgspec.Struct, frozen=True):
    """What an environment class declares, and which of its methods run in threads."""

    blueprint: Blueprint | None
    tools_json: bytes
    remote_json: bytes
    blocking: tuple[str, ...]
    setup: Setup


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Request | Reply | Failure | Cancel)


class Channel(asyncio.Protocol):
    """One side of the socket.

    Writes are not held back: what can pile up is bounded by the requests under way.
    """

    def __init__(
        self,
        on_request: Callable[[Request | Cancel], None],
        on_settled: Callable[[int], None] = lambda _: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_request = on_request
        self._on_settled = on_settled
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._last_id = 0

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def post(self, request: Request) -> "asyncio.Future[msgspec.Raw]":
        """Send a request; the future has its answer."""
        self.send(request)
        future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        return future

    async def ask(self, request: Request, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """Send a request and return its answer, or raise the error of the other side."""
        return await self.answer(request.id, self.post(request), decoder)

    async def answer(
        self, request_id: int, future: "asyncio.Future[msgspec.Raw]", decoder: msgspec.msgpack.Decoder[T]
    ) -> T:
        """Wait for what `post` will get.  A caller that is cancelled cancels the work on the other side."""
        try:
            return decoder.decode(await future)
        except asyncio.CancelledError:
            self.send(Cancel(request_id))
            raise

    def send(self, frame: Request | Reply | Failure | Cancel) -> None:
        """Write a frame; silently nothing when the other side is gone, which `on_lost` tells."""
        data = _encoder.encode(frame)
        if len(data) > MAX_FRAME_BYTES:
            raise ToolServerError(f"{type(frame).__name__} of {len(data)} bytes is over {MAX_FRAME_BYTES}")
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def reply(self, request_id: int, value: object) -> None:
        self.send(Reply(request_id, msgspec.Raw(_encoder.encode(value))))

    def fail(self, request_id: int, error: Exception) -> None:
        """Answer with an error; a type that the other side does not know becomes part of the text."""
        name, message = type(error).__name__, str(error)
        text = message if name in _ERRORS else f"{name}: {message}"
        self.send(Failure(request_id, name, text.encode(errors="replace").decode()))

    def fail_waiting(self, error_for: Callable[[int], Exception]) -> None:
        """Give up every request under way."""
        for request_id in list(self._waiting):
            self._settle(request_id, error_for(request_id))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                data = bytes(view[start + _LENGTH.size : end])
            self._receive(data)
            start = end
        del self._buffer[:start]

    def _receive(self, data: bytes) -> None:
        frame = _decoder.decode(data)
        match frame:
            case Reply():
                self._settle(frame.id, frame.value)
            case Failure():
                self._settle(frame.id, _ERRORS.get(frame.error, SandboxError)(frame.message))
            case _:
                self._on_request(frame)

    def _settle(self, request_id: int, outcome: msgspec.Raw | Exception) -> None:
        future = self._waiting.pop(request_id, None)
        if future is not None and not future.done():
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        self._on_settled(request_id)
