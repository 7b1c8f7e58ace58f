"""The contract of the SGLang adapter: against a fake server, or a real one (see sglang_servers)."""

import math
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import anyio
import numpy as np
import pytest

from sglang_servers import REAL_URL, Served, adapter, request, serving
from sostenuto.errors import EngineError
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.sglang.bodies import sampling_params
from sostenuto.runtime.engines.sglang.engine import SGLangEngine
from sostenuto.runtime.engines.wire import (
    CommitRequest,
    Feature,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Grammar,
    PauseMode,
    Sampling,
    ScoreRequest,
    WireSpan,
)
from sostenuto.types import ProgramId, Version

pytestmark = pytest.mark.timeout(300 if REAL_URL else 60)

TOLERANCE = 2e-4
LONG = 1000 if REAL_URL else 200
"""Tokens of a turn that runs until something is done to it: a real server needs a millisecond for one."""
_numbers = count(1)


def prompt(length: int = 12) -> list[int]:
    """A context that no other test has used."""
    return np.random.default_rng([length, next(_numbers)]).integers(0, 64, length).tolist()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as served:
        yield served


@pytest.fixture
async def engine(served: Served) -> AsyncIterator[SGLangEngine]:
    async with adapter(served) as engine:
        yield engine


async def until_running(engine: SGLangEngine, requests: int) -> None:
    while (await engine.load()).running != requests:  # noqa: ASYNC110 - the change is in another process
        await anyio.sleep(0.005)


def long(name: str, tokens: list[int] | None = None, **options: object) -> GenerateRequest:
    fields: dict[str, object] = {"max_new_tokens": LONG, **options}
    return request(name, tokens or prompt(), **fields)


async def next_version(engine: SGLangEngine) -> str:
    return str(Version.parse((await engine.capabilities()).version).next())


async def test_it_says_what_it_is_and_can_do(engine: SGLangEngine):
    protocol: Engine = engine
    facts = await protocol.capabilities()
    assert (facts.kind, facts.vocabulary_size) == ("sglang", 80)
    assert Version.parse(facts.version) >= Version(0, 0)
    assert facts.features >= {
        Feature.HOLD, Feature.SCORE, Feature.UPDATE, Feature.PAUSE, Feature.STREAM, Feature.TRUNCATION,
        Feature.PENALTIES, Feature.GRAMMAR, Feature.TOP_LOGPROBS,
    }  # fmt: skip
    assert 0 < facts.context_tokens <= facts.kv_tokens


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 2.0])
async def test_logprobs_are_those_of_the_distribution_that_was_drawn_from(
    engine: SGLangEngine, served: Served, temperature: float
):
    tokens = prompt()
    reply = await engine.generate(request("a", tokens, sampling=Sampling(temperature=temperature, seed=3)))
    whole = tokens + reply.token_ids
    if temperature == 0.0 and served.fake is None:
        assert reply.finish_reason is FinishReason.LENGTH
    expected = served.logprobs(whole, len(tokens), temperature=temperature or 1.0)
    np.testing.assert_allclose(reply.logprobs, expected, atol=TOLERANCE)
    assert [(span.start, span.end) for span in reply.versions] == [(0, 8)]
    assert reply.cached_tokens + reply.prefilled_tokens == len(tokens)


async def test_scores_are_the_logprobs_of_given_tokens(engine: SGLangEngine, served: Served):
    tokens = prompt(40)
    reply = await engine.score(ScoreRequest(token_ids=tokens, start=5, top_logprobs=3))
    np.testing.assert_allclose(reply.logprobs, served.logprobs(tokens, 5), atol=TOLERANCE)
    assert reply.top_logprobs is not None
    assert len(reply.top_logprobs) == 35
    for token, value, row in zip(tokens[5:], reply.logprobs, reply.top_logprobs, strict=True):
        assert len(row) == 3
        assert row == sorted(row, key=lambda pair: -pair[1])
        assert dict(row).get(token, value) == pytest.approx(value, abs=TOLERANCE)


