"""Guesses change how fast tokens come, and nothing about the tokens."""

from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from engine_models import (
    CONFIGS,
    Desk,
    load,
    make_core,
    make_folder,
    prompt,
    publish,
    reference_logprobs,
)
from sostenuto.runtime.engines.embedded.speculation.acceptance import Acceptance
from sostenuto.runtime.engines.embedded.speculation.lengths import StepCost, best_lengths, measure
from sostenuto.runtime.engines.embedded.speculation.lookup import PromptLookup, continuation
from sostenuto.runtime.engines.embedded.speculation.speculator import Speculator
from sostenuto.runtime.engines.wire import CommitRequest, FinishReason, GenerateReply
from speculation_models import TEMPERATURE, Foreseen, chi_square_p, draw_many, guesses, guessing_desk, joint
from test_engine_core import assert_exact


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def module(folder: Path) -> PreTrainedModel:
    return load(folder).module


def repetitive(seed: int = 0) -> list[int]:
    """A text that says a thing twice and begins to say it again."""
    phrase = prompt(14, seed=seed)
    return [*phrase, *prompt(5, seed=seed + 100), *phrase, *prompt(5, seed=seed + 200), *phrase[:6]]


@pytest.mark.parametrize(
    ("context", "most", "found"),
    [
        ([1, 2, 3, 9, 1, 2], 3, [3, 9, 1]),
        ([5, 1, 2, 7, 6, 1, 2, 8, 4, 5, 1, 2], 2, [7, 6]),
        ([1, 2, 7, 1, 2, 8, 1, 2], 2, [8, 1]),
        ([4, 7, 7, 7], 5, [7, 7, 7, 7, 7]),
        ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
        ([1, 2, 3, 2], 4, []),
        ([1, 2, 3, 4], 4, []),
        ([1], 4, []),
    ],
)
def test_lookup_continues_the_longest_repeated_suffix(context: list[int], most: int, found: list[int]):
    assert continuation(np.array(context, dtype=np.int32), most).tolist() == found


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_output_is_that_of_a_core_that_does_not_guess(tmp_path: Path, kind: str):
    folder = make_folder(tmp_path, kind, seed=3)
    plain, desk = Desk(make_core(folder)), guessing_desk(folder, PromptLookup(), most=6)
    for i in range(4):
        for each in (plain, desk):
            each.submit(str(i), repetitive(i), max_new_tokens=60, sampling={"temperature": 0.0})
    plain.run()
    desk.run(steps=61)
    module = load(folder).module
    for i in range(4):
        reply = desk.reply(str(i))
        assert reply.token_ids == plain.reply(str(i)).token_ids
        assert_exact(module, repetitive(i), reply.token_ids, reply.logprobs)
    drafted, accepted = guesses(desk)
    assert 0 < accepted < drafted
    assert desk.core.load().generated_tokens == 4 * 60


def test_each_seed_draws_the_same_tokens_alone_in_a_batch_and_without_guesses(
    folder: Path, module: PreTrainedModel
):
    answers: dict[str, list[int]] = {}
    plain = Desk(make_core(folder))
    for i in range(5):
        options = {"max_new_tokens": 30, "sampling": {"seed": i, "temperature": 0.5 + i / 4}}
        answers[str(i)] = plain.turn(str(i), prompt(20 + i, seed=i), **options).token_ids
    together = guessing_desk(folder, Foreseen(answers, wrong_every=4))
    for i in range(5):
        options = {"max_new_tokens": 30, "sampling": {"seed": i, "temperature": 0.5 + i / 4}}
        alone = guessing_desk(folder, Foreseen(answers, wrong_every=3), most=1 + i)
        assert alone.turn(str(i), prompt(20 + i, seed=i), **options).token_ids == answers[str(i)]
        together.submit(str(i), prompt(20 + i, seed=i), **options)
        together.core.step()
    together.run()
    for i in range(5):
        reply, context = together.reply(str(i)), prompt(20 + i, seed=i)
        assert reply.token_ids == answers[str(i)]
        expected = reference_logprobs(module, context + reply.token_ids, len(context), 0.5 + i / 4)
        np.testing.assert_allclose(reply.logprobs, expected, rtol=2e-6, atol=1e-5)


