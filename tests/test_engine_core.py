"""The embedded engine's core in this process, against plain transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from engine_models import (
    CONFIGS,
    TOKENIZER_SIZE,
    VOCABULARY_SIZE,
    Desk,
    load,
    make_core,
    make_folder,
    prompt,
    reference_logprobs,
)
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.wire import FinishReason, ScoreReply, ScoreRequest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def module(folder: Path) -> PreTrainedModel:
    return load(folder).module


@pytest.fixture
def desk(folder: Path) -> Desk:
    return Desk(make_core(folder))


def assert_exact(
    module: PreTrainedModel, context: list[int], token_ids: list[int], logprobs: list[float]
) -> None:
    expected = reference_logprobs(module, context + token_ids, len(context))
    np.testing.assert_allclose(logprobs, expected, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_logprobs_equal_those_of_plain_transformers(tmp_path: Path, kind: str):
    model = load(make_folder(tmp_path, kind, seed=3))
    desk = Desk(make_core(tmp_path))
    prompts = [prompt(length, seed=length) for length in (1, 7, 40, 300)]
    for i, context in enumerate(prompts):
        desk.submit(str(i), context, max_new_tokens=12, sampling={"seed": i})
    desk.run()
    for i, context in enumerate(prompts):
        reply = desk.reply(str(i))
        assert len(reply.token_ids) == 12
        assert_exact(model.module, context, reply.token_ids, reply.logprobs)


def test_a_request_gives_the_same_alone_and_in_a_batch(folder: Path):
    alone = [
        Desk(make_core(folder)).turn("x", prompt(20 + i, seed=i), max_new_tokens=30, sampling={"seed": i})
        for i in range(6)
    ]
    together = Desk(make_core(folder))
    for i in range(6):
        together.submit(str(i), prompt(20 + i, seed=i), max_new_tokens=30, sampling={"seed": i})
        together.core.step()
    together.run()
    for i, reply in enumerate(alone):
        assert together.reply(str(i)).token_ids == reply.token_ids
        np.testing.assert_allclose(together.reply(str(i)).logprobs, reply.logprobs, rtol=2e-6, atol=1e-5)


def test_temperature_is_part_of_the_distribution_that_is_reported(desk: Desk, module: PreTrainedModel):
    context = prompt(9)
    reply = desk.turn("x", context, max_new_tokens=20, sampling={"temperature": 0.6, "seed": 5})
    expected = reference_logprobs(module, context + reply.token_ids, len(context), temperature=0.6)
    np.testing.assert_allclose(reply.logprobs, expected, rtol=2e-6, atol=1e-5)


def test_temperature_zero_takes_the_most_likely_token_and_reports_temperature_one(
    desk: Desk, module: PreTrainedModel
):
    context = prompt(9)
    reply = desk.turn("x", context, max_new_tokens=10, sampling={"temperature": 0.0, "seed": 5})
    again = desk.turn("y", context, max_new_tokens=10, sampling={"temperature": 0.0, "seed": 6})
    assert again.token_ids == reply.token_ids
    assert_exact(module, context, reply.token_ids, reply.logprobs)
    for i, token in enumerate(reply.token_ids):
        others = [reference_logprobs(module, [*context, *reply.token_ids[:i], t], len(context) + i)[0]
                  for t in range(0, TOKENIZER_SIZE, 9)]  # fmt: skip
        assert max(others) <= reply.logprobs[i] + 1e-5
        assert token < TOKENIZER_SIZE


def test_a_padded_vocabulary_is_never_sampled(desk: Desk):
    for i in range(4):
        desk.submit(str(i), prompt(5, seed=i), max_new_tokens=200, sampling={"seed": i, "temperature": 5.0})
    desk.run()
    sampled = [token for i in range(4) for token in desk.reply(str(i)).token_ids]
    assert max(sampled) < TOKENIZER_SIZE < VOCABULARY_SIZE
    assert desk.core.capabilities().tokenizer_size == TOKENIZER_SIZE


def test_the_next_turn_prefills_the_new_suffix_and_nothing_else(desk: Desk, module: PreTrainedModel):
    context, reply = prompt(30), None
    for turn in range(5):
        before = desk.core.load().prefilled_tokens
        held = desk.core.load().held_kv_tokens
        reply = desk.turn(f"r{turn}", context, program_id="p", sampling={"seed": turn})
        assert reply.cached_tokens == held
        assert reply.cached_tokens + reply.prefilled_tokens == len(context)
        assert desk.core.load().prefilled_tokens - before == reply.prefilled_tokens
        assert_exact(module, context, reply.token_ids, reply.logprobs)
        # The KV of the last sampled token is not computed yet.
        assert desk.core.load().held_kv_tokens == len(context) + len(reply.token_ids) - 1
        context = [*context, *reply.token_ids, *prompt(11, seed=turn)]
    assert reply is not None
    assert reply.prefilled_tokens == 1 + 11


def test_held_kv_is_matched_by_tokens_and_not_assumed(desk: Desk, module: PreTrainedModel):
    first = desk.turn("r0", prompt(30), program_id="p")
    rewritten = [*prompt(30)[:12], *prompt(25, seed=9), *first.token_ids]
    reply = desk.turn("r1", rewritten, program_id="p")
    assert reply.cached_tokens == 12
    assert_exact(module, rewritten, reply.token_ids, reply.logprobs)


def test_a_turn_that_is_not_held_leaves_nothing(desk: Desk):
    desk.turn("a", prompt(20), hold=False)
    desk.turn("b", prompt(20, seed=1))
    desk.core.release("b")
    desk.core.release("b")
    load = desk.core.load()
    assert (load.held_programs, load.used_kv_tokens) == (0, 0)


def test_releasing_a_program_that_runs_prevents_its_hold(desk: Desk):
    desk.submit("a", prompt(20))
    desk.core.step()
    desk.core.release("a")
    desk.run()
    assert desk.core.load().held_programs == 0


def test_a_group_computes_its_prompt_once(desk: Desk, module: PreTrainedModel):
    context = prompt(120)
    for i in range(8):
        desk.submit(str(i), context, sampling={"seed": i})
    desk.run()
    replies = [desk.reply(str(i)) for i in range(8)]
    assert sum(reply.prefilled_tokens for reply in replies) == 120 + 7
    assert desk.core.load().prefilled_tokens == 120 + 7
    for reply in replies:
        assert_exact(module, context, reply.token_ids, reply.logprobs)
    late = desk.turn("late", [*context, 3], sampling={"seed": 9})
    assert late.cached_tokens >= 120


def test_requests_of_very_different_lengths_share_a_batch(folder: Path, module: PreTrainedModel):
    desk = Desk(make_core(folder, kv_tokens=3000))
    lengths = (3, 240, 255, 256, 400, 17)
    for length in lengths:
        desk.submit(str(length), prompt(length, seed=length), max_new_tokens=60, sampling={"seed": length})
        desk.core.step()
    desk.run()
    for length in lengths:
        reply = desk.reply(str(length))
        assert_exact(module, prompt(length, seed=length), reply.token_ids, reply.logprobs)


def test_ten_idle_holders_do_not_keep_a_new_request_out(folder: Path):
    desk = Desk(make_core(folder, kv_tokens=510))
    for i in range(10):
        desk.turn(f"idle{i}", prompt(45, seed=i), max_new_tokens=6)
    assert desk.core.load().held_kv_tokens == 500
    reply = desk.turn("new", prompt(100, seed=99))
    assert len(reply.token_ids) == 8
    load = desk.core.load()
    assert load.used_kv_tokens <= 510
    # The longest idle went, and no more than needed.
    assert 2 <= load.evicted_programs <= 4
    assert desk.turn("back", [*prompt(45, seed=9), 1], program_id="idle9").cached_tokens == 45


def test_a_pool_that_is_too_small_for_all_serves_all_in_turn(folder: Path, module: PreTrainedModel):
    desk = Desk(make_core(folder, kv_tokens=150))
    for i in range(6):
        desk.submit(str(i), prompt(20, seed=i), max_new_tokens=100, sampling={"seed": i})
    for _ in range(3000):
        if not desk.core.busy:
            break
        desk.core.step()
        assert desk.core.load().used_kv_tokens <= 150
    for i in range(6):
        reply = desk.reply(str(i))
        assert len(reply.token_ids) == 100
        assert reply.cached_tokens + reply.prefilled_tokens == 20
        assert_exact(module, prompt(20, seed=i), reply.token_ids, reply.logprobs)


def test_a_stop_token_is_the_last_token(desk: Desk):
    free = desk.turn("a", prompt(9), max_new_tokens=30)
    stop = free.token_ids[4]
    reply = desk.turn("b", prompt(9), max_new_tokens=30, sampling={"stop_token_ids": [stop]})
    assert reply.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (reply.finish_reason, reply.matched) == (FinishReason.STOP, stop)


def test_a_stop_string_may_span_tokens_and_cuts_nothing(desk: Desk, folder: Path):
    tokenizer = load(folder).tokenizer
    free = desk.turn("a", prompt(9), max_new_tokens=30)
    text = tokenizer.decode(free.token_ids[3:6])
    reply = desk.turn("b", prompt(9), max_new_tokens=30, sampling={"stop_strings": ["never#", text]})
    assert reply.token_ids == free.token_ids[: len(reply.token_ids)]
    assert tokenizer.decode(reply.token_ids).endswith(text)
    assert (reply.finish_reason, reply.matched) == (FinishReason.STOP, text)


def test_the_context_ends_a_turn_and_a_longer_prompt_is_refused_with_the_numbers(folder: Path):
    desk = Desk(make_core(folder, kv_tokens=100))
    reply = desk.turn("a", prompt(90), max_new_tokens=50)
    assert (reply.finish_reason, len(reply.token_ids)) == (FinishReason.LENGTH, 10)
    with pytest.raises(Refusal, match=r"100 tokens and one to sample.*512 tokens, the KV pool 100"):
        desk.submit("b", prompt(100))


def test_abort_returns_what_was_sampled_and_ends_only_that_request(desk: Desk):
    for name in ("p-1", "p-12"):
        desk.submit(name, prompt(20, seed=len(name)), max_new_tokens=40)
    for _ in range(6):
        desk.core.step()
    desk.core.abort("")
    desk.core.abort("p-1")
    desk.run()
    aborted, other = desk.reply("p-1"), desk.reply("p-12")
    assert aborted.finish_reason is FinishReason.ABORT
    assert 0 < len(aborted.token_ids) == len(aborted.logprobs) < 40
    assert aborted.versions[-1].end == len(aborted.token_ids)
    assert len(other.token_ids) == 40


def test_a_request_that_waits_can_be_aborted(folder: Path):
    desk = Desk(make_core(folder, concurrency=1))
    desk.submit("a", prompt(5))
    desk.submit("b", prompt(5))
    desk.core.step()
    desk.core.abort("b")
    desk.run()
    assert desk.reply("b").token_ids == []
    assert len(desk.reply("a").token_ids) == 8


def score(core: Core, token_ids: list[int], start: int, temperature: float = 1.0) -> ScoreReply:
    answers: list[ScoreReply | Refusal] = []
    core.score(ScoreRequest(token_ids=token_ids, start=start, temperature=temperature), answers.append)
    while core.busy:
        core.step()
    assert isinstance(answers[0], ScoreReply)
    return answers[0]


@pytest.mark.parametrize(("length", "start"), [(2, 1), (300, 1), (300, 299), (511, 257)])
def test_score_equals_plain_transformers(desk: Desk, module: PreTrainedModel, length: int, start: int):
    token_ids = prompt(length, seed=1)
    reply = score(desk.core, token_ids, start, temperature=0.8)
    np.testing.assert_allclose(
        reply.logprobs, reference_logprobs(module, token_ids, start, 0.8), rtol=2e-6, atol=1e-5
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"token_ids": []}, "token_ids: is empty"),
        ({"token_ids": [VOCABULARY_SIZE]}, "token_ids: 80 is not in"),
        ({"token_ids": [-1]}, "token_ids: -1 is not in"),
        ({"token_ids": [1], "sampling": {"stop_strings": [""]}}, "stop_strings"),
        ({"token_ids": [1], "min_version": "0.1"}, "0.1 is wanted, 0.0 is served"),
        ({"token_ids": [1], "min_version": "x"}, "EPOCH.NUMBER"),
        ({"token_ids": [1], "routed_experts": True}, "routed_experts, which this engine cannot do"),
    ],
)
def test_a_wrong_request_is_refused_by_field(desk: Desk, fields: dict[str, Any], named: str):
    with pytest.raises(Refusal, match=named):
        desk.submit("a", **fields)