async def test_a_later_turn_finds_its_kv_and_another_salt_does_not(engine: SGLangEngine):
    tokens = prompt(64)
    first = await engine.generate(request("p", tokens))
    second = [*tokens, *first.token_ids, 5, 6]
    assert (await engine.load()).held_programs == 1
    other = await engine.generate(request("p2", second, salt="other"))
    again = await engine.generate(request("p3", second, program_id="p"))
    assert other.cached_tokens == 0
    assert again.cached_tokens >= len(tokens)
    for _ in range(2):
        await engine.release(ProgramId("p"))
    await engine.release(ProgramId("p2"))
    assert (await engine.load()).held_kv_tokens == 0


async def test_most_probable_tokens_come_best_first(engine: SGLangEngine):
    reply = await engine.generate(request("a", prompt(), top_logprobs=4))
    assert reply.top_logprobs is not None
    for token, value, row in zip(reply.token_ids, reply.logprobs, reply.top_logprobs, strict=True):
        assert [pair[1] for pair in row] == sorted((pair[1] for pair in row), reverse=True)
        assert len(row) == 4
        assert dict(row).get(token, value) == pytest.approx(value, abs=TOLERANCE)


async def test_truncated_sampling_has_the_logprobs_of_what_was_kept(engine: SGLangEngine, served: Served):
    tokens = prompt()
    sampling = Sampling(temperature=0.8, top_k=3)
    reply = await engine.generate(request("a", tokens, sampling=sampling, top_logprobs=3))
    assert reply.top_logprobs is not None
    full = served.logprobs(tokens + reply.token_ids, len(tokens), temperature=0.8)
    for token, value, row, before in zip(
        reply.token_ids, reply.logprobs, reply.top_logprobs, full, strict=True
    ):
        assert math.fsum(math.exp(kept) for _, kept in row) == pytest.approx(1.0, abs=1e-4)
        assert dict(row)[token] == pytest.approx(value, abs=TOLERANCE)
        assert value > before
    selected = await engine.generate(request("b", tokens, sampling=sampling))
    assert all(value <= 0 for value in selected.logprobs)


async def test_a_stop_token_is_the_last_and_other_tokens_do_not_stop(engine: SGLangEngine):
    tokens = prompt()
    free = await engine.generate(request("a", tokens, sampling=Sampling(temperature=0), max_new_tokens=20))
    assert (free.finish_reason, len(free.token_ids)) == (FinishReason.LENGTH, 20)
    stop = free.token_ids[7]
    sampling = Sampling(temperature=0, stop_token_ids=(stop,))
    reply = await engine.generate(request("b", tokens, sampling=sampling, max_new_tokens=20))
    assert reply.finish_reason is FinishReason.STOP
    assert reply.matched == stop
    assert reply.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


async def test_a_grammar_shapes_what_is_sampled(engine: SGLangEngine):
    # Longer than the turn: a text that is complete may end with the model's own end token.
    sampling = Sampling(grammar=Grammar(regex="[ab]{9,}"))
    reply = await engine.generate(request("a", prompt(), sampling=sampling))
    assert set(reply.token_ids) <= {0, 1}


def test_each_kind_of_grammar_that_it_takes_is_sent_under_its_name():
    for field in ("json_schema", "regex", "structural_tag"):
        sent = sampling_params(Sampling(grammar=Grammar.model_validate({field: "x"})), 1)
        assert {name: sent[name] for name in sent if name in Grammar.model_fields} == {field: "x"}


async def test_a_stream_of_spans_is_the_reply_in_parts(engine: SGLangEngine):
    spans: list[WireSpan] = []
    reply = await engine.generate(request("a", prompt(), max_new_tokens=30), spans=spans.append)
    assert [token for span in spans for token in span.token_ids] == reply.token_ids
    assert [value for span in spans for value in span.logprobs] == pytest.approx(reply.logprobs)
    assert {span.version for span in spans} == {span.version for span in reply.versions}


