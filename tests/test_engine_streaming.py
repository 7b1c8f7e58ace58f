"""Tokens of a turn while it is sampled: from a real engine process, over its socket."""

import json
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
import pytest
from aiohttp import web

from engine_models import Desk, load, make_core, make_folder, prompt, publish
from sostenuto.errors import EngineError
from sostenuto.runtime.engines.client import EngineClient
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.wire import (
    CommitRequest,
    Feature,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    PauseMode,
    WireSpan,
)
from sostenuto.types import EngineId

SPAN = b'{"span":{"token_ids":[1,2],"logprobs":[-1.0,-2.0],"version":"0.0"}}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def socket(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of one engine process for all tests."""
    path = tmp_path_factory.mktemp("engine") / "e.sock"
    settings = EmbeddedSettings(model=folder, socket=path, kv_tokens=4096, concurrency=8)
    command = [sys.executable, "-m", "sostenuto.runtime.engines.embedded", *settings.arguments()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"ready" in process.stdout.readline()
        yield path
        process.terminate()


@pytest.fixture
def taps() -> list[tuple[bytes, bytes]]:
    return []


@pytest.fixture
async def engine(socket: Path, taps: list[tuple[bytes, bytes]]) -> AsyncIterator[EngineClient]:
    def tap(_: str, sent: bytes, received: bytes) -> None:
        taps.append((sent, received))

    async with EngineClient(EngineId("e0"), socket, tap=tap) as client:
        yield client


def request(name: str, **options: object) -> GenerateRequest:
    fields = {
        "request_id": name,
        "program_id": name,
        "token_ids": prompt(9),
        "max_new_tokens": 400,
        "hold": False,
        **options,
    }
    return GenerateRequest.model_validate(fields)


def tokens(spans: list[WireSpan]) -> list[int]:
    return [token for span in spans for token in span.token_ids]


def whole(spans: list[WireSpan]) -> list[tuple[int, float, str]]:
    """Token by token."""
    return [
        (token, logprob, span.version)
        for span in spans
        for token, logprob in zip(span.token_ids, span.logprobs, strict=True)
    ]


async def test_the_spans_of_a_stream_are_the_tokens_of_its_reply_and_of_the_plain_path(
    engine: EngineClient, taps: list[tuple[bytes, bytes]]
):
    assert Feature.STREAM in (await engine.capabilities()).features
    spans: list[WireSpan] = []
    reply = await engine.generate(request("a", max_new_tokens=100), spans=spans.append)
    assert whole(spans) == whole(reply.spans())
    assert len(tokens(spans)) == 100
    plain = await engine.generate(request("b", max_new_tokens=100))
    assert plain.token_ids == reply.token_ids
    assert [json.loads(received)["token_ids"] for _, received in taps] == [reply.token_ids] * 2


async def test_a_refusal_before_the_first_token_is_that_of_the_plain_path(engine: EngineClient):
    spans: list[WireSpan] = []
    with pytest.raises(EngineError, match=r"refused \(400, token_ids\): token_ids: is empty"):
        await engine.generate(request("a", token_ids=[]), spans=spans.append)
    assert spans == []


async def test_a_reader_that_goes_away_ends_its_request_and_holds_nothing(engine: EngineClient):
    spans: list[WireSpan] = []
    async with anyio.create_task_group() as group:

        def first(span: WireSpan) -> None:
            spans.append(span)
            group.cancel_scope.cancel()

        async def ask() -> None:
            await engine.generate(request("a", hold=True), spans=first)

        group.start_soon(ask)
    assert spans
    await until(engine, running=0, held_programs=0)


async def test_a_sink_that_fails_ends_its_request(engine: EngineClient):
    def broken(_: WireSpan) -> None:
        raise LookupError("the sink is broken")

    with pytest.raises(LookupError, match="the sink is broken"):
        await engine.generate(request("a", hold=True), spans=broken)
    await until(engine, running=0, held_programs=0)


async def test_a_reader_that_does_not_read_stops_nobody_and_gets_all_in_the_end(
    engine: EngineClient, socket: Path
):
    """Its socket is full long before the reply, of a megabyte, is written."""
    before = (await engine.load()).generated_tokens
    connector = aiohttp.UnixConnector(path=str(socket))
    body = request("slow", top_logprobs=65).model_dump_json().encode()
    async with (
        aiohttp.ClientSession(connector=connector, read_bufsize=1024) as session,
        session.post("http://engine/generate?stream=1", data=body) as response,
    ):
        await until(engine, running=0, generated_tokens=before + 400)
        other = await engine.generate(request("other", max_new_tokens=20))
        assert len(other.token_ids) == 20
        lines = [json.loads(line) for line in (await response.read()).splitlines()]
    *spans, last = lines
    sampled = [token for line in spans for token in line["span"]["token_ids"]]
    assert sampled == last["reply"]["token_ids"]
    assert len(sampled) == 400


class Reader:
    """Reads a stream, and lets others wait for its first token."""

    def __init__(self) -> None:
        self.spans: list[WireSpan] = []
        self.begun = anyio.Event()

    def __call__(self, span: WireSpan) -> None:
        self.spans.append(span)
        self.begun.set()


async def read_while(
    engine: EngineClient, asked: GenerateRequest, happens: Callable[[], Awaitable[None]]
) -> tuple[list[WireSpan], GenerateReply]:
    """What a stream tells when something happens after its first tokens, and its reply."""
    read, replies = Reader(), list[GenerateReply]()

    async def ask() -> None:
        replies.append(await engine.generate(asked, spans=read))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await read.begun.wait()
        await happens()
    return read.spans, replies[0]


async def test_an_aborted_stream_ends_with_the_tokens_that_it_told(engine: EngineClient):
    spans, reply = await read_while(engine, request("a"), lambda: engine.abort("a"))
    assert reply.finish_reason is FinishReason.ABORT
    assert 0 < len(reply.token_ids) < 400
    assert whole(spans) == whole(reply.spans())


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RETRACT, PauseMode.ABORT])
async def test_a_pause_in_mid_stream_loses_no_token_and_tells_none_twice(
    engine: EngineClient, mode: PauseMode
):
    plain = await engine.generate(request("plain", max_new_tokens=150))

    async def pause() -> None:
        await engine.pause(mode)
        await engine.resume()

    spans, reply = await read_while(engine, request("a", max_new_tokens=150), pause)
    assert whole(spans) == whole(reply.spans())
    if mode is PauseMode.ABORT:
        assert reply.finish_reason is FinishReason.ABORT
        assert reply.token_ids == plain.token_ids[: len(reply.token_ids)]
    else:
        assert reply.token_ids == plain.token_ids


