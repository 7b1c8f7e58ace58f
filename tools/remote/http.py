"""Tools that are HTTP requests.

- What the service says about the request (4xx) is for the policy; what says that the service does not work
  (429, 5xx, no connection, refused credentials) is tried again, if it may be, and then infrastructure.
- A redirect is followed on the declared origin only, so that headers with secrets go nowhere else.
- Nothing of one call is kept for the next: there are no cookies, and what may not be sent twice does not
  use a connection that may have died unseen.
"""

from contextlib import AsyncExitStack
from dataclasses import dataclass

import aiohttp
import anyio
from aiohttp.client_middlewares import ClientHandlerType
from pydantic import JsonValue
from pydantic_core import to_json
from yarl import URL

from sostenuto.errors import ToolServerError
from sostenuto.tools.remote.declared import HttpTool
from sostenuto.tools.remote.waiting import retry_after_s
from sostenuto.tools.secrets import Secrets
from sostenuto.types import ToolResult, ToolStatus

REDIRECTS = 5
PAUSE_S = 0.5
_CREDENTIALS = {401, 407}
_PASSING = {408, 425, 429}
_MOVED = {301, 302, 303, 307, 308}


class _Lost(aiohttp.ClientError):
    """The connection broke after the request was, or may have been, sent."""


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    text: str
    reason: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class _Failure:
    """One attempt that says nothing about the request."""

    why: str
    was_sent: bool
    retry_after_s: float | None = None


class HttpClient:
    """Connections of one tool server; an async context manager."""

    async def __aenter__(self) -> "HttpClient":
        self._stack = AsyncExitStack()
        self._kept = await self._stack.enter_async_context(_session(force_close=False))
        self._single = await self._stack.enter_async_context(_session(force_close=True))
        return self

    async def __aexit__(self, *exc: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._stack.aclose()

    def session(self, tool: HttpTool) -> aiohttp.ClientSession:
        return self._kept if tool.may_repeat else self._single


class HttpCaller:
    """Asks the service of one tool."""

    def __init__(self, tool: HttpTool, client: HttpClient, secrets: Secrets) -> None:
        """ConfigError for a header that names a secret which was not given."""
        self._tool = tool
        self._client = client
        where = f"HttpTool {tool.name!r}: header"
        self._headers = {name: secrets.fill(text, f"{where} {name}") for name, text in tool.headers.items()}

    async def ask(self, values: dict[str, JsonValue], ends_s: float) -> ToolResult:
        """What the service answered; ToolServerError when it does not work."""
        for attempt in range(self._tool.retries + 1):
            outcome = await self._attempt(values)
            if isinstance(outcome, ToolResult):
                return outcome
            pause_s = outcome.retry_after_s if outcome.retry_after_s is not None else PAUSE_S * 2**attempt
            may_repeat = self._tool.may_repeat or not outcome.was_sent
            if not may_repeat or attempt == self._tool.retries or anyio.current_time() + pause_s >= ends_s:
                raise ToolServerError(f"{self._tool.name}: {outcome.why} ({attempt + 1} attempts)")
            await anyio.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, values: dict[str, JsonValue]) -> ToolResult | _Failure:
        try:
            answer = await self._follow(values)
        except aiohttp.ClientConnectorError as error:
            return _Failure(f"no connection to {URL(self._tool.url).host}: {error}", was_sent=False)
        except (aiohttp.ClientError, OSError) as error:
            return _Failure(f"the connection was lost: {type(error).__name__}: {error}", was_sent=True)
        if answer.status in _CREDENTIALS:
            raise ToolServerError(
                f"{self._tool.name}: status {answer.status}: the service does not accept the credentials of "
                f"the tool server; look at `headers`"
            )
        if answer.status in _PASSING or answer.status >= 500:
            why = f"status {answer.status} {answer.reason}: {answer.text[:200]}"
            return _Failure(why, was_sent=True, retry_after_s=answer.retry_after_s)
        if answer.status >= 300:
            return ToolResult(ToolStatus.TOOL_ERROR, f"HTTP {answer.status} {answer.reason}\n{answer.text}")
        return ToolResult(ToolStatus.OK, answer.text)

    async def _follow(self, values: dict[str, JsonValue]) -> _Answer:
        """The answer at the end of the redirects that stay on the declared origin."""
        origin = URL(self._tool.url).origin()
        method, url, body = _request(self._tool, values)
        for _ in range(REDIRECTS + 1):
            request = self._client.session(self._tool).request(
                method, url, data=body, headers=self._headers | _content_type(body), allow_redirects=False
            )
            async with request as response:
                target = _target(response, method)
                if target is None:
                    return await self._read(response)
                if target.origin() != origin or target.user is not None:
                    return _refused(response, f"{target.host} is not the host of the tool: not followed")
                if response.status == 303:
                    method, body = "GET", None
                url = target
        return _Answer(310, f"more than {REDIRECTS} redirects", "too many redirects", None)

    async def _read(self, response: aiohttp.ClientResponse) -> _Answer:
        cap = self._tool.response_bytes
        data = bytearray()
        async for chunk in response.content.iter_chunked(65536):
            data += chunk
            if len(data) > cap:
                response.close()
                break
        text = _text(bytes(data[:cap]), response)
        if len(data) > cap:
            text += f"\n[... what came after {cap} bytes cut ...]"
        pause_s = retry_after_s(response.headers.get("Retry-After"))
        return _Answer(response.status, text, response.reason or "", pause_s)


def _session(*, force_close: bool) -> aiohttp.ClientSession:
    # Deadlines are those of the call, and how many run at once is a matter of its queue.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=force_close),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        middlewares=(_sent_once,),
    )


async def _sent_once(request: aiohttp.ClientRequest, handler: ClientHandlerType) -> aiohttp.ClientResponse:
    """Keep the library from sending a request again by itself, which it does for some methods."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise _Lost(str(error) or type(error).__name__) from error


def _request(tool: HttpTool, values: dict[str, JsonValue]) -> tuple[str, URL, bytes | None]:
    url = URL(tool.url)
    if tool.method not in {"GET", "DELETE"}:
        return tool.method, url, to_json(values)
    query = {
        name: value if isinstance(value, str) else to_json(value).decode() for name, value in values.items()
    }
    return tool.method, url.update_query(query), None


def _content_type(body: bytes | None) -> dict[str, str]:
    return {} if body is None else {"Content-Type": "application/json"}


def _target(response: aiohttp.ClientResponse, method: str) -> URL | None:
    """Where the service sends the request; None for an answer, and for a move that would change it."""
    location = response.headers.get("Location")
    keeps = method == "GET" or response.status in {303, 307, 308}
    if response.status not in _MOVED or not location or not keeps:
        return None
    try:
        target = response.url.join(URL(location))
    except ValueError:
        return None
    return target if target.scheme in {"http", "https"} and target.host else None


def _refused(response: aiohttp.ClientResponse, why: str) -> _Answer:
    return _Answer(response.status, f"redirected elsewhere: {why}", response.reason or "", None)


def _text(data: bytes, response: aiohttp.ClientResponse) -> str:
    kind = response.content_type
    is_text = kind.startswith("text/") or any(word in kind for word in ("json", "xml", "javascript", "form"))
    if not is_text and b"\x00" in data[:1024]:
        return f"[{len(data)} bytes of {kind}]"
    try:
        return data.decode(response.charset or "utf-8", errors="replace")
    except LookupError:  # a charset that nobody knows
        return data.decode(errors="replace")