async def test_an_abort_ends_exactly_one_request_with_the_tokens_it_has(engine: SGLangEngine):
    replies: dict[str, GenerateReply] = {}

    async def ask(name: str) -> None:
        replies[name] = await engine.generate(long(name))

    async with anyio.create_task_group() as group:
        for name in ("p-1", "p-12"):
            group.start_soon(ask, name)
        await until_running(engine, 2)
        await engine.abort("p-1")
        await engine.abort("p")
    assert replies["p-1"].finish_reason is FinishReason.ABORT
    assert len(replies["p-1"].token_ids) == len(replies["p-1"].logprobs) < LONG
    assert (replies["p-12"].finish_reason, len(replies["p-12"].token_ids)) == (FinishReason.LENGTH, LONG)


async def test_a_cancelled_generate_is_aborted_in_the_engine(engine: SGLangEngine):
    async with anyio.create_task_group() as group:
        group.start_soon(engine.generate, long("a", max_new_tokens=400))
        await until_running(engine, 1)
        group.cancel_scope.cancel()
    await until_running(engine, 0)
    assert (await engine.load()).held_programs == 0
    reply = await engine.generate(request("a", prompt()))
    assert len(reply.token_ids) == 8


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RETRACT])
async def test_a_pause_loses_no_token_and_new_requests_wait(
    engine: SGLangEngine, served: Served, mode: PauseMode
):
    tokens = prompt()
    replies: list[GenerateReply] = []

    async def ask(made: GenerateRequest) -> None:
        replies.append(await engine.generate(made))

    async with anyio.create_task_group() as group:
        group.start_soon(ask, long("a", tokens))
        await until_running(engine, 1)
        await engine.pause(mode)
        await engine.pause(mode)
        group.start_soon(ask, request("b", prompt()))
        await anyio.sleep(0.2)
        assert not replies
        await engine.resume()
        await engine.resume()
    whole = max(replies, key=lambda reply: len(reply.token_ids))
    assert (len(replies), len(whole.token_ids)) == (2, LONG)
    assert whole.pause_s >= 0.2
    expected = served.logprobs(tokens + whole.token_ids, len(tokens))
    np.testing.assert_allclose(whole.logprobs, expected, atol=TOLERANCE)


async def test_an_abort_pause_answers_with_partial_tokens(engine: SGLangEngine):
    replies: list[GenerateReply] = []

    async def ask() -> None:
        replies.append(await engine.generate(long("a")))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await until_running(engine, 1)
        await engine.pause(PauseMode.ABORT)
    await engine.resume()
    assert replies[0].finish_reason is FinishReason.ABORT
    assert len(replies[0].token_ids) < LONG


async def test_a_finish_pause_answers_when_the_last_request_has_ended(engine: SGLangEngine):
    replies: list[GenerateReply] = []

    async def ask() -> None:
        replies.append(await engine.generate(long("a")))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await until_running(engine, 1)
        await engine.pause(PauseMode.FINISH)
        assert len(replies[0].token_ids) == LONG
        await engine.resume()
    assert (await engine.generate(request("b", prompt()))).finish_reason is FinishReason.LENGTH


async def test_a_request_can_be_aborted_while_the_engine_stands_still(engine: SGLangEngine):
    replies: dict[str, GenerateReply] = {}

    async def ask(name: str) -> None:
        replies[name] = await engine.generate(long(name))

    async with anyio.create_task_group() as group:
        group.start_soon(ask, "runs")
        await until_running(engine, 1)
        await engine.pause(PauseMode.KEEP)
        group.start_soon(ask, "waits")
        await anyio.wait_all_tasks_blocked()
        for name in ("waits", "runs"):
            await engine.abort(name)
        await engine.resume()
    assert {reply.finish_reason for reply in replies.values()} == {FinishReason.ABORT}
    assert replies["waits"].token_ids == []
    assert len(replies["runs"].token_ids) < LONG


