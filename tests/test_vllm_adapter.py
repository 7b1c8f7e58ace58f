"""What the adapter promises of every vLLM: the fake one, and a real one where it is named."""

from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import anyio
import pytest
from benchmarks.vllm_weights import manifest_of

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.vllm.engine import VllmEngine
from sostenuto.runtime.engines.wire import (
    CommitRequest,
    Feature,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    PauseMode,
    ScoreRequest,
    WireSpan,
)
from sostenuto.types import ProgramId, Version
from vllm_targets import Target, fake_target, real_target, request, until_idle

_numbers = count(1)


@pytest.fixture(params=["fake", "real"])
async def target(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Target]:
    async with fake_target(tmp_path) if request.param == "fake" else real_target() as target:
        yield target


@pytest.fixture
async def engine(target: Target) -> AsyncIterator[VllmEngine]:
    async with target.engine() as engine:
        await engine.capabilities()
        yield engine
        await engine.resume()
        await until_idle(engine)


async def logprobs_of(engine: VllmEngine, context: list[int], reply: GenerateReply) -> list[float]:
    score = ScoreRequest(token_ids=context + reply.token_ids, start=len(context))
    return (await engine.score(score)).logprobs


async def prepare(engine: VllmEngine, folder: Path) -> str:
    """Make the folder's weights ready as the next version."""
    served = Version.parse((await engine.capabilities()).version)
    version = str(Version(served.epoch, served.number + 1))
    await engine.prepare_update(manifest_of(folder, version))
    return version


async def commit(engine: VllmEngine, version: str, **how: str) -> None:
    reply = await engine.commit_update(CommitRequest.model_validate({"version": version, **how}))
    assert reply.version == version


async def publish(engine: VllmEngine, folder: Path) -> str:
    """Bring in the folder's weights under the next version."""
    version = await prepare(engine, folder)
    await commit(engine, version)
    return version


async def test_it_says_what_it_is_and_can(engine: VllmEngine):
    adapter: Engine = engine
    found = await adapter.capabilities()
    assert found.kind == "vllm"
    assert found.shares_prefixes
    assert found.kv_tokens >= found.context_tokens > 0
    wanted = {Feature.SCORE, Feature.UPDATE, Feature.PAUSE, Feature.STREAM, Feature.TOP_LOGPROBS}
    assert wanted | {Feature.TRUNCATION, Feature.PENALTIES} <= found.features
    assert not {Feature.HOLD, Feature.OFFLOAD} & found.features
    load = await adapter.load()
    assert (load.running, load.held_programs) == (0, 0)


async def test_tokens_come_with_the_log_probabilities_of_the_weights(engine: VllmEngine, target: Target):
    asked = request("a")
    reply = await engine.generate(asked)
    assert (len(reply.token_ids), reply.finish_reason) == (8, FinishReason.LENGTH)
    assert [(span.start, span.end) for span in reply.versions] == [(0, 8)]
    assert reply.cached_tokens + reply.prefilled_tokens == len(asked.token_ids)
    scored = await logprobs_of(engine, asked.token_ids, reply)
    assert reply.logprobs == pytest.approx(scored, abs=target.slack)


async def test_the_noise_follows_from_seed_and_context(engine: VllmEngine):
    first, again = [await engine.generate(request(name, 30, max_new_tokens=12)) for name in ("a", "b")]
    other = await engine.generate(request("c", 30, max_new_tokens=12, sampling={"seed": 1}))
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


async def test_log_probabilities_are_those_of_the_temperature(engine: VllmEngine, target: Target):
    spreads: list[float] = []
    for temperature in (1.0, 0.5):
        asked = request("a", top_logprobs=4, sampling={"temperature": temperature})
        top = (await engine.generate(asked)).top_logprobs
        assert top is not None
        spreads.append(top[0][0][1] - top[0][3][1])
    assert spreads[1] == pytest.approx(2 * spreads[0], rel=1e-2, abs=target.slack)


async def test_greedy_takes_the_most_probable_at_temperature_one(engine: VllmEngine, target: Target):
    asked = request("a", sampling={"temperature": 0.0}, top_logprobs=3)
    reply = await engine.generate(asked)
    assert reply.top_logprobs is not None
    assert reply.token_ids == [top[0][0] for top in reply.top_logprobs]
    assert all(len(top) == 3 and top[0][1] >= top[1][1] >= top[2][1] for top in reply.top_logprobs)
    scored = await logprobs_of(engine, asked.token_ids, reply)
    assert reply.logprobs == pytest.approx(scored, abs=target.slack)