def test_right_guesses_save_their_steps(folder: Path):
    answers = {"a": Desk(make_core(folder)).turn("a", prompt(20), max_new_tokens=41).token_ids}
    desk = guessing_desk(folder, Foreseen(answers), most=4)
    desk.submit("a", prompt(20), max_new_tokens=41)
    # One step for the prompt and its first token, then five tokens each.
    desk.run(steps=9 + 1)
    assert guesses(desk) == (32, 32)
    assert desk.reply("a").token_ids == answers["a"]


def test_three_tokens_have_their_joint_distribution_with_prompt_lookup(folder: Path, module: PreTrainedModel):
    context = guessable(folder, module)
    desk = guessing_desk(folder, PromptLookup(), most=3, concurrency=64)
    drawn = draw_many(desk, context, count=2000)
    drafted, accepted = guesses(desk)
    assert 0.1 * drafted < accepted < 0.9 * drafted
    expected = joint(module, context, TEMPERATURE)
    assert chi_square_p(expected, drawn) > 0.01
    guess = int(continuation(np.array([*context, *drawn[0][:1]], dtype=np.int32), 1)[0])
    skewed = [(tokens[0], guess, tokens[2]) if i % 5 == 0 else tokens for i, tokens in enumerate(drawn)]
    assert chi_square_p(expected, skewed) < 1e-6


def guessable(folder: Path, module: PreTrainedModel) -> list[int]:
    """A prompt that repeats itself, whose continuation by lookup is likely and not certain."""
    desk = Desk(make_core(folder))
    for seed in range(100):
        start = prompt(4, seed=seed)
        reply = desk.turn(f"{seed}", start, max_new_tokens=12, sampling={"temperature": 0.0})
        context = [*start, *reply.token_ids]
        guess = continuation(np.array(context, dtype=np.int32), 3).tolist()
        logprobs = reference_logprobs(module, [*context, *guess], len(context), TEMPERATURE)
        if all(-1.2 < logprob < -0.1 for logprob in logprobs) and guess:
            return context
    raise AssertionError("none is")


def turn_both(folder: Path, **options: object) -> tuple[GenerateReply, GenerateReply, int]:
    """A turn without guesses, one with guesses that run past its end, and the KV that the second holds."""
    free = Desk(make_core(folder)).turn("a", prompt(9), max_new_tokens=40)
    plain = Desk(make_core(folder)).turn("a", prompt(9), **options)
    desk = guessing_desk(folder, Foreseen({"a": free.token_ids}), most=7)
    return plain, desk.turn("a", prompt(9), **options), desk.core.load().held_kv_tokens


def test_a_turn_ends_where_it_would_without_guesses(folder: Path):
    free = Desk(make_core(folder)).turn("a", prompt(9), max_new_tokens=40).token_ids
    text = load(folder).tokenizer.decode(free[9:12])
    ends = [
        {"max_new_tokens": 40, "sampling": {"stop_token_ids": [free[10]]}},
        {"max_new_tokens": 40, "sampling": {"stop_strings": ["never#", text]}},
        *({"max_new_tokens": count} for count in (1, 2, 8, 9, 10)),
    ]
    for options in ends:
        plain, reply, held = turn_both(folder, **options)
        assert reply.token_ids == plain.token_ids
        assert (reply.finish_reason, reply.matched) == (plain.finish_reason, plain.matched)
        np.testing.assert_allclose(reply.logprobs, plain.logprobs, rtol=2e-6, atol=1e-5)
        assert held == 9 + len(reply.token_ids) - 1


