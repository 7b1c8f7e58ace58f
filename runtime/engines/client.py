"""Speaking to an engine process, and keeping one.

- Every call ends by its deadline, and every failure is an EngineError with engine, call and remedy.
- Cancelling `generate` closes its connection, which aborts the request in the engine.
- `launch_embedded` leaves no process behind: it ends the engine by its pid, and the engine ends itself
  when its standard input closes, which also happens when this process is killed.
"""

import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Self, TypeVar

import aiohttp
import anyio
from anyio.abc import Process
from pydantic import BaseModel, ValidationError

from sostenuto.errors import EngineError, EngineKilled, VersionRefused
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.http import HttpRefusal
from sostenuto.runtime.engines.wire import (
    ERROR_LINE,
    REPLY_LINE,
    SPAN_LINE,
    AdapterReply,
    AdapterRequest,
    Capabilities,
    CommitReply,
    CommitRequest,
    GenerateReply,
    GenerateRequest,
    Load,
    PauseMode,
    ScoreReply,
    ScoreRequest,
    Spans,
    WireSpan,
)
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import EngineId, ProgramId

Tap = Callable[[str, bytes, bytes], None]
"""Called with (request id, request body, reply body) of each `generate`: the bytes on the socket."""

Reply = TypeVar("Reply", bound=BaseModel)

_STOP_S = 5.0
_LOG_LINES = 12
_SHOWN_BYTES = 80
_MOMENTS, _MOMENT_S = 10, 0.05