async def test_an_update_in_mid_request_is_told_apart_token_by_token(engine: SGLangEngine, served: Served):
    version = await next_version(engine)
    old = (await engine.capabilities()).version
    await engine.prepare_update(served.publish(version, seed=7))
    held = prompt(50)
    await engine.generate(request("held", held))
    tokens = prompt()
    replies: list[GenerateReply] = []

    async def ask() -> None:
        replies.append(await engine.generate(long("a", tokens)))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await until_running(engine, 1)
        committed = await engine.commit_update(CommitRequest(version=version))
        assert (committed.recomputed_requests, committed.pause_s > 0) == (1, True)
    (reply,) = replies
    assert [span.version for span in reply.versions] == [old, version]
    assert len(reply.token_ids) == LONG
    change = reply.versions[1].start
    expected = served.logprobs(tokens + reply.token_ids, len(tokens) + change, folder=served.written(version))
    np.testing.assert_allclose(reply.logprobs[change:], expected, atol=TOLERANCE)
    assert (await engine.generate(request("held2", held))).cached_tokens == 0
    await _other_weights_again(engine, served)


async def _other_weights_again(engine: SGLangEngine, served: Served) -> None:
    """What `continue` and `keep` do: nothing is computed anew, held KV is found."""
    version = await next_version(engine)
    held = prompt(50)
    await engine.prepare_update(served.publish(version, seed=8))
    await engine.generate(request("kept", held))
    replies: list[GenerateReply] = []

    async def ask() -> None:
        replies.append(await engine.generate(long("a")))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await until_running(engine, 1)
        await engine.commit_update(CommitRequest(version=version, running="continue", held="keep"))
    assert replies[0].versions[-1].version == version
    assert len(replies[0].token_ids) == LONG
    assert (await engine.generate(request("kept2", held))).cached_tokens >= 49
    with pytest.raises(EngineError, match=r"min_version: 999\.0 is wanted"):
        await engine.generate(request("b", held, min_version="999.0"))
    assert (await engine.capabilities()).version == version


async def test_a_version_that_was_not_prepared_is_refused(engine: SGLangEngine, served: Served):
    version = await next_version(engine)
    await engine.prepare_update(served.publish(version, seed=1))
    await engine.abandon_update(version)
    with pytest.raises(EngineError, match=f"version {version} is not prepared; prepare it first"):
        await engine.commit_update(CommitRequest(version=version))
    assert not served.written(version).exists()
    assert (await engine.generate(request("a", prompt()))).token_ids


async def test_a_flush_leaves_no_kv_to_be_found(engine: SGLangEngine):
    tokens = prompt(40)
    await engine.generate(request("a", tokens))
    await engine.flush()
    assert (await engine.generate(request("b", tokens))).cached_tokens == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_ids": [1, 80]}, "token_ids: 80 is not in the model's vocabulary of 80; use the tokenizer"),
        ({"token_ids": []}, "token_ids: is empty"),
        ({"token_ids": [1] * 100_000}, "token_ids: 100000 tokens and one to sample do not fit into"),
        ({"sampling": Sampling(repetition_penalty=1.1)}, "repetition_penalty: SGLang counts sampled tokens"),
        ({"sampling": Sampling(top_p=0.5)}, "top_k: 0: what is kept is known for 1 to"),
        ({"sampling": Sampling(grammar=Grammar(lark="x"))}, "grammar.lark: SGLang takes none"),
    ],
)
async def test_what_it_cannot_serve_is_refused_by_field_and_remedy(
    engine: SGLangEngine, options: dict[str, object], message: str
):
    fields = {"token_ids": [1, 2], **options}
    with pytest.raises(EngineError, match=f"engine e0.*: {message}"):
        await engine.generate(request("a", **fields))  # pyright: ignore[reportArgumentType]


async def test_what_is_sampled_ends_where_the_context_does(engine: SGLangEngine):
    limit = (await engine.capabilities()).context_tokens
    reply = await engine.generate(request("a", prompt(limit - 5), max_new_tokens=1000))
    assert (reply.finish_reason, len(reply.token_ids)) == (FinishReason.LENGTH, 5)


async def test_kv_that_is_moved_by_itself_cannot_be_moved(engine: SGLangEngine):
    for call in (engine.offload, engine.restore):
        with pytest.raises(EngineError, match="it cannot do offload; SGLang has no call for it"):
            await call(ProgramId("p"))
