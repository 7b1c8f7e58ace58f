"""What an engine over HTTP may answer, and what becomes of it."""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import BaseModel

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.http import Answer, EngineHttp, EventReader, HttpRefusal
from sostenuto.types import EngineId

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Count(BaseModel):
    count: int


@asynccontextmanager
async def served(handler: Handler, *, key: str = "", largest: int = 1000) -> AsyncGenerator[EngineHttp]:
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handler)
    async with (
        TestServer(app, host="127.0.0.1") as server,
        EngineHttp(
            EngineId("e0"),
            str(server.make_url("/v1/")),
            kind="test",
            api_key=key,
            control_timeout_s=5,
            largest_bytes=largest,
        ) as http,
    ):
        yield http


def says(content: str | bytes, status: int = 200) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        body = content.encode() if isinstance(content, str) else content
        return web.Response(body=body, status=status)

    return answer


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "<!DOCTYPE html><title>It works</title>",
            "answered with HTML, not JSON; is this",
        ),
        ('{"count": ', "answered with no Count (body: Invalid JSON"),
        ("", "answered with nothing; look into the engine's log"),
        ("[1]", "answered with no Count (body: Input should be an object)"),
        ('{"count": "many"}', "answered with no Count (count: Input should be a valid integer"),
        ("{}", "answered with no Count (count: Field required)"),
        ('{"count": 1, "pad": "' + "x" * 1000 + '"}', "the answer has over 1000 bytes; ask for less at once"),
    ],
)
async def test_nonsense_is_an_error_with_engine_call_and_remedy(content: str, message: str):
    async with served(says(content)) as http:
        with pytest.raises(EngineError, match=re.escape(message)) as caught:
            (await http.get("/count")).read(Count)
    assert str(caught.value).startswith(f"engine e0 (test at {http.url}): /count: ")


async def test_bytes_that_are_no_text_are_an_error():
    async with served(says(b"\xff\xfe")) as http:
        with pytest.raises(EngineError, match="bytes that are no text"):
            (await http.get("/metrics")).text()


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (401, '{"error": "Unauthorized"}', "answered 401: Unauthorized; give the engine's API key"),
        (404, '{"detail": "Not Found"}', "answered 404: Not Found; is this the engine's address"),
        (500, '{"error": {"message": "broke"}}', "answered 500: broke"),
        (503, "", "answered 503: nothing"),
        (502, "<html>Bad Gateway", "answered 502: <html>Bad Gateway"),
        (302, "", "answered 302: nothing"),
        (500, "[" * 990, "answered 500: [[["),
    ],
)
async def test_another_status_is_told_in_the_engines_words(status: int, content: str, message: str):
    async with served(says(content, status)) as http:
        with pytest.raises(HttpRefusal, match=re.escape(message)) as caught:
            await http.post("/count")
    assert caught.value.status == status


async def test_a_redirect_does_not_take_the_key_along():
    seen: list[str] = []

    async def redirect(request: web.Request) -> web.Response:
        seen.append(request.path)
        raise web.HTTPFound("/elsewhere")

    async with served(redirect, key="secret") as http:
        with pytest.raises(HttpRefusal, match="answered 302") as caught:
            await http.get("/count")
    assert seen == ["/count"]
    assert "secret" not in str(caught.value) + repr(http)


async def test_the_key_is_sent():
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"count": int(request.headers["Authorization"] == "Bearer secret")})

    async with served(answer, key="secret") as http:
        assert (await http.get("/count")).read(Count).count == 1


async def test_an_engine_that_is_silent_or_slow_ends_at_the_deadline():
    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"count"')
        await anyio.sleep_forever()
        return response

    async with served(slow) as http:
        with pytest.raises(EngineError, match=r"no answer within 0\.2 s; look into its log"):
            await http.get("/count", within_s=0.2)


async def test_a_lost_connection_is_tried_again_once_where_that_does_no_harm():
    seen: list[str] = []

    async def drop(request: web.Request) -> web.Response:
        seen.append(request.path)
        if len(seen) < 2:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"count": len(seen)})

    async with served(drop) as http:
        assert (await http.post("/resume", repeatable=True)).read(Count).count == 2
    seen.clear()
    async with served(drop) as http:
        with pytest.raises(EngineError, match="the connection was lost"):
            await http.post("/generate")
    assert seen == ["/generate"]


async def test_nobody_there_is_an_error():
    async with served(says("")) as http:
        pass
    async with EngineHttp(EngineId("e0"), http.url, kind="test") as http:
        with pytest.raises(EngineError, match="is the engine running there"):
            await http.get("/count")
    async with EngineHttp(EngineId("e0"), "nowhere", kind="test") as http:
        with pytest.raises(EngineError, match="is the engine running there"):
            await http.get("/count")


async def streamed(pieces: list[bytes]) -> list[int]:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await anyio.lowlevel.checkpoint()
        return response

    counts: list[int] = []

    def take(event: Answer) -> None:
        counts.append(event.read(Count).count)

    async with served(stream) as http:
        await http.stream("/generate", {}, take)
    return counts


async def test_events_come_one_by_one_however_they_were_cut():
    whole = b'data: {"count": 1}\n\n: comment\r\n\r\ndata: {"count": 2}\r\n\r\ndata: [DONE]\n\n'
    assert await streamed([whole]) == [1, 2]
    assert await streamed([whole[i : i + 1] for i in range(len(whole))]) == [1, 2]


async def test_a_stream_that_ends_early_is_an_error():
    with pytest.raises(EngineError, match="the answer ended in the middle"):
        await streamed([b'data: {"count": 1}\n\n'])
    with pytest.raises(EngineError, match="answered with no Count"):
        await streamed([b"data: {\n\n"])


def test_an_event_without_end_is_an_error():
    reader = EventReader(1000)
    assert reader.feed(b"data: " + b"x" * 900, "e0") == []
    with pytest.raises(EngineError, match="over 1000 bytes"):
        reader.feed(b"x" * 200, "e0")


async def test_who_is_cancelled_leaves_no_open_connection():
    async with served(says('{"count": 1}')) as http:
        other = EngineHttp(EngineId("e1"), http.url, kind="test")
        with anyio.CancelScope() as scope:
            async with other:
                await other.get("/")
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        with pytest.raises(EngineError, match="the client is not open"):
            await other.get("/")