def test_the_next_turn_goes_on_from_kv_without_a_wrong_guess_in_it(folder: Path, module: PreTrainedModel):
    answers = {"r0": Desk(make_core(folder)).turn("r0", prompt(30)).token_ids}
    desk = guessing_desk(folder, Foreseen({**answers, "r1": []}, wrong_every=3))
    first = desk.turn("r0", prompt(30), program_id="p")
    context = [*prompt(30), *first.token_ids, 5, 6]
    second = desk.turn("r1", context, program_id="p")
    assert (second.cached_tokens, second.prefilled_tokens) == (30 + 7, 3)
    assert_exact(module, context, second.token_ids, second.logprobs)


def test_guesses_take_no_room_that_somebody_needs(folder: Path, module: PreTrainedModel):
    answers: dict[str, list[int]] = {}
    for i in range(6):
        options = {"max_new_tokens": 90, "sampling": {"seed": i}}
        answers[str(i)] = Desk(make_core(folder)).turn(str(i), prompt(20, seed=i), **options).token_ids
    desk = guessing_desk(folder, Foreseen(answers, wrong_every=5), kv_tokens=130, most=8)
    for i in range(6):
        desk.submit(str(i), prompt(20, seed=i), max_new_tokens=90, sampling={"seed": i})
    while desk.core.busy:
        desk.core.step()
        assert desk.core.load().used_kv_tokens <= 130
    for i in range(6):
        reply = desk.reply(str(i))
        assert reply.token_ids == answers[str(i)]
        assert reply.cached_tokens + reply.prefilled_tokens == 20
        assert_exact(module, prompt(20, seed=i), reply.token_ids, reply.logprobs)


def test_spans_and_logprobs_are_exact_through_updates_aborts_and_preemption(folder: Path, tmp_path: Path):
    rng = np.random.default_rng(5)
    modules = {"0.0": load(folder).module}
    desk = guessing_desk(folder, PromptLookup(), kv_tokens=260, most=5)
    contexts: dict[str, list[int]] = {}
    for step in range(240):
        if step % 8 == 0 and len(contexts) < 20:
            name = f"r{len(contexts)}"
            contexts[name] = repetitive(int(rng.integers(4)))
            temperature = float(rng.choice([0.0, 0.4, 1.0]))
            sampling = {"seed": step, "temperature": temperature, "stop_token_ids": [7]}
            desk.submit(
                name, contexts[name], max_new_tokens=int(rng.integers(2, 40)), hold=step % 3 == 0,
                program_id=f"p{len(contexts) % 7}", sampling=sampling,
            )  # fmt: skip
        if step in {50, 110, 170}:
            version = f"0.{len(modules)}"
            modules[version] = load(make_folder(tmp_path / version, seed=step)).module
            desk.core.weights.stage(publish(tmp_path, modules[version], version))
            desk.core.commit(CommitRequest(version=version))
        if step % 37 == 36:
            desk.core.abort(str(rng.choice(list(contexts))))
        desk.core.step()
        assert desk.core.load().used_kv_tokens <= 260
    desk.run()
    assert guesses(desk)[1] > 0
    mixed = 0
    for name, context in contexts.items():
        reply = desk.reply(name)
        mixed += len(reply.versions) > 1
        assert reply.finish_reason is not FinishReason.STOP or reply.token_ids[-1] == 7
        for span in reply.versions:
            assert_span(modules[span.version], context, reply, span.start, span.end)
    assert mixed


def assert_span(
    module: PreTrainedModel, context: list[int], reply: GenerateReply, start: int, end: int
) -> None:
    """Its log-probabilities are those of `module` at one of the temperatures that were asked for."""
    before = [*context, *reply.token_ids[:start]]
    found = reply.logprobs[start:end]
    expected = [
        reference_logprobs(module, [*before, *reply.token_ids[start:end]], len(before), temperature)
        for temperature in (1.0, 0.4)
    ]
    assert any(np.allclose(found, one, rtol=2e-6, atol=1e-5) for one in expected)