async def test_the_stop_token_is_the_last_one(engine: VllmEngine):
    free = (await engine.generate(request("a"))).token_ids
    stop = free[3]
    reply = await engine.generate(request("a", sampling={"stop_token_ids": [stop]}))
    assert reply.token_ids == free[: free.index(stop) + 1]
    assert (reply.finish_reason, reply.matched) == (FinishReason.STOP, stop)


async def test_a_stop_string_ends_a_turn_and_cuts_nothing(engine: VllmEngine, target: Target):
    free = (await engine.generate(request("a", max_new_tokens=32))).token_ids
    stop = next(text for text in (target.text([id_]).strip() for id_ in free[3:]) if text.isalnum())
    asked = request("a", max_new_tokens=32, sampling={"stop_strings": [stop]})
    reply = await engine.generate(asked)
    last = next(at for at in range(32) if stop in target.text(free[: at + 1]))
    assert reply.token_ids == free[: last + 1]
    assert (reply.finish_reason, reply.matched) == (FinishReason.STOP, stop)
    assert len(reply.logprobs) == len(reply.token_ids)


async def test_spans_come_while_it_samples(engine: VllmEngine):
    spans: list[WireSpan] = []
    reply = await engine.generate(request("a", max_new_tokens=16), spans=spans.append)
    assert len(spans) > 4
    assert [token for span in spans for token in span.token_ids] == reply.token_ids
    assert [value for span in spans for value in span.logprobs] == reply.logprobs


async def test_a_grammar_holds(engine: VllmEngine, target: Target):
    if Feature.GRAMMAR not in (await engine.capabilities()).features:
        pytest.skip("this vLLM takes no grammar")
    grammar = {"regex": "(17|18)"}
    reply = await engine.generate(request("a", sampling={"grammar": grammar}))
    assert target.text(reply.token_ids[:-1]) in ("17", "18")
    assert (reply.finish_reason, reply.matched) == (FinishReason.STOP, reply.token_ids[-1])


async def test_score_tells_the_most_probable_too(engine: VllmEngine):
    context = request("a").token_ids
    reply = await engine.score(ScoreRequest(token_ids=context, start=20, top_logprobs=2))
    assert reply.top_logprobs is not None
    assert [len(top) for top in reply.top_logprobs] == [2] * 4
    for value, top in zip(reply.logprobs, reply.top_logprobs, strict=True):
        assert top[0][1] >= top[1][1]
        assert value <= top[0][1] + 1e-6


