"""The distribution that tokens are drawn from, against a slow one written out from `wire.Sampling`."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_models import Desk, load, make_core, make_folder, prompt, reference_logits
from sostenuto.runtime.engines.embedded.distribution import log_probabilities
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.rows import Row
from sostenuto.runtime.engines.embedded.sampling import chosen, draw, noise
from sostenuto.runtime.engines.wire import Sampling, ScoreReply, ScoreRequest

Numbers = NDArray[np.float64]

SETTINGS = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=0.0),
    Sampling(top_k=1),
    Sampling(top_k=7, temperature=1.3),
    Sampling(top_k=10_000),
    Sampling(top_p=0.9),
    Sampling(top_p=0.99999),
    Sampling(top_p=1e-9),
    Sampling(min_p=0.05),
    Sampling(min_p=1.0),
    Sampling(top_k=20, top_p=0.7, min_p=0.1),
    Sampling(repetition_penalty=1.4),
    Sampling(repetition_penalty=0.5, top_p=0.5),
    Sampling(presence_penalty=0.7),
    Sampling(frequency_penalty=0.4, temperature=0.3),
    Sampling(
        repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=0.3, temperature=0.8,
        top_k=40, top_p=0.95, min_p=0.01,
    ),
]  # fmt: skip


def reference(logits: Numbers, row: Row) -> Numbers:
    """Log-probabilities in float64, token by token."""
    sampling, values = row.sampling, [float(value) for value in logits]
    tokens, sampled = (
        [int(token) for token in part if token < len(values)]
        for part in (row.tokens, row.tokens[row.prompt_tokens :])
    )
    for token in set(tokens):
        value = values[token]
        values[token] = (
            value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        )
    for token, count in Counter(sampled).items():
        values[token] -= sampling.presence_penalty + count * sampling.frequency_penalty
    values = [value / (sampling.temperature or 1.0) for value in values]
    kept = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    kept = _smallest_set(kept, values, sampling.top_p)
    kept = [token for token in kept if math.exp(values[token] - values[kept[0]]) >= sampling.min_p - 1e-7]
    total = math.log(sum(math.exp(values[token]) for token in kept))
    result = np.full(len(values), -np.inf)
    for token in kept:
        result[token] = values[token] - total
    return result


def _smallest_set(kept: list[int], values: list[float], share: float) -> list[int]:
    if share == 1:
        return kept
    mass = sum(math.exp(values[token]) for token in kept)
    reached = 0.0
    for count, token in enumerate(kept, start=1):
        reached += math.exp(values[token])
        if reached >= share * mass:
            return kept[:count]
    return kept


def changed(one: Row, **fields: object) -> Row:
    """The row with other settings."""
    return Row(one.sampling.model_copy(update=fields), one.tokens, one.prompt_tokens)


def ids(tensor: torch.Tensor) -> list[int]:
    return [int(value) for value in tensor]


def row(
    sampling: Sampling, tokens: list[int], prompt_tokens: int, allowed: NDArray[np.int32] | None = None
) -> Row:
    return Row(sampling, np.array(tokens, dtype=np.int32), prompt_tokens, allowed)


def some_rows(vocabulary: int, samplings: list[Sampling]) -> list[Row]:
    generator = np.random.default_rng(vocabulary)
    contexts = [generator.integers(0, vocabulary + 2, 60).tolist() for _ in samplings]
    return [row(sampling, tokens, 20) for sampling, tokens in zip(samplings, contexts, strict=True)]


def some_logits(rows: int, vocabulary: int, *, step: float = 0.0, seed: int = 0) -> torch.Tensor:
    """With `step`, multiples of it: many tokens are equally probable."""
    logits = np.random.default_rng(seed).normal(0, 2.5, (rows, vocabulary))
    return torch.tensor(np.round(logits / step) * step if step else logits, dtype=torch.float32)


@pytest.mark.parametrize("vocabulary", [5, 65, 3000])
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_a_mixed_batch_equals_the_plain_definition_row_by_row(vocabulary: int, step: float):
    rows = some_rows(vocabulary, SETTINGS)
    logits = some_logits(len(rows), vocabulary, step=step)
    before = logits.clone()
    found = log_probabilities(logits, rows).numpy()
    assert torch.equal(logits, before)
    for i, one in enumerate(rows):
        expected = reference(logits[i].double().numpy(), one)
        assert (np.isfinite(found[i]) == np.isfinite(expected)).all(), one.sampling
        np.testing.assert_allclose(found[i], expected, rtol=1e-5, atol=2e-5, err_msg=repr(one.sampling))


def test_a_row_does_not_depend_on_who_else_is_in_the_batch():
    rows = some_rows(3000, SETTINGS)
    logits = some_logits(len(rows), 3000, step=0.25)
    together = log_probabilities(logits, rows)
    for i, one in enumerate(rows):
        alone = log_probabilities(logits[i : i + 1], [one])
        assert torch.equal(alone[0], together[i]), one.sampling
        assert draw(alone, [one])[0] == draw(together, rows)[i]


def test_a_flat_distribution_is_cut_beyond_the_first_candidates():
    rows = [row(Sampling(top_p=share), [0], 1) for share in (0.5, 0.9)]
    logprobs = log_probabilities(torch.zeros(2, 10_000), rows)
    assert ids(logprobs.isfinite().sum(-1)) == [5000, 9000]
    assert logprobs[0, :5000].isfinite().all()


def test_what_a_grammar_leaves_out_comes_back_neither_by_penalty_nor_by_rank():
    words = np.zeros(3, dtype=np.int32)
    for token in (3, 40, 64):
        words[token // 32] |= np.int32(1 << (token % 32))
    rows = [
        row(Sampling(), [1], 1, words),
        row(Sampling(top_k=10, repetition_penalty=1.5, frequency_penalty=-3), [5, 5, 40], 1, words),
        row(Sampling(), [1], 1),
    ]
    logits = some_logits(3, 65)
    logprobs = log_probabilities(logits, rows)
    for i in (0, 1):
        assert ids(logprobs[i].isfinite().nonzero()[:, 0]) == [3, 40, 64]
        assert float(logprobs[i].exp().sum()) == pytest.approx(1.0)
    assert torch.equal(logprobs[2], logits[2].log_softmax(-1))


CRITICAL = {9: 33.7, 12: 39.1, 19: 50.8, 29: 64.6}
"""Of chi-square at 1e-4, rounded up, by degrees of freedom (Fisher and Yates, table IV)."""


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(seed=3), 30),
        (Sampling(seed=4, top_k=10), 10),
        (Sampling(seed=5, top_k=20, temperature=1.7), 20),
        (Sampling(seed=6, top_k=13, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.3), 13),
    ],
)
def test_tokens_come_as_often_as_their_log_probabilities_say(sampling: Sampling, kept: int):
    """One context at 20,000 positions: the noise is the only thing that differs."""
    count = 20_000
    logits = some_logits(1, 30, seed=8) / 2.5
    end = row(sampling, [1, 2, 3, 3, 4], 2)
    logprobs = log_probabilities(logits, [end])
    rows = [Row(sampling, np.zeros(position, dtype=np.int32), 2) for position in range(count)]
    tokens = draw(logprobs.expand(count, -1), rows)
    seen = np.bincount(tokens.numpy(), minlength=30)
    expected = logprobs[0].double().exp().numpy() * count
    inside = expected > 0
    assert inside.sum() == kept
    assert seen[~inside].sum() == 0
    chi_square = float(((seen - expected)[inside] ** 2 / expected[inside]).sum())
    assert chi_square < CRITICAL[kept - 1]
    assert chosen(logprobs.expand(count, -1), tokens) == [float(logprobs[0, token]) for token in tokens]


def test_sampling_never_takes_a_token_without_probability():
    count = 20_000
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3])
    padding = torch.full((600,), float("-inf"))
    logprobs = torch.cat([padding, probabilities.log()]).expand(count, -1)
    rows = [Row(Sampling(seed=7), np.zeros(position, dtype=np.int32), 0) for position in range(count)]
    shares = np.bincount(draw(logprobs, rows).numpy(), minlength=604)[600:] / count
    np.testing.assert_allclose(shares, probabilities, atol=0.015)


def test_noise_depends_on_seed_and_position_alone():
    seeds = np.array([1, 1, 2, 1 << 63], dtype=np.uint64)
    positions = np.array([5, 6, 5, 5], dtype=np.uint64)
    numbers = noise(seeds, positions)
    assert len(set(numbers)) == 4
    assert noise(seeds[1:2], positions[1:2])[0] == numbers[1]
    assert ((numbers >= 0) & (numbers < 1)).all()


finite = st.floats(allow_nan=False, allow_infinity=False)
samplings = st.builds(
    Sampling,
    temperature=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1e300), st.floats(0, 5)),
    seed=st.integers(),
    top_k=st.one_of(st.just(0), st.integers(0, 200)),
    top_p=st.one_of(st.just(1.0), st.floats(0, 1, exclude_min=True)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0, exclude_min=True, allow_infinity=False)),
    presence_penalty=st.one_of(st.just(0.0), finite),
    frequency_penalty=st.one_of(st.just(0.0), finite),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(samplings, min_size=1, max_size=5), st.integers(0, 50), st.sampled_from([0.0, 0.5, 4.0]))
def test_whatever_the_settings_a_token_of_finite_log_probability_is_drawn(
    chosen_samplings: list[Sampling], seed: int, step: float
):
    rows = some_rows(130, chosen_samplings)
    logits = some_logits(len(rows), 130, step=step, seed=seed)
    logprobs = log_probabilities(logits, rows)
    tokens = draw(logprobs, rows)
    assert not logprobs.isnan().any()
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(len(rows)))
    assert np.isfinite(chosen(logprobs, tokens)).all()
    for one, values in zip(chosen_samplings, logprobs, strict=True):
        assert int(values.isfinite().sum()) <= (one.top_k or 130)
    greedy = [changed(one, temperature=0.0) for one in rows]
    other = [changed(one, seed=99) for one in greedy]
    logprobs = log_probabilities(logits, greedy)
    assert torch.equal(draw(logprobs, greedy), draw(logprobs, other))
    assert torch.equal(logprobs.gather(1, draw(logprobs, greedy)[:, None])[:, 0], logprobs.amax(-1))


def test_a_temperature_near_zero_is_nearly_greedy():
    logits = torch.tensor([[1.0, 300.0, 299.0, -500.0]])
    logprobs = log_probabilities(logits, [row(Sampling(temperature=1e-40), [0], 1)])
    assert int(logprobs.argmax()) == 1
    assert float(logprobs[0, 1]) == 0.0


@pytest.mark.parametrize("wrong", ["NaN", "Infinity"])
def test_settings_that_are_no_numbers_are_refused_by_field(wrong: str):
    with pytest.raises(ValueError, match="presence_penalty"):
        Sampling.model_validate_json(f'{{"presence_penalty": {wrong}}}')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


MIXED: list[dict[str, object]] = [
    {"seed": 1},
    {"seed": 2, "top_k": 5},
    {"seed": 3, "top_p": 0.8, "temperature": 2.0},
    {"seed": 4, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"seed": 5, "repetition_penalty": 1.3, "min_p": 0.02},
    {"seed": 6, "temperature": 0.0, "frequency_penalty": 2.0},
]


def test_an_engine_draws_what_each_request_of_a_mixed_batch_asks_for(folder: Path):
    desk, module = Desk(make_core(folder)), load(folder).module
    for i, sampling in enumerate(MIXED):
        desk.submit(str(i), prompt(20 + i, seed=i), max_new_tokens=24, sampling=sampling)
        desk.core.step()
    desk.run()
    for i, sampling in enumerate(MIXED):
        context, reply = prompt(20 + i, seed=i), desk.reply(str(i))
        alone = Desk(make_core(folder)).turn("x", context, max_new_tokens=24, sampling=sampling)
        assert alone.token_ids == reply.token_ids
        logits = reference_logits(module, context + reply.token_ids, len(context)).double().numpy()
        for j, (token, logprob) in enumerate(zip(reply.token_ids, reply.logprobs, strict=True)):
            seen = row(Sampling.model_validate(sampling), context + reply.token_ids[:j], len(context))
            assert logprob == pytest.approx(reference(logits[j], seen)[token], abs=5e-5)


def test_the_most_probable_tokens_are_those_of_the_distribution_that_is_drawn_from(folder: Path):
    desk, module = Desk(make_core(folder)), load(folder).module
    asked: list[dict[str, object]] = [{"seed": 1, "temperature": 0.7}, {"seed": 2, "top_k": 3}, {"seed": 3}]
    for i, (sampling, top) in enumerate(zip(asked, (5, 5, 0), strict=True)):
        desk.submit(str(i), prompt(20, seed=i), sampling=sampling, top_logprobs=top)
    desk.run()
    for i, (sampling, kept) in enumerate(zip(asked[:2], (5, 3), strict=True)):
        reply, context = desk.reply(str(i)), prompt(20, seed=i)
        assert reply.top_logprobs is not None
        assert len(reply.top_logprobs) == len(reply.token_ids)
        logits = reference_logits(module, context + reply.token_ids, 20).double().numpy()
        for j, top in enumerate(reply.top_logprobs):
            expected = reference(logits[j], row(Sampling.model_validate(sampling), context, 20))
            assert [token for token, _ in top] == np.argsort(-expected)[:kept].tolist()
            np.testing.assert_allclose([value for _, value in top], expected[np.argsort(-expected)[:kept]],
                                       atol=5e-5)  # fmt: skip
            assert dict(top).get(reply.token_ids[j], reply.logprobs[j]) == reply.logprobs[j]
    assert desk.reply("2").top_logprobs is None


def test_a_teacher_gives_the_most_probable_tokens_at_the_temperature_that_is_asked_for(folder: Path):
    core, module, answers = make_core(folder), load(folder).module, list[ScoreReply | Refusal]()
    tokens = prompt(300, seed=3)
    core.score(ScoreRequest(token_ids=tokens, start=250, temperature=0.8, top_logprobs=70), answers.append)
    while core.busy:
        core.step()
    (reply,) = answers
    assert isinstance(reply, ScoreReply)
    assert reply.top_logprobs is not None
    expected = (reference_logits(module, tokens, 250)[:-1] / 0.8).log_softmax(-1)
    assert len(reply.top_logprobs) == len(reply.logprobs) == 50
    for top, logprob, token, values in zip(
        reply.top_logprobs, reply.logprobs, tokens[250:], expected, strict=True
    ):
        assert len(top) == len(values)
        assert [value for _, value in top] == sorted(dict(top).values(), reverse=True)
        assert dict(top)[token] == logprob
        np.testing.assert_allclose([dict(top)[t] for t in range(len(values))], values, atol=2e-5)


def test_more_of_the_most_probable_tokens_than_a_reply_can_carry_are_refused(folder: Path):
    with pytest.raises(Refusal, match="top_logprobs: 1025 is more than 1024"):
        Desk(make_core(folder)).submit("a", prompt(3), top_logprobs=1025)