def test_guesses_are_counted_before_and_after_an_update(folder: Path, tmp_path: Path):
    desk = guessing_desk(folder, PromptLookup())
    desk.turn("a", repetitive(), max_new_tokens=30, sampling={"temperature": 0.0}, hold=False)
    before = desk.core.load().speculation
    desk.core.weights.stage(publish(tmp_path, load(make_folder(tmp_path / "new", seed=8)).module, "0.1"))
    desk.core.commit(CommitRequest(version="0.1"))
    desk.turn("b", repetitive(), max_new_tokens=30, sampling={"temperature": 0.0}, hold=False)
    after = desk.core.load().speculation
    assert before is not None
    assert after is not None
    assert after.source == "prompt"
    assert before.total == before.since_update == after.before_update
    assert before.before_update.drafted == 0
    assert after.total.drafted == before.total.drafted + after.since_update.drafted
    assert after.total.accepted == before.total.accepted + after.since_update.accepted


def test_the_cost_of_a_step_is_measured_and_lies_on_straight_lines():
    clock = iter(x for s in (0, 5, 0, 4, 0, 6, 0, 3, 0, 3, 0, 3, 0, 9, 0, 8, 0, 9) for x in (float(s),))
    ran: list[int] = []
    cost = measure(ran.append, (1, 2, 4), lambda: next(clock))
    assert ran == [1, *[1] * 3, *[2] * 3, *[4] * 3]
    assert cost == StepCost((1, 2, 4), (4.0, 4.0, 8.0))
    assert [cost(tokens) for tokens in (1, 2, 3, 4, 6)] == [4, 4, 6, 8, 12]
    assert StepCost((1,), (2.0,))(50) == 2.0


def test_guesses_are_as_long_as_pays():
    free, dear = StepCost((1, 2), (1.0, 1.0)), StepCost((1, 2), (1.0, 2.0))
    assert best_lengths([0.9, 0.2], [4, 3], 2, free, 0.0, 99) == [4, 3]
    assert best_lengths([0.9, 0.2], [4, 3], 2, dear, 0.0, 99) == [0, 0]
    assert best_lengths([0.9, 0.2], [4, 3], 2, free, 0.0, 3) == [3, 0]
    assert best_lengths([], [], 2, free, 0.0, 3) == []
    # A pass that costs 1 + T/10: the guess whose chance is worth its tenth is the last.
    cost = StepCost((0, 10), (1.0, 2.0))
    assert best_lengths([0.5], [8], 1, cost, 0.0, 99) == [2]
    assert best_lengths([0.5], [8], 1, cost, 0.3, 99) == [1]
    # The same guesses in a batch that fills the machine do not pay.
    assert (
        best_lengths([0.5] * 40, [8] * 40, 40, StepCost((0, 16, 32), (1.0, 1.0, 2.0)), 0.0, 999) == [0] * 40
    )


def test_guesses_that_are_wrong_become_rare_and_are_tried_again(folder: Path):
    answers = {"a": [1] * 400}  # hardly ever drawn
    speculator = Speculator(Foreseen(answers), most=4, step_s=lambda tokens: 1.0 + 0.3 * tokens)
    desk = Desk(make_core(folder, speculator=speculator))
    desk.submit("a", prompt(20), max_new_tokens=400)
    drafted: list[int] = []
    while desk.core.busy:
        desk.core.step()
        drafted.append(guesses(desk)[0])
    assert drafted[10] > 0
    assert drafted[-1] < 0.15 * 400
    assert drafted[-1] > drafted[len(drafted) // 2] > drafted[10]


def test_a_request_with_a_better_record_is_guessed_further_for():
    good, bad = Acceptance(), Acceptance()
    good.learn(4, 4)
    bad.learn(1, 0)
    lengths = best_lengths([good.chance(0.5), bad.chance(0.5)], [8, 8], 2, lambda t: 1 + 0.2 * t, 0.0, 99)
    assert lengths[0] > lengths[1]