class EngineClient:
    """Implements `Engine` over a Unix socket.

    async with EngineClient(EngineId("e0"), socket) as engine:
        reply = await engine.generate(request)
    """

    def __init__(
        self,
        engine_id: EngineId,
        socket: Path,
        *,
        control_timeout_s: float = 30.0,
        generate_timeout_s: float = 3600.0,
        tap: Tap | None = None,
        diagnose: Callable[[], str] = str,
        ended: Callable[[], Awaitable[object]] = anyio.sleep_forever,
    ) -> None:
        self.engine_id = engine_id
        self._socket = socket
        self._control_s = control_timeout_s
        self._generate_s = generate_timeout_s
        self._tap = tap
        self._diagnose = diagnose
        """What is known about a process that does not answer."""
        self._ended = ended
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # No limit: a request that waits for a connection would wait outside every queue that is counted.
        connector = aiohttp.UnixConnector(path=str(self._socket), limit=0)
        no_timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=no_timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def until_ended(self) -> str:
        """Wait for the end of the process that was launched with this client; why it ended."""
        await self._ended()
        return f"engine {self.engine_id}: {self._diagnose()}"

    async def capabilities(self) -> Capabilities:
        return self._read(Capabilities, await self._call("GET", "capabilities"))

    async def load(self) -> Load:
        return self._read(Load, await self._call("GET", "load"))

    async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
        """Sample one turn.  A cancelled call aborts the request in the engine.

        `spans` is called with tokens as they come; all of them are in the reply, too.  A stream that breaks
        is an EngineError: what it told is no turn.
        """
        sent = _encoded(request)
        if spans is None:
            received = await self._call("POST", "generate", sent, within_s=self._generate_s)
            return self._replied(request, sent, received)
        received, told = await self._stream(sent, spans)
        reply = self._replied(request, sent, received)
        if len(reply.token_ids) != told:
            raise self._broken_stream(told, f"its reply has {len(reply.token_ids)}")
        return reply

    def _replied(self, request: GenerateRequest, sent: bytes, received: bytes) -> GenerateReply:
        if self._tap is not None:
            self._tap(request.request_id, sent, received)
        return self._read(GenerateReply, received)

    async def abort(self, request_id: str) -> None:
        """End one request early; its `generate` answers with the tokens it has."""
        await self._call("POST", "abort", json.dumps({"request_id": request_id}).encode())

    async def release(self, program_id: ProgramId) -> None:
        """Give up the KV of a program.  Idempotent."""
        await self._call("POST", "release", json.dumps({"program_id": program_id}).encode())

    async def offload(self, program_id: ProgramId) -> None:
        """Move a program's held KV to the lower tier; its next `generate` finds it there.  Idempotent."""
        await self._call("POST", "offload", json.dumps({"program_id": program_id}).encode())

    async def restore(self, program_id: ProgramId) -> None:
        """Bring it back ahead of its turn, when there is room.  Idempotent."""
        await self._call("POST", "restore", json.dumps({"program_id": program_id}).encode())

    async def pause(self, mode: PauseMode) -> None:
        """Let new requests wait; returns when those that run are as the mode says.  Idempotent.

        FINISH waits for whole turns, so its deadline is that of `generate`.
        """
        within_s = self._generate_s if mode is PauseMode.FINISH else self._control_s
        await self._call("POST", "pause", json.dumps({"mode": mode}).encode(), within_s=within_s)

    async def resume(self) -> None:
        """Go on.  Idempotent."""
        await self._call("POST", "resume", b"{}")

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Log-probabilities of given tokens; waits its turn, so its deadline is that of `generate`."""
        received = await self._call("POST", "score", _encoded(request), within_s=self._generate_s)
        return self._read(ScoreReply, received)

    async def prepare_update(self, manifest: Manifest) -> None:
        """Copy and verify the new weights beside the old; decoding goes on."""
        await self._call("POST", "update/prepare", _encoded(manifest))

    async def commit_update(self, request: CommitRequest) -> CommitReply:
        """Swap to the prepared version between two steps."""
        return self._read(CommitReply, await self._call("POST", "update/commit", _encoded(request)))

    async def abandon_update(self, version: str) -> None:
        """Forget what was prepared.  Idempotent."""
        await self._call("POST", "update/abandon", json.dumps({"version": version}).encode())

    async def load_adapter(self, request: AdapterRequest) -> AdapterReply:
        """Serve a LoRA adapter to new requests that name it."""
        return self._read(AdapterReply, await self._call("POST", "adapters/load", _encoded(request)))

    async def unload_adapter(self, name: str) -> None:
        """Forget it; requests that run on it go on.  Idempotent."""
        await self._call("POST", "adapters/unload", json.dumps({"name": name}).encode())

    async def flush(self) -> None:
        """Drop every KV that no request runs on."""
        await self._call("POST", "flush", b"{}")

    async def _stream(self, sent: bytes, spans: Spans) -> tuple[bytes, int]:
        """Tell the spans as they come; returns the reply, and how many tokens were told."""
        told = 0
        async with (
            self._asked("POST", "generate?stream=1", sent, self._generate_s) as response,
            aclosing(_lines(response.content)) as lines,
        ):
            async for line in lines:
                if not line.endswith(b"}\n"):
                    raise self._broken_stream(told, f"a line is only {line[:_SHOWN_BYTES]!r}")
                if line.startswith(REPLY_LINE):
                    return line[len(REPLY_LINE) : -2], told
                if line.startswith(ERROR_LINE):
                    raise self._refused(response.status, line, "generate")
                span = self._span(line, told)
                told += len(span.token_ids)
                spans(span)
        raise self._broken_stream(told, "it ended without a reply")

    def _refused(self, status: int, content: bytes, route: str) -> EngineError:
        said, code = _refusal(status, content)
        message = f"{self._where(route)}: {said}"
        is_of_version = route == "generate" and code == "version"
        return VersionRefused(message) if is_of_version else HttpRefusal(message, status=status, said=said)

    def _span(self, line: bytes, told: int) -> WireSpan:
        try:
            return WireSpan.model_validate_json(line[:-2].removeprefix(SPAN_LINE))
        except ValidationError as exc:
            raise self._broken_stream(told, f"a line is no span: {line[:_SHOWN_BYTES]!r}") from exc

    def _broken_stream(self, told: int, what: str) -> EngineError:
        return EngineError(
            f"{self._where('generate')}: the stream broke after {told} tokens: {what}; "
            "send the request again, and look into the engine's log"
        )

    async def _call(
        self, method: str, route: str, body: bytes | None = None, *, within_s: float | None = None
    ) -> bytes:
        limit_s = self._control_s if within_s is None else within_s
        async with self._asked(method, route, body, limit_s) as response:
            return await response.read()

    @asynccontextmanager
    async def _asked(
        self, method: str, route: str, body: bytes | None, limit_s: float
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """A response of status 200; EngineError for any other end, also while it is read."""
        if self._session is None or self._session.closed:
            raise EngineError(f"{self._where(route)}: the client is not open; use `async with`")
        try:
            with anyio.fail_after(limit_s):
                async with self._session.request(method, f"http://engine/{route}", data=body) as response:
                    if response.status != 200:
                        raise self._refused(response.status, await response.read(), route.partition("?")[0])
                    yield response
        except TimeoutError as exc:
            remedy = "look into its log, or allow it more time"
            raise EngineError(f"{self._where(route)}: no answer within {limit_s:g} s; {remedy}") from exc
        except (aiohttp.ClientError, OSError) as exc:
            reason = await self._reason() or f"{type(exc).__name__}: {exc}; is the engine running?"
            raise EngineError(f"{self._where(route)}: {reason}") from exc

    async def _reason(self) -> str:
        """What is known of the process; its connection ends a moment before its exit status is known."""
        for _ in range(_MOMENTS):
            if reason := self._diagnose():
                return reason
            await anyio.sleep(_MOMENT_S)
        return ""

    def _read(self, reply: type[Reply], content: bytes) -> Reply:
        try:
            return reply.model_validate_json(content)
        except ValidationError as exc:
            raise EngineError(f"engine {self.engine_id}: answered with no {reply.__name__}: {exc}") from exc

    def _where(self, route: str) -> str:
        return f"engine {self.engine_id}: {route}"


@asynccontextmanager
async def launch_embedded(
    settings: EmbeddedSettings,
    *,
    engine_id: EngineId,
    ready_timeout_s: float = 180.0,
    control_timeout_s: float = 30.0,
    generate_timeout_s: float = 3600.0,
    tap: Tap | None = None,
) -> AsyncGenerator[EngineClient]:
    """Start an engine process, wait until it serves, and end it on the way out.

    Its log is the socket's path with `.log` added.  EngineError when it refuses to start or dies.
    """
    log = settings.socket.with_name(settings.socket.name + ".log")
    process = await _spawn(settings, log)
    try:
        await _ready_within(ready_timeout_s, process, engine_id, log)
        client = EngineClient(
            engine_id,
            settings.socket,
            control_timeout_s=control_timeout_s,
            generate_timeout_s=generate_timeout_s,
            tap=tap,
            diagnose=lambda: _obituary(process, log),
            ended=process.wait,
        )
        async with client:
            yield client
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _spawn(settings: EmbeddedSettings, log: Path) -> Process:
    command = [sys.executable, "-m", "sostenuto.runtime.engines.embedded", *settings.arguments()]
    environment = {
        **os.environ,
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(settings.threads),
        "HF_HUB_OFFLINE": "1",
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stderr:
        return await anyio.open_process(
            [*command, "--until-stdin-closes"], stdin=subprocess.PIPE, stderr=stderr, env=environment,
            # Ctrl-C is for the runtime, which ends its engines in its own order.
            start_new_session=True,
        )  # fmt: skip


async def _ready_within(limit_s: float, process: Process, engine_id: EngineId, log: Path) -> None:
    try:
        with anyio.fail_after(limit_s):
            await _ready(process, engine_id, log)
    except TimeoutError as exc:
        raise EngineError(f"engine {engine_id}: not ready within {limit_s:g} s{_last(log)}") from exc


async def _ready(process: Process, engine_id: EngineId, log: Path) -> None:
    """Return when the engine serves; raise EngineError with its refusal, or with its log."""
    assert process.stdout is not None
    received = bytearray()
    while b"\n" not in received:
        try:
            received += await process.stdout.receive()
        except anyio.EndOfStream:
            code = await process.wait()
            kind = EngineKilled if code < 0 else EngineError
            raise kind(f"engine {engine_id}: {_obituary(process, log)}") from None
    line = json.loads(received)
    if "ready" not in line:
        raise EngineError(f"engine {engine_id}: start: {line['message']}; {line['remedy']}")


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(_STOP_S):
            await process.wait()
    if process.returncode is None:
        process.kill()
    await process.aclose()


def _obituary(process: Process, log: Path) -> str:
    """How the process ended and its last words; empty while it runs."""
    if process.returncode is None:
        return ""
    return f"its process ended with status {process.returncode}; start it again{_last(log)}"


def _last(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else []
    return f"; the end of {log}:\n" + "\n".join(lines) if lines else f"; {log} is empty"


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Lines with their ends; the last one may be without.  `readline` would refuse a long one."""
    pending = bytearray()
    async for piece in content.iter_any():
        pending += piece
        if b"\n" in piece:
            *whole, rest = pending.split(b"\n")
            for line in whole:
                yield bytes(line) + b"\n"
            pending = rest
    if pending:
        yield bytes(pending)


def _encoded(body: BaseModel) -> bytes:
    return body.model_dump_json().encode()


def _refusal(status: int, content: bytes) -> tuple[str, str]:
    """Its words, and what programs tell it by."""
    try:
        refusal = json.loads(content)
        code = str(refusal["error"])
        return f"refused ({status}, {code}): {refusal['message']}; {refusal['remedy']}", code
    except (ValueError, KeyError, TypeError):
        return f"answered {status}: {content[:200].decode(errors='replace')}", ""
