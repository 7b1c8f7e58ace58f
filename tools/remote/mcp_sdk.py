"""The `mcp` library, which is optional, behind what is needed of it."""

import asyncio
import json
import os
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from logging import getLogger
from typing import TYPE_CHECKING, cast

import anyio
from pydantic import JsonValue

from sostenuto.errors import ToolServerError, Unsupported
from sostenuto.types import ToolResult, ToolStatus

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectSendStream
    from mcp import Client
    from mcp.client._transport import ReadStream, TransportStreams
    from mcp.shared.message import SessionMessage
    from mcp.types import CallToolResult, ContentBlock

MOST_PAGES = 50
"""Of a list of tools."""
_LINE_CHARS = 500
_KEPT_LINES = 5

log = getLogger(__name__)


class Ended(Exception):  # noqa: N818 - reads as the fact it states
    """The session was over before the answer came."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is: at a url, or behind a command."""

    url: str | None
    command: tuple[str, ...]
    headers: dict[str, str] = field(repr=False)
    variables: dict[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool as the server describes it."""

    name: str
    description: str
    parameters: dict[str, JsonValue]


def check_installed() -> None:
    """Unsupported without the library."""
    if find_spec("mcp") is None:
        raise Unsupported("McpServer: the library is not installed; install sostenuto[mcp]")


@dataclass(slots=True, eq=False)
class Session:
    """An initialised one; any number of calls may run at once."""

    _client: "Client"
    _words: "LastWords"
    ended: anyio.Event

    async def offers(self) -> tuple[Offer, ...]:
        """All that the server lists."""
        found: list[Offer] = []
        cursor: str | None = None
        for _ in range(MOST_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            found += [
                Offer(
                    tool.name, tool.description or tool.name, cast("dict[str, JsonValue]", tool.input_schema)
                )
                for tool in page.tools
            ]
            cursor = page.next_cursor
            if cursor is None:
                break
        return tuple(found)

    async def call(self, name: str, values: dict[str, JsonValue]) -> ToolResult:
        """What the tool answered; Ended when the session was over first, ToolServerError for a broken one."""
        from mcp import MCPError, types

        try:
            return _result(await self._client.call_tool(name, values))
        except MCPError as error:
            if error.code in {types.CONNECTION_CLOSED, types.INVALID_REQUEST}:
                # Of a server behind a url this is how we learn that it knows the session no more.
                self.ended.set()
                raise Ended(str(error)) from error
            if error.code in {types.INTERNAL_ERROR, types.PARSE_ERROR, types.REQUEST_TIMEOUT}:
                raise ToolServerError(f"{name}: {error}") from error
            return ToolResult(ToolStatus.TOOL_ERROR, str(error))
        # What a server answers is checked against its own schemas, and that raises what it likes.
        except Exception as error:
            raise ToolServerError(f"{name}: {type(error).__name__}: {error}") from error

    def epitaph(self) -> str:
        return f"it ended; it wrote last: {self._words}" if self._words.lines else "it ended"


@asynccontextmanager
async def connect(place: Place) -> AsyncGenerator[Session]:
    """A session with the server at this place; ToolServerError when there is none to be had."""
    from mcp import Client

    words, ended = LastWords(), anyio.Event()
    try:
        async with words.listening() as stderr:
            transport = _over_http(place) if place.url else _over_pipes(place, stderr)
            async with Client(_watched(transport, ended), cache=None) as client:
                yield Session(client, words, ended)
    except BaseExceptionGroup as group:
        _, cancelled = group.split(Exception)
        if cancelled is not None:
            raise
        raise ToolServerError(_why(group, words)) from group
    except (ToolServerError, Ended):
        raise
    # Connecting runs a library over a network or a process, and that raises what it likes.
    except Exception as error:
        raise ToolServerError(_why(error, words)) from error


class LastWords(asyncio.Protocol):
    """Logs what a server writes to stderr, and keeps the end of it."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._rest = b""

    def __str__(self) -> str:
        return " | ".join(self.lines)

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[int]:
        """The file descriptor to write to."""
        reading, writing = os.pipe()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: self, os.fdopen(reading, "rb", buffering=0)
        )
        try:
            yield writing
        finally:
            os.close(writing)
            transport.close()

    def data_received(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_LINE_CHARS:]
        for line in lines:
            self.lines.append(line.decode(errors="replace")[:_LINE_CHARS])
            log.info("MCP server: %s", self.lines[-1])


def _over_pipes(place: Place, stderr: int) -> AbstractAsyncContextManager["TransportStreams"]:
    from mcp.client.stdio import StdioServerParameters, stdio_client

    command, *arguments = place.command
    parameters = StdioServerParameters(
        command=command, args=arguments, env=place.variables, encoding_error_handler="replace"
    )
    return stdio_client(parameters, errlog=os.fdopen(stderr, "w", closefd=False))


@asynccontextmanager
async def _over_http(place: Place) -> AsyncGenerator["TransportStreams"]:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    assert place.url is not None
    # The library follows redirects on the same origin itself, and no others.
    timeout = httpx2.Timeout(30.0, read=None)
    async with (
        httpx2.AsyncClient(headers=place.headers, timeout=timeout, trust_env=False) as client,
        streamable_http_client(place.url, http_client=client) as streams,
    ):
        yield streams


@asynccontextmanager
async def _watched(
    transport: AbstractAsyncContextManager["TransportStreams"], ended: anyio.Event
) -> AsyncGenerator["TransportStreams"]:
    """The transport, which sets `ended` when the other side is gone: the library tells only calls."""
    async with transport as (reading, writing), anyio.create_task_group() as group:
        sender, receiver = anyio.create_memory_object_stream["SessionMessage | Exception"](0)
        group.start_soon(_pump, reading, sender, ended)
        yield receiver, writing
        group.cancel_scope.cancel()


async def _pump(
    reading: "ReadStream[SessionMessage | Exception]",
    sender: "MemoryObjectSendStream[SessionMessage | Exception]",
    ended: anyio.Event,
) -> None:
    async with sender:
        try:
            async for message in reading:
                await sender.send(message)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
    ended.set()


def _result(answer: "CallToolResult") -> ToolResult:
    blocks = [_text(block) for block in answer.content]
    if not blocks and answer.structured_content is not None:
        blocks = [json.dumps(answer.structured_content, ensure_ascii=False)]
    return ToolResult(ToolStatus.TOOL_ERROR if answer.is_error else ToolStatus.OK, "\n".join(blocks))


def _text(block: "ContentBlock") -> str:
    """A block as text; what is none is named with its size."""
    from mcp import types

    match block:
        case types.TextContent():
            return block.text
        case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
            return resource.text
        case types.EmbeddedResource():
            return f"[{block.resource.mime_type or 'data'} at {block.resource.uri}]"
        case types.ResourceLink():
            return f"[resource {block.uri}]"
        case _:
            return f"[{len(block.data) * 3 // 4} bytes of {block.mime_type}]"


def _why(error: BaseException, words: LastWords) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseException", error.exceptions[0])
    said = f"; it wrote last: {words}" if words.lines else ""
    return f"{type(error).__name__}: {error}{said}"