@asynccontextmanager
async def answering(tmp_path: Path, *pieces: bytes) -> AsyncGenerator[EngineClient]:
    """A client of an engine that answers a stream with these bytes, and then with nothing more."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(tmp_path / "fake.sock")).start()
        async with EngineClient(EngineId("e0"), tmp_path / "fake.sock") as client:
            yield client
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("pieces", "told", "what"),
    [
        ((SPAN[:20],), 0, 'a line is only b\'{"span":'),
        ((SPAN, SPAN[:30]), 2, 'a line is only b\'{"span":'),
        ((SPAN, b'{"reply":{"token_ids":[1,2]'), 2, 'a line is only b\'{"reply":'),
        ((SPAN,), 2, "it ended without a reply"),
        ((), 0, "it ended without a reply"),
        ((SPAN, b'{"span":{"token_ids":"x"}}\n'), 2, "a line is no span"),
        ((b"<html>}\n",), 0, "a line is no span: b'<html>"),
    ],
)
async def test_a_stream_that_breaks_is_an_error_of_the_engine_that_says_where(
    tmp_path: Path, pieces: tuple[bytes, ...], told: int, what: str
):
    read = Reader()
    async with answering(tmp_path, *pieces) as client:
        with pytest.raises(EngineError) as caught:
            await client.generate(request("a"), spans=read)
    assert f"engine e0: generate: the stream broke after {told} tokens: {what}" in str(caught.value)
    assert "send the request again" in str(caught.value)
    assert len(tokens(read.spans)) == told


async def test_a_line_may_come_in_any_pieces_and_a_refusal_at_any_time(tmp_path: Path):
    refusal = b'{"error":"grammar","message":"after 2 tokens: too deep","remedy":"leave it out"}\n'
    read = Reader()
    pieces = [bytes([byte]) for byte in SPAN] + [SPAN + SPAN[:9], SPAN[9:] + refusal]
    async with answering(tmp_path, *pieces) as client:
        with pytest.raises(EngineError, match=r"e0: generate: refused \(200, grammar\): after 2 tokens"):
            await client.generate(request("a"), spans=read)
    assert tokens(read.spans) == [1, 2] * 3


async def test_a_reply_that_is_not_what_was_told_is_no_turn(tmp_path: Path, engine: EngineClient):
    reply = await engine.generate(request("a", max_new_tokens=3))
    last = b'{"reply":' + reply.model_dump_json().encode() + b"}\n"
    async with answering(tmp_path, SPAN, last) as client:
        with pytest.raises(EngineError, match="broke after 2 tokens: its reply has 3"):
            await client.generate(request("a"), spans=lambda _: None)


def test_a_turn_tells_each_token_with_the_version_that_sampled_it(folder: Path, tmp_path: Path):
    desk = Desk(make_core(folder))
    turn = desk.core.submit(request("a", max_new_tokens=12), lambda _: None)
    told: list[WireSpan] = []
    for step in range(12):
        if step == 5:
            new = load(make_folder(tmp_path / "new", seed=5)).module
            desk.core.weights.stage(publish(tmp_path, new, "0.1"))
            desk.core.commit(CommitRequest(version="0.1"))
        desk.core.step()
        if step % 3 == 2:
            told += turn.spans_since(len(tokens(told)))
    assert tokens(told) == turn.context.tolist()[9:]
    assert [(span.version, len(span.token_ids)) for span in told] == [
        ("0.0", 3), ("0.0", 2), ("0.1", 1), ("0.1", 3), ("0.1", 3),
    ]  # fmt: skip


async def until(engine: EngineClient, **wanted: int) -> None:
    """Poll the load until it says so; the test's own timeout ends a wait that has no end."""
    while not await _says(engine, wanted):  # noqa: ASYNC110 - the change is in another process
        await anyio.sleep(0.02)


async def _says(engine: EngineClient, wanted: dict[str, int]) -> bool:
    found = (await engine.load()).model_dump()
    return all(found[name] == value for name, value in wanted.items())
