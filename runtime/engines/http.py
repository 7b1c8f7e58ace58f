"""Speaking HTTP to an engine that is not ours: deadlines, limits, and errors that say what to do.

- Every call ends by its deadline.  Every failure is an EngineError that names engine, call and remedy.
- A call is sent again, once, only where it says that it may be repeated and the connection was lost.
- Nothing that an engine sends is trusted: not its status, its size, its type, nor that it ends.
- The API key goes to this engine alone: no redirect is followed, and no error shows it.
"""

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import aiohttp
import anyio
from pydantic import BaseModel, ValidationError

from sostenuto.errors import EngineError
from sostenuto.types import EngineId

M = TypeVar("M", bound=BaseModel)

# Servers close what idles for a few seconds (uvicorn: 5); one that we drop first is never used as it closes.
_IDLE_S = 2.0
_SHOWN = 300
_IS_IT = "is this the engine's address?"
_ERRORS_SHOWN = 3
_LOST = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)
_REMEDIES = {
    401: "give the engine's API key",
    403: "give the engine's API key, or start the engine so that it allows this call",
    404: "is this the engine's address, and its version one that the adapter knows?",
    429: "send it fewer requests at once",
}


class HttpRefusal(EngineError):  # noqa: N818 - reads as the fact it states
    """The engine answered with another status than 200."""

    def __init__(self, message: str, *, status: int, said: str) -> None:
        super().__init__(message)
        self.status = status
        self.said = said
        """Its own words."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A body that came with status 200."""

    where: str
    """Engine and call, for errors."""
    content: bytes

    def read(self, model: type[M]) -> M:
        """The body as `model`; EngineError when it is anything else."""
        try:
            return model.model_validate_json(self.content)
        except ValidationError as error:
            raise EngineError(f"{self.where}: {_not_a(model, self.content, error)}") from error

    def text(self) -> str:
        try:
            return self.content.decode()
        except UnicodeDecodeError as error:
            raise EngineError(f"{self.where}: answered with bytes that are no text; {_IS_IT}") from error


class EventReader:
    """Server-sent events out of pieces of a body: the data of each, as it is complete."""

    def __init__(self, largest_bytes: int) -> None:
        self._largest = largest_bytes
        self._open = bytearray()
        """The beginning of a line that has not ended."""

    def feed(self, piece: bytes, where: str) -> list[bytes]:
        """EngineError when a line grows beyond the limit."""
        head, newline, tail = piece.rpartition(b"\n")
        if not newline:
            self._open += piece
            if len(self._open) > self._largest:
                raise _too_large(self._largest, where)
            return []
        lines = bytes(self._open + head).split(b"\n")
        self._open = bytearray(tail)
        return [line[len(b"data:") :].strip() for line in lines if line.startswith(b"data:")]


