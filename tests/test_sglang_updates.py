"""New weights in an SGLang server: nobody is aborted, and what is not verified is not believed."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import anyio
import pytest
from aiohttp import web

from fakes_sglang import FakeSGLang
from fakes_sglang_core import weights_of
from sglang_faked import HASTY, PROMPT, answers, never, running, until_running
from sglang_servers import Served, adapter, faking, request
from sostenuto.errors import EngineError
from sostenuto.runtime.engines.sglang.engine import SGLangEngine
from sostenuto.runtime.engines.wire import (
    CommitRequest,
    FinishReason,
    GenerateReply,
    ScoreRequest,
    WireSpan,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with faking(tmp_path, step_s=0.002) as served:
        yield served


@pytest.fixture
def fake(served: Served) -> FakeSGLang:
    assert served.fake is not None
    return served.fake


@pytest.fixture
async def engine(served: Served) -> AsyncIterator[SGLangEngine]:
    async with adapter(served) as engine:
        yield engine


@pytest.fixture
async def hasty(served: Served) -> AsyncIterator[SGLangEngine]:
    async with adapter(served, deadlines=HASTY) as engine:
        yield engine


@pytest.mark.parametrize("kind", ["recompute", "continue"])
async def test_an_update_under_load_aborts_nobody(
    served: Served, fake: FakeSGLang, engine: SGLangEngine, kind: Literal["recompute", "continue"]
):
    await engine.prepare_update(served.publish("0.1", 3))
    replies: list[GenerateReply] = []
    async with running(engine, fake, replies):
        held = "drop" if kind == "recompute" else "keep"
        await engine.commit_update(CommitRequest(version="0.1", running=kind, held=held))
    assert {reply.finish_reason for reply in replies} == {FinishReason.LENGTH}
    assert len(replies) == 8
    stale = fake.core.stale_hits
    assert (stale == 0) == (kind == "recompute")


async def test_kv_of_an_old_version_is_never_found_after_it_was_dropped(
    served: Served, fake: FakeSGLang, engine: SGLangEngine
):
    for number in range(1, 6):
        await engine.generate(request(f"a{number}", PROMPT))
        await engine.prepare_update(served.publish(f"0.{number}", number))
        await engine.commit_update(CommitRequest(version=f"0.{number}", running="continue", held="drop"))
        reply = await engine.generate(request(f"b{number}", PROMPT))
        assert reply.cached_tokens == 0
    assert fake.core.stale_hits == 0


async def test_the_stale_kv_is_found_where_the_policy_keeps_it(
    served: Served, fake: FakeSGLang, engine: SGLangEngine
):
    await engine.generate(request("a", PROMPT))
    await engine.prepare_update(served.publish("0.1", 1))
    await engine.commit_update(CommitRequest(version="0.1", running="continue", held="keep"))
    assert (await engine.generate(request("b", PROMPT))).cached_tokens == len(PROMPT) - 1
    assert fake.core.stale_hits == len(PROMPT) - 1


async def test_a_load_that_fails_takes_the_engine_out_until_a_whole_version_is_verified(
    served: Served, fake: FakeSGLang, engine: SGLangEngine
):
    await engine.prepare_update(served.publish("0.1", 1))
    fake.torn_update = "Failed to update weights: x.\nRolling back to original weights."
    errors: list[str] = []

    async def ask() -> None:
        with pytest.raises(EngineError) as caught:
            await engine.generate(request("a", PROMPT, max_new_tokens=400))
        errors.append(str(caught.value))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await until_running(fake, 1)
        with pytest.raises(EngineError, match="update_weights_from_disk: answered 400: Failed to update"):
            await engine.commit_update(CommitRequest(version="0.1", running="continue", held="keep"))
    assert not fake.core.is_paused
    assert "nothing it samples is believed: its update to 0.1 failed" in errors[0]
    calls = (
        engine.capabilities,
        lambda: engine.generate(request("b", PROMPT)),
        lambda: engine.score(ScoreRequest(token_ids=PROMPT, start=1)),
    )
    for call in calls:
        with pytest.raises(EngineError, match="publish a whole version, or start it again"):
            await call()
    fake.torn_update = ""
    await engine.prepare_update(served.publish("0.2", 2))
    await engine.commit_update(CommitRequest(version="0.2"))
    assert (await engine.generate(request("c", PROMPT))).versions[0].version == "0.2"
    assert fake.core.weights == weights_of(served.written("0.2"))


async def test_an_update_without_an_answer_is_not_believed(
    served: Served, fake: FakeSGLang, hasty: SGLangEngine
):
    await hasty.prepare_update(served.publish("0.1", 1))
    fake.broken["/update_weights_from_disk"] = never
    with pytest.raises(EngineError, match=r"no answer within 2 s"):
        await hasty.commit_update(CommitRequest(version="0.1"))
    assert not fake.core.is_paused
    with pytest.raises(EngineError, match="nothing it samples is believed"):
        await hasty.generate(request("b", PROMPT))


async def test_weights_that_changed_without_a_flush_are_new_weights(
    served: Served, fake: FakeSGLang, engine: SGLangEngine
):
    await engine.prepare_update(served.publish("0.1", 1))
    refusal = "Weights were updated, but the cache was not flushed because of requests."

    async def refused(http_request: web.Request) -> web.Response:
        body = await http_request.json()
        fake.core.weights = weights_of(Path(body["model_path"]))
        fake.core.set_version(body["weight_version"])
        return web.json_response({"success": False, "message": refusal}, status=400)

    fake.broken["/update_weights_from_disk"] = refused
    await engine.commit_update(CommitRequest(version="0.1"))
    assert (await engine.capabilities()).version == "0.1"


async def test_a_label_that_did_not_change_is_no_update(
    served: Served, fake: FakeSGLang, engine: SGLangEngine
):
    await engine.prepare_update(served.publish("0.1", 1))
    fake.broken["/update_weights_from_disk"] = answers(b'{"success": true, "message": ""}')
    with pytest.raises(EngineError, match=r"model_info: it serves 0.0 after the update to 0.1"):
        await engine.commit_update(CommitRequest(version="0.1"))
    with pytest.raises(EngineError, match="nothing it samples is believed"):
        await engine.capabilities()


async def test_a_label_without_new_weights_is_found_out_by_the_checksum(
    served: Served, fake: FakeSGLang, engine: SGLangEngine
):
    await engine.prepare_update(served.publish("0.1", 1))
    await engine.commit_update(CommitRequest(version="0.1"))
    await engine.prepare_update(served.publish("0.2", 2))

    async def only_labels(http_request: web.Request) -> web.Response:
        version = (await http_request.json())["weight_version"]
        fake.core.set_version(version)
        fake._label = version  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
        return web.json_response({"success": True})

    fake.broken["/update_weights_from_disk"] = only_labels
    with pytest.raises(
        EngineError, match="_checker: its weights did not change, and what was sent did; start"
    ):
        await engine.commit_update(CommitRequest(version="0.2"))


async def test_an_engine_without_a_checker_is_verified_by_its_label(
    served: Served, fake: FakeSGLang, engine: SGLangEngine
):
    fake.has_checker = False
    for number in (1, 2):
        await engine.prepare_update(served.publish(f"0.{number}", number))
        await engine.commit_update(CommitRequest(version=f"0.{number}"))
    assert (await engine.capabilities()).version == "0.2"


async def test_a_flush_that_is_refused_is_no_success(fake: FakeSGLang, hasty: SGLangEngine):
    replies: list[GenerateReply] = []
    async with running(hasty, fake, replies, count=1):
        fake.core.running[0].params["max_new_tokens"] = 490
        fake.step_s = 1.0  # whatever the machine does meanwhile, the request is still running
        with pytest.raises(EngineError, match=r"flush_cache: requests run for over 2 s; pause"):
            await hasty.flush()
        fake.step_s = 0.001
        await hasty.abort("r0")
    assert (await hasty.generate(request("b", PROMPT))).cached_tokens == 0


async def test_a_restarted_engine_is_noticed_and_its_old_weights_are_refused(
    served: Served, fake: FakeSGLang, engine: SGLangEngine
):
    await engine.prepare_update(served.publish("0.1", 1))
    await engine.commit_update(CommitRequest(version="0.1"))
    await engine.generate(request("p", PROMPT))
    fake.start_again()
    with pytest.raises(EngineError, match=r"min_version: 0.1 is wanted, 0.0 is served"):
        await engine.generate(request("q", PROMPT, min_version="0.1"))
    assert (await engine.capabilities()).version == "0.0"
    assert (await engine.load()).held_programs == 0
    await engine.prepare_update(served.publish("0.2", 2))
    await engine.commit_update(CommitRequest(version="0.2"))
    assert (await engine.generate(request("r", PROMPT, min_version="0.2"))).token_ids


async def test_a_restarted_engine_is_believed_again_after_a_torn_update(
    served: Served, fake: FakeSGLang, engine: SGLangEngine
):
    await engine.prepare_update(served.publish("0.1", 1))
    fake.torn_update = "Failed"
    with pytest.raises(EngineError, match="Failed"):
        await engine.commit_update(CommitRequest(version="0.1"))
    fake.torn_update = ""
    fake.start_again()
    assert (await engine.capabilities()).version == "0.0"
    assert (await engine.generate(request("a", PROMPT))).token_ids


async def test_an_engine_that_loads_is_not_taken_for_lost(
    served: Served, fake: FakeSGLang, engine: SGLangEngine
):
    await engine.prepare_update(served.publish("0.1", 1))
    await engine.capabilities()
    may_load = anyio.Event()

    async def slowly(http_request: web.Request) -> web.StreamResponse:
        await may_load.wait()
        fake.broken.clear()
        return await fake._update_weights_from_disk(http_request)  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001

    fake.broken |= {"/update_weights_from_disk": slowly, "/server_info": never}
    async with anyio.create_task_group() as group:
        group.start_soon(engine.commit_update, CommitRequest(version="0.1"))
        while "/update_weights_from_disk" not in fake.routes:  # noqa: ASYNC110 - over a real socket
            await anyio.sleep(0.002)
        assert (await engine.capabilities()).version == "0.0"
        may_load.set()
    assert (await engine.capabilities()).version == "0.1"


async def test_a_stream_across_an_update_tells_each_token_with_its_own_version(
    served: Served, fake: FakeSGLang, engine: SGLangEngine
):
    await engine.prepare_update(served.publish("0.1", 1))
    told: list[WireSpan] = []
    replies: list[GenerateReply] = []

    async def ask() -> None:
        made = request("a", PROMPT, max_new_tokens=150)
        replies.append(await engine.generate(made, spans=told.append))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await until_running(fake, 1)
        while not told:  # noqa: ASYNC110 - the fake steps by itself
            await anyio.sleep(0.002)
        await engine.commit_update(CommitRequest(version="0.1"))
    assert [span.version for span in replies[0].versions] == ["0.0", "0.1"]
    assert whole(told) == whole(replies[0].spans())
    assert len(told) >= 2


def whole(spans: list[WireSpan]) -> list[tuple[int, float, str]]:
    """Token by token."""
    return [
        (token, logprob, span.version)
        for span in spans
        for token, logprob in zip(span.token_ids, span.logprobs, strict=True)
    ]