class Runs:
    """Requests under way."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.replies: dict[str, GenerateReply] = {}
        self.tokens: dict[str, int] = {}

    async def run(self, asked: GenerateRequest) -> None:
        def tell(span: WireSpan) -> None:
            self.tokens[asked.request_id] = self.tokens.get(asked.request_id, 0) + len(span.token_ids)

        self.replies[asked.request_id] = await self._engine.generate(asked, spans=tell)

    async def until(self, name: str, tokens: int) -> None:
        while self.tokens.get(name, 0) < tokens:  # noqa: ASYNC110 - the change comes over a socket
            await anyio.sleep(0.01)


async def test_abort_ends_exactly_one_request_with_its_tokens(engine: VllmEngine, target: Target):
    runs = Runs(engine)
    async with anyio.create_task_group() as group:
        for name in ("a", "aa"):
            group.start_soon(runs.run, request(name, max_new_tokens=target.long))
            await runs.until(name, 2)
        await engine.abort("a")
        await engine.abort("unknown")
        before = runs.tokens["aa"]
        await runs.until("aa", before + 2)
        assert list(runs.replies) == ["a"]
        await engine.abort("aa")
    assert all(reply.finish_reason is FinishReason.ABORT for reply in runs.replies.values())
    assert len(runs.replies["a"].token_ids) >= 2
    assert len(runs.replies["a"].logprobs) == len(runs.replies["a"].token_ids)


async def test_a_cancelled_request_leaves_nothing_running(engine: VllmEngine, target: Target):
    runs = Runs(engine)
    async with anyio.create_task_group() as group:
        group.start_soon(runs.run, request("a", max_new_tokens=target.long))
        await runs.until("a", 2)
        group.cancel_scope.cancel()
    await until_idle(engine)
    before = (await engine.load()).generated_tokens
    assert not runs.replies
    await engine.generate(request("b", max_new_tokens=1))
    assert (await engine.load()).generated_tokens == before + 1


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RETRACT])
async def test_what_stands_still_goes_on_and_new_requests_wait(
    engine: VllmEngine, target: Target, mode: PauseMode
):
    runs = Runs(engine)
    async with anyio.create_task_group() as group:
        group.start_soon(runs.run, request("a", max_new_tokens=target.long))
        await runs.until("a", 2)
        await engine.pause(mode)
        await engine.pause(mode)
        await anyio.sleep(0.2)
        before = runs.tokens["a"]
        group.start_soon(runs.run, request("bb", max_new_tokens=2))
        group.start_soon(runs.run, request("ccc", max_new_tokens=2))
        await anyio.sleep(0.2)
        await engine.abort("ccc")
        await anyio.sleep(0.2)
        assert runs.tokens == {"a": before}
        assert list(runs.replies) == ["ccc"]
        await engine.resume()
        await engine.resume()
    assert (len(runs.replies["a"].token_ids), len(runs.replies["bb"].token_ids)) == (target.long, 2)
    assert runs.replies["ccc"].token_ids == []
    assert runs.replies["a"].pause_s >= 0.4


async def test_a_pause_can_answer_or_finish_what_runs(engine: VllmEngine, target: Target):
    runs = Runs(engine)
    async with anyio.create_task_group() as group:
        group.start_soon(runs.run, request("a", max_new_tokens=target.long))
        await runs.until("a", 2)
        await engine.pause(PauseMode.ABORT)
        group.start_soon(runs.run, request("bb", max_new_tokens=10))
        await anyio.sleep(0.1)
        await engine.resume()
        await runs.until("bb", 2)
        await engine.pause(PauseMode.FINISH)
        await engine.resume()
    assert runs.replies["a"].finish_reason is FinishReason.ABORT
    assert len(runs.replies["a"].token_ids) >= 2
    assert len(runs.replies["bb"].token_ids) == 10


async def test_prefixes_are_found_under_the_same_salt_alone(engine: VllmEngine, target: Target):
    await engine.flush()
    tokens, salt = 4 * target.block + 1, f"salt {next(_numbers)}"
    first = await engine.generate(request("a", tokens, salt=salt))
    assert first.cached_tokens == 0
    assert (await engine.generate(request("b", tokens, salt=salt))).cached_tokens == 4 * target.block
    assert (await engine.generate(request("c", tokens, salt=salt + "/@"))).cached_tokens == 0
    await engine.release(ProgramId("a"))
    await engine.flush()
    assert (await engine.generate(request("d", tokens, salt=salt))).cached_tokens == 0


async def test_a_flush_that_is_refused_is_an_error(engine: VllmEngine, target: Target):
    runs = Runs(engine)
    async with anyio.create_task_group() as group:
        group.start_soon(runs.run, request("a", max_new_tokens=target.long))
        await runs.until("a", 2)
        with pytest.raises(EngineError, match="refused, as requests run; wait for them"):
            await engine.flush()
        await engine.abort("a")


@pytest.mark.parametrize("running", ["continue", "recompute"])
async def test_new_weights_come_in_while_a_request_runs(engine: VllmEngine, target: Target, running: str):
    held = "keep" if running == "continue" else "drop"
    old = await publish(engine, target.model)
    before = await engine.generate(request("b", 4 * target.block + 1))
    runs, new = Runs(engine), await prepare(engine, target.other)
    asked = request("a", max_new_tokens=target.long)
    async with anyio.create_task_group() as group:
        group.start_soon(runs.run, asked)
        await runs.until("a", 4)
        await commit(engine, new, running=running, held=held)
    reply = runs.replies["a"]
    assert len(reply.token_ids) == target.long
    assert [span.version for span in reply.versions] == [old, new]
    assert (await engine.capabilities()).version == new
    # The same seed under other weights.
    after = await engine.generate(request("b", 4 * target.block + 1))
    assert after.cached_tokens == (4 * target.block if held == "keep" else 0)
    assert before.token_ids != after.token_ids
    await _is_served(engine, target, target.other)
    if running == "recompute":
        # The KV of its old tokens, too, is that of the new weights.
        at = reply.versions[1].start
        whole = target.logprobs(target.other, asked.token_ids + reply.token_ids, len(asked.token_ids))
        assert reply.logprobs[at:] == pytest.approx(whole[at:], abs=target.slack)
    await publish(engine, target.model)
    await _is_served(engine, target, target.model)


async def _is_served(engine: VllmEngine, target: Target, folder: Path) -> None:
    context = request("score").token_ids
    scored = await engine.score(ScoreRequest(token_ids=context, start=1))
    assert scored.logprobs == pytest.approx(target.logprobs(folder, context, 1), abs=target.slack)
    assert scored.version == (await engine.capabilities()).version


async def test_an_update_that_is_not_whole_changes_nothing(engine: VllmEngine, target: Target):
    served = (await engine.capabilities()).version
    manifest = manifest_of(target.other, "9.9")
    torn = manifest.model_copy(update={"tensors": manifest.tensors[1:]})
    with pytest.raises(EngineError, match=r"prepare_update: .* is missing in version 9.9; publish"):
        await engine.prepare_update(torn)
    first = manifest.tensors[0].model_copy(update={"checksum": 1})
    spoiled = manifest.model_copy(update={"tensors": (first, *manifest.tensors[1:])})
    with pytest.raises(EngineError, match="its bytes are not those that were published"):
        await engine.prepare_update(spoiled)
    with pytest.raises(EngineError, match=r"version 9.9 is not prepared; prepare it first"):
        await engine.commit_update(CommitRequest(version="9.9"))
    await engine.prepare_update(manifest)
    with pytest.raises(EngineError, match="vLLM cannot keep held KV and compute"):
        await engine.commit_update(CommitRequest(version="9.9", running="recompute", held="keep"))
    await engine.abandon_update("9.9")
    with pytest.raises(EngineError, match=r"version 9.9 is not prepared"):
        await engine.commit_update(CommitRequest(version="9.9"))
    assert not list(target.updates.glob("*9.9*"))
    assert (await engine.capabilities()).version == served
    assert len((await engine.generate(request("a"))).token_ids) == 8


async def test_what_cannot_be_served_is_refused_by_name(engine: VllmEngine):
    context = (await engine.capabilities()).context_tokens
    for asked, message in [
        (request("a", token_ids=[]), "token_ids: is empty"),
        (request("a", token_ids=[1, 10**6]), "token_ids: 1000000 is not in the model's vocabulary"),
        (request("a", token_ids=[1] * context), f"tokens leave no room in {context}; shorten them"),
        (request("a", min_version="99.0"), r"min_version: 99.0 is wanted, .* is served"),
        (request("a", top_logprobs=500), "top_logprobs: 500, and it gives .* --max-logprobs 501"),
        (request("a", routed_experts=True), "it cannot do routed_experts; serve a mixture-of-experts"),
    ]:
        with pytest.raises(EngineError, match=message):
            await engine.generate(asked)
    with pytest.raises(EngineError, match="temperature: vLLM scores at temperature 1 alone"):
        await engine.score(ScoreRequest(token_ids=[1, 2], start=1, temperature=0.5))
    with pytest.raises(EngineError, match="it cannot do offload; vLLM has no call for it"):
        await engine.offload(ProgramId("a"))
    with pytest.raises(EngineError, match="it cannot do offload"):
        await engine.restore(ProgramId("a"))


async def test_a_turn_ends_where_the_context_does(engine: VllmEngine):
    context = (await engine.capabilities()).context_tokens
    reply = await engine.generate(request("a", context - 5, max_new_tokens=100))
    assert (len(reply.token_ids), reply.finish_reason) == (5, FinishReason.LENGTH)


async def test_many_requests_run_beside_each_other(engine: VllmEngine):
    runs, before = Runs(engine), await engine.load()
    async with anyio.create_task_group() as group:
        for at in range(12):
            group.start_soon(runs.run, request("x" * (at + 1), priority=at % 3, sampling={"seed": at}))
    assert all(len(reply.token_ids) == 8 for reply in runs.replies.values())
    after = await engine.load()
    assert after.generated_tokens - before.generated_tokens == 96
    assert after.busy_s > before.busy_s