class EngineHttp:
    """One engine's HTTP address.

    async with EngineHttp(EngineId("e0"), "http://127.0.0.1:8000", kind="vllm") as http:
        version = (await http.get("/version")).read(VersionReply)
    """

    def __init__(
        self,
        engine_id: EngineId,
        url: str,
        *,
        kind: str,
        api_key: str = "",
        control_timeout_s: float = 30.0,
        largest_bytes: int = 256 << 20,
    ) -> None:
        """`url`: with or without a trailing `/v1`.  `largest_bytes`: of an answer, or of one event."""
        self.engine_id = engine_id
        self.url = url.rstrip("/").removesuffix("/v1")
        self.kind = kind
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._control_s = control_timeout_s
        self._largest = largest_bytes
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<EngineHttp {self.engine_id} {self.kind} {self.url}>"

    async def __aenter__(self) -> Self:
        # No limit: a request that waits for a connection would wait outside every queue that is counted.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)
        no_timeout = aiohttp.ClientTimeout(total=None, sock_connect=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=no_timeout, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        session, self._session = self._session, None
        if session is not None:
            # Who is cancelled still closes it: nobody else will.
            with anyio.CancelScope(shield=True):
                await session.close()

    async def get(
        self, route: str, *, query: Mapping[str, str] | None = None, within_s: float | None = None
    ) -> Answer:
        return await self._call("GET", route, None, query, within_s, repeatable=True)

    async def post(
        self,
        route: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        within_s: float | None = None,
        repeatable: bool = False,
    ) -> Answer:
        return await self._call("POST", route, body, query, within_s, repeatable=repeatable)

    async def stream(
        self,
        route: str,
        body: Mapping[str, Any],
        take: Callable[[Answer], None],
        *,
        within_s: float | None = None,
    ) -> None:
        """Hand each event of an answer in server-sent events to `take`, until `[DONE]`.

        EngineError when the answer ends without it.
        """
        where, events = self.where(route), EventReader(self._largest)
        async with self._answered("POST", route, body, None, within_s) as response:
            async for piece in response.content.iter_any():
                for data in events.feed(piece, where):
                    if data == b"[DONE]":
                        return
                    take(Answer(where, data))
        raise EngineError(f"{where}: the answer ended in the middle; look into the engine's log")

    def where(self, route: str) -> str:
        return f"engine {self.engine_id} ({self.kind} at {self.url}): {route}"

    async def _call(
        self,
        method: str,
        route: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str] | None,
        within_s: float | None,
        *,
        repeatable: bool,
    ) -> Answer:
        try:
            return await self._ask(method, route, body, query, within_s)
        except EngineError as error:
            if not repeatable or not isinstance(error.__cause__, _LOST):
                raise
        return await self._ask(method, route, body, query, within_s)

    async def _ask(
        self,
        method: str,
        route: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str] | None,
        within_s: float | None,
    ) -> Answer:
        async with self._answered(method, route, body, query, within_s) as response:
            return Answer(self.where(route), await self._content(response, self.where(route)))

    @asynccontextmanager
    async def _answered(
        self,
        method: str,
        route: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str] | None,
        within_s: float | None,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The response with status 200, until the deadline."""
        where = self.where(route)
        if self._session is None:
            raise EngineError(f"{where}: the client is not open; use `async with`")
        limit_s = self._control_s if within_s is None else within_s
        try:
            with anyio.fail_after(limit_s):
                async with self._session.request(
                    method, self.url + route, json=body, params=query, allow_redirects=False
                ) as response:
                    if response.status != 200:
                        raise _refusal(response.status, await self._content(response, where), where)
                    yield response
        except TimeoutError as error:
            remedy = "look into its log, or allow it more time"
            raise EngineError(f"{where}: no answer within {limit_s:g} s; {remedy}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{where}: {_broken(error)}") from error

    async def _content(self, response: aiohttp.ClientResponse, where: str) -> bytes:
        received = bytearray()
        async for piece in response.content.iter_any():
            received += piece
            if len(received) > self._largest:
                raise _too_large(self._largest, where)
        return bytes(received)


def _too_large(largest_bytes: int, where: str) -> EngineError:
    return EngineError(f"{where}: the answer has over {largest_bytes} bytes; ask for less at once")


def _refusal(status: int, content: bytes, where: str) -> HttpRefusal:
    said = _said(content)
    remedy = f"; {_REMEDIES[status]}" if status in _REMEDIES else ""
    return HttpRefusal(f"{where}: answered {status}: {said or 'nothing'}{remedy}", status=status, said=said)


def _said(content: bytes) -> str:
    """The words of an error, in the shapes that servers give them."""
    shown = content[:_SHOWN].decode(errors="replace")
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return shown
    for key in ("error", "message", "detail"):
        while isinstance(answer, dict) and key in answer:
            answer = answer[key]  # pyright: ignore[reportUnknownVariableType]
    return answer if isinstance(answer, str) else shown


def _not_a(model: type[BaseModel], content: bytes, error: ValidationError) -> str:
    if not content.strip():
        return "answered with nothing; look into the engine's log"
    if content.lstrip()[:1] == b"<":
        return f"answered with HTML, not JSON; {_IS_IT}"
    places = (f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors())
    shown = "; ".join([place for place, _ in zip(places, range(_ERRORS_SHOWN), strict=False)])
    return f"answered with no {model.__name__} ({shown}); is its version one that the adapter knows?"


def _broken(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.InvalidURL):
        return f"{error}; is the engine running there?"
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | ConnectionError):
        return f"the connection was lost ({type(error).__name__}: {error}); is the engine still running?"
    return f"{type(error).__name__}: {error}; {_IS_IT}"
