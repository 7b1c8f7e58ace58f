"""What the documented traps of SGLang do to requests: nothing, or an error that says what to do."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import numpy as np
import pytest

from fakes_sglang import FakeSGLang
from sglang_faked import HASTY, PROMPT, answers, never, running, until_running
from sglang_servers import Served, adapter, faking, request
from sostenuto.errors import EngineError
from sostenuto.runtime.engines.sglang.engine import Deadlines, SGLangEngine
from sostenuto.runtime.engines.sglang.names import Names
from sostenuto.runtime.engines.wire import (
    CommitRequest,
    FinishReason,
    GenerateReply,
    PauseMode,
    Sampling,
    ScoreRequest,
)
from sostenuto.types import ProgramId

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


async def test_an_engine_that_never_answers_a_pause_is_resumed(fake: FakeSGLang, hasty: SGLangEngine):
    await hasty.capabilities()
    fake.broken["/pause_generation"] = never
    with pytest.raises(EngineError, match=r"pause_generation: no answer within 2 s"):
        await hasty.pause(PauseMode.KEEP)
    assert fake.routes[-1] == "/continue_generation"
    assert (await hasty.generate(request("a", PROMPT))).token_ids


async def test_an_engine_that_cannot_be_resumed_keeps_nobody_waiting(fake: FakeSGLang, hasty: SGLangEngine):
    await hasty.capabilities()
    await hasty.pause(PauseMode.KEEP)
    fake.broken["/continue_generation"] = answers(b"", 500)
    with pytest.raises(EngineError, match="continue_generation: answered 500: nothing"):
        await hasty.resume()
    with pytest.raises(EngineError, match="no answer within 3 s"):
        await hasty.generate(request("a", PROMPT))


async def test_an_abort_pause_over_requests_that_stand_still_ends(fake: FakeSGLang, engine: SGLangEngine):
    replies: list[GenerateReply] = []
    async with running(engine, fake, replies, count=2):
        await engine.pause(PauseMode.KEEP)
        await engine.pause(PauseMode.ABORT)
        await engine.resume()
    assert {reply.finish_reason for reply in replies} == {FinishReason.ABORT}


async def test_an_update_of_a_paused_engine_leaves_it_paused(
    served: Served, fake: FakeSGLang, engine: SGLangEngine
):
    replies: list[GenerateReply] = []
    async with running(engine, fake, replies, count=2):
        await engine.pause(PauseMode.KEEP)
        await engine.prepare_update(served.publish("0.1", 1))
        await engine.commit_update(CommitRequest(version="0.1"))
        assert fake.core.is_paused
        await engine.resume()
    assert {reply.versions[-1].version for reply in replies} == {"0.1"}


async def test_a_request_aborted_in_the_queue_answers_without_tokens(fake: FakeSGLang, engine: SGLangEngine):
    fake.core.concurrency = 1
    replies: list[GenerateReply] = []
    async with running(engine, fake, replies, count=1) as group:

        async def ask() -> None:
            reply = await engine.generate(request("queued", PROMPT))
            assert (reply.finish_reason, reply.token_ids, reply.versions) == (FinishReason.ABORT, [], [])

        group.start_soon(ask)
        while not fake.core.waiting:  # noqa: ASYNC110 - the fake steps by itself
            await anyio.sleep(0.002)
        await engine.abort("queued")
    assert replies[0].finish_reason is FinishReason.LENGTH


async def test_an_abort_with_an_error_of_the_engine_is_an_error(fake: FakeSGLang, engine: SGLangEngine):
    async def timed_out() -> None:
        with pytest.raises(EngineError, match="generate: answered 503: it waited too long"):
            await engine.generate(request("a", PROMPT, max_new_tokens=400))

    async with anyio.create_task_group() as group:
        group.start_soon(timed_out)
        await until_running(fake, 1)
        finish = {"type": "abort", "message": "it waited too long", "status_code": 503}
        fake.core.running[0].finish = finish


async def test_in_a_stream_it_is_an_error_too(fake: FakeSGLang, engine: SGLangEngine):
    async def timed_out() -> None:
        with pytest.raises(EngineError, match=r"the engine gave the request up \(503\): it waited too long"):
            await engine.generate(request("a", PROMPT, max_new_tokens=400), spans=lambda _: None)

    async with anyio.create_task_group() as group:
        group.start_soon(timed_out)
        await until_running(fake, 1)
        finish = {"type": "abort", "message": "it waited too long", "status_code": 503}
        fake.core.running[0].finish = finish


async def test_a_request_whose_deadline_passes_is_aborted_in_the_engine(served: Served, fake: FakeSGLang):
    soon = Deadlines(control_s=2.0, generate_s=0.1, update_s=1.0)
    async with adapter(served, deadlines=soon) as engine:
        await engine.capabilities()
        with pytest.raises(EngineError, match=r"generate: no answer within 0.1 s"):
            await engine.generate(request("a", PROMPT, max_new_tokens=450))
        await until_running(fake, 0)


@pytest.mark.parametrize("incremental", [False, True])
async def test_both_kinds_of_streams_give_the_same(fake: FakeSGLang, engine: SGLangEngine, incremental: bool):
    fake.flags["incremental_streaming_output"] = incremental
    spans: list[int] = []
    made = request("a", PROMPT, max_new_tokens=25, top_logprobs=2, sampling=Sampling(top_k=4))
    reply = await engine.generate(made, spans=lambda span: spans.extend(span.token_ids))
    whole = await engine.generate(made)
    assert spans == reply.token_ids == whole.token_ids
    assert reply.logprobs == whole.logprobs
    assert reply.top_logprobs == whole.top_logprobs


async def test_more_urgent_requests_go_first_whatever_the_engine_calls_first(
    fake: FakeSGLang, engine: SGLangEngine
):
    fake.flags["schedule_low_priority_values_first"] = fake.core.lower_first = True
    fake.core.concurrency = 1
    order: list[str] = []
    replies: list[GenerateReply] = []
    async with running(engine, fake, replies, count=1) as group:

        async def ask(name: str, priority: int) -> None:
            await engine.generate(request(name, PROMPT, priority=priority))
            order.append(name)

        for name, priority in (("low", 1), ("high", 9), ("middle", 5)):
            group.start_soon(ask, name, priority)
    assert order == ["high", "middle", "low"]


async def test_a_priority_is_not_sent_to_an_engine_that_knows_none(fake: FakeSGLang, engine: SGLangEngine):
    fake.flags["enable_priority_scheduling"] = False
    await engine.generate(request("a", PROMPT, priority=3))
    assert "priority" not in fake.bodies[-1][1]


@pytest.mark.parametrize("start", [0, 15, 99])
async def test_routed_experts_come_from_the_token_that_was_asked_for(engine: SGLangEngine, start: int):
    made = request("a", PROMPT, routed_experts=True, routed_experts_from=start)
    routed = (await engine.generate(made)).routed_experts
    assert routed is not None
    assert routed.start == min(start, len(PROMPT))
    assert routed.shape == (len(PROMPT) + 7 - routed.start, 3, 2)
    numbers = np.frombuffer(base64.b64decode(routed.data), "<i2").reshape(routed.shape)
    assert numbers[:, 0, 0].tolist() == list(range(routed.start, len(PROMPT) + 7))
    assert numbers[0, 2].tolist() == [routed.start + 4, routed.start + 5]


async def test_held_programs_are_the_last_whose_kv_goes(fake: FakeSGLang, engine: SGLangEngine):
    fake.core.pool = 200
    mine = list(range(60))
    await engine.generate(request("p", mine))
    for i in range(6):
        await engine.generate(request(f"x{i}", [i, *mine[:50]], hold=False))
    assert (await engine.generate(request("p-2", mine, program_id="p"))).cached_tokens == 59
    await engine.release(ProgramId("p"))
    for i in range(6):
        await engine.generate(request(f"y{i}", [i + 20, *mine[:50]], hold=False))
    assert (await engine.generate(request("p-3", mine, program_id="p"))).cached_tokens < 59


async def test_a_released_program_that_comes_back_has_a_session_of_its_own(
    fake: FakeSGLang, engine: SGLangEngine
):
    for turn in ("a", "b"):
        await engine.generate(request(turn, PROMPT, program_id="p"))
        await engine.release(ProgramId("p"))
    sessions = [
        body["session_id"] for route, body in fake.bodies if route == "/generate" and "session_id" in body
    ]
    assert len(set(sessions)) == len(sessions) == 3
    assert set(sessions) == fake.core.closed


def test_no_id_is_the_beginning_of_another():
    names = Names()
    given = [names.of(name) for name in ("p", "p-1", "p-12", "p-1!", "", "HEALTH_CHECK", "ü/ !")] * 2
    given += [names.of("p-1") for _ in range(120)]
    assert all(a == b or not b.startswith(a) for a in given for b in given)
    assert not any(name.startswith("HEALTH_CHECK") for name in given)
    assert len({Names().prefix for _ in range(50)}) == 50


async def test_a_request_does_not_wait_for_ever_behind_a_pause(served: Served):
    soon = Deadlines(control_s=2.0, generate_s=0.1, update_s=1.0)
    async with adapter(served, deadlines=soon) as engine:
        await engine.pause(PauseMode.KEEP)
        for call in (
            lambda: engine.generate(request("a", PROMPT)),
            lambda: engine.score(ScoreRequest(token_ids=PROMPT, start=1)),
        ):
            with pytest.raises(EngineError, match=r"it stands still for over 0\.1 s; resume it"):
                await call()
        await engine.resume()


async def test_the_servers_preferred_settings_cut_nothing_off_the_distribution(
    fake: FakeSGLang, engine: SGLangEngine
):
    free = await engine.generate(request("a", PROMPT, max_new_tokens=30))
    fake.flags["preferred_sampling_params"] = {"top_k": 1, "presence_penalty": 2.0}
    again = await engine.generate(request("b", PROMPT, max_new_tokens=30))
    assert again.token_ids == free.token_ids
