"""Every advantage, loss and correction against its formula, written here once more in plain float64."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sostenuto.errors import RecordError
from sostenuto.trainer.advantages import batch_advantages, batch_normalized, leave_one_out
from sostenuto.trainer.corrections import correct, divergence
from sostenuto.trainer.losses import Terms, policy_loss
from sostenuto.trainer.parts import (
    TIS,
    BatchNormalized,
    CISPOWeight,
    Correction,
    GSPOClip,
    IcePop,
    LeaveOneOut,
    Level,
    PolicyGradient,
    PolicyLoss,
    PPOClip,
    Rejection,
    Return,
    SAPOGate,
)
from sostenuto.trainer.tensors import as_array, backpropagate

Doubles = NDArray[np.float64]
SEEDS = st.integers(0, 2**32 - 1)


def doubles(values: Doubles) -> torch.Tensor:
    return torch.tensor(values.tolist(), dtype=torch.float64)


class Tokens:
    """Random log-probabilities of the tokens of a few sequences."""

    def __init__(self, seed: int) -> None:
        noise = np.random.default_rng(seed)
        lengths = noise.integers(1, 9, size=int(noise.integers(1, 6)))
        self.sequences = np.repeat(np.arange(len(lengths)), lengths)
        count = len(self.sequences)
        self.current = noise.normal(-2.0, 1.0, count)
        self.proximal = self.current + noise.normal(0.0, 0.4, count)
        self.behaviour = self.proximal + noise.normal(0.0, 0.4, count)
        self.advantages = noise.normal(0.0, 2.0, len(lengths))[self.sequences]

    def terms(self, current: torch.Tensor) -> Terms:
        order = torch.tensor(self.sequences.tolist())
        return Terms(current, doubles(self.proximal), doubles(self.advantages), order)

    def of(self, sequence: int) -> list[int]:
        return np.flatnonzero(self.sequences == sequence).tolist()


# ---- losses ----


def ppo(tokens: Tokens, current: Doubles, part: PPOClip) -> Doubles:
    losses: list[float] = []
    for c, o, a in zip(current, tokens.proximal, tokens.advantages, strict=True):
        r = math.exp(c - o)
        objective = min(r * a, max(1 - part.low, min(1 + part.high, r)) * a)
        if part.dual is not None and a < 0:
            objective = max(objective, part.dual * a)
        losses.append(-objective)
    return np.array(losses)


def gspo(tokens: Tokens, current: Doubles, part: GSPOClip) -> Doubles:
    losses = np.zeros(len(current))
    for sequence in set(tokens.sequences.tolist()):
        own = tokens.of(sequence)
        s = math.exp(sum(current[i] - tokens.proximal[i] for i in own) / len(own))
        for i in own:
            a = tokens.advantages[i]
            losses[i] = -min(s * a, max(1 - part.low, min(1 + part.high, s)) * a)
    return losses


def cispo(tokens: Tokens, current: Doubles, part: CISPOWeight) -> Doubles:
    # The weight is that of `tokens.current` wherever the gradient is asked for.
    r = np.exp(tokens.current - tokens.proximal)
    return -np.minimum(np.maximum(r, 1 - part.low), 1 + part.high) * tokens.advantages * current


def sapo(tokens: Tokens, current: Doubles, part: SAPOGate) -> Doubles:
    losses: list[float] = []
    for c, o, a in zip(current, tokens.proximal, tokens.advantages, strict=True):
        t = part.positive if a > 0 else part.negative
        losses.append(-(4 / t) / (1 + math.exp(-t * (math.exp(c - o) - 1))) * a)
    return np.array(losses)


def plain(tokens: Tokens, current: Doubles, part: PolicyGradient) -> Doubles:
    del part
    return -tokens.advantages * current


LOSSES: list[tuple[PolicyLoss, Callable[..., Doubles]]] = [
    (PolicyGradient(), plain),
    (PPOClip(), ppo),
    (PPOClip(low=0.1, high=0.1, dual=1.5), ppo),
    (GSPOClip(low=0.1, high=0.2), gspo),
    (CISPOWeight(low=0.3, high=0.2), cispo),
    (SAPOGate(positive=0.8, negative=1.6), sapo),
]


@pytest.mark.parametrize(("part", "formula"), LOSSES)
@given(SEEDS)
def test_a_loss_is_that_of_its_formula(part: PolicyLoss, formula: Callable[..., Doubles], seed: int):
    tokens = Tokens(seed)
    loss, _ = policy_loss(part, tokens.terms(doubles(tokens.current)))
    np.testing.assert_allclose(as_array(loss), formula(tokens, tokens.current, part), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("part", "formula"), LOSSES)
@given(SEEDS)
def test_a_gradient_is_that_of_finite_differences(
    part: PolicyLoss, formula: Callable[..., Doubles], seed: int
):
    tokens = Tokens(seed)
    current = doubles(tokens.current).requires_grad_()
    loss, _ = policy_loss(part, tokens.terms(current))
    backpropagate(loss.sum())
    assert current.grad is not None
    step = 1e-6
    for index, found in enumerate(as_array(current.grad).tolist()):
        nudge = np.zeros(len(tokens.current))
        nudge[index] = step
        above = formula(tokens, tokens.current + nudge, part).sum()
        below = formula(tokens, tokens.current - nudge, part).sum()
        assert found == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-6)


def test_a_dual_clip_bounds_what_a_bad_choice_that_became_likelier_may_cost():
    tokens = Terms(
        doubles(np.log([0.9])), doubles(np.log([0.1])), doubles(np.array([-1.0])), torch.zeros(1).long()
    )
    (bounded, stopped), (free, _) = (policy_loss(PPOClip(dual=dual), tokens) for dual in (3.0, None))
    assert float(bounded) == pytest.approx(3.0)
    assert bool(stopped)
    assert float(free) == pytest.approx(9.0)


@pytest.mark.parametrize("part", [part for part, _ in LOSSES])
def test_at_equal_weights_every_loss_has_the_policy_gradient(part: PolicyLoss):
    tokens = Tokens(3)
    tokens.proximal = tokens.current.copy()
    current = doubles(tokens.current).requires_grad_()
    loss, held_back = policy_loss(part, tokens.terms(current))
    backpropagate(loss.sum())
    assert current.grad is not None
    np.testing.assert_allclose(as_array(current.grad), -tokens.advantages, rtol=1e-9)
    assert not held_back.any()


# ---- corrections ----


def log_ratio(tokens: Tokens, level: Level, index: int) -> float:
    moved = tokens.proximal - tokens.behaviour
    own = tokens.of(int(tokens.sequences[index]))
    match level:
        case "token":
            return float(moved[index])
        case "sequence":
            return float(moved[own].sum())
        case "geometric":
            return float(moved[own].mean())


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", [TIS, IcePop])
@given(SEEDS)
def test_weights_are_those_of_their_formula(kind: type[TIS | IcePop], level: Level, seed: int):
    tokens, part = Tokens(seed), kind(low=0.7, high=1.4, level=level)
    found = corrected(tokens, part)
    for index, (weight, truncated) in enumerate(
        zip(as_array(found.weights).tolist(), as_array(found.truncated).tolist(), strict=True)
    ):
        raw = math.exp(max(-20.0, min(20.0, log_ratio(tokens, level, index))))
        inside = 0.7 <= raw <= 1.4
        bounded = max(0.7, min(1.4, raw)) if kind is TIS else raw * inside
        assert weight == pytest.approx(bounded, rel=1e-9)
        assert truncated is not inside


def corrected(tokens: Tokens, part: Correction | None, rejection: Rejection | None = None):
    return correct(
        part,
        doubles(tokens.behaviour),
        doubles(tokens.proximal),
        sequences=torch.tensor(tokens.sequences.tolist()),
        rejection=rejection,
    )


def estimated(estimator: str, engine_over_proximal: float) -> float:
    match estimator:
        case "k1":
            return engine_over_proximal
        case "k2":
            return engine_over_proximal**2 / 2
        case _:
            return math.exp(-engine_over_proximal) - 1 + engine_over_proximal


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("estimator", "low"), [("k1", -0.2), ("k2", None), ("k3", None)])
@given(SEEDS)
def test_what_the_engine_sampled_too_differently_is_left_out(
    estimator: str, low: float | None, level: str, seed: int
):
    tokens = Tokens(seed)
    part = Rejection.model_validate({"estimator": estimator, "low": low, "high": 0.1, "level": level})
    found = corrected(tokens, TIS(), part)
    each = [estimated(estimator, float(d)) for d in tokens.behaviour - tokens.proximal]
    for index, rejected in enumerate(as_array(found.rejected).tolist()):
        own = tokens.of(int(tokens.sequences[index])) if level == "sequence" else [index]
        value = sum(each[i] for i in own) / len(own)
        assert rejected is (value > 0.1 or (low is not None and value < low))
        if rejected:
            assert found.weights[index] == 0


def test_tokens_whose_proximal_is_unknown_have_no_vote_in_the_ratio_of_their_sequence():
    behaviour = doubles(np.log([0.5, 0.5]))
    proximal = doubles(np.array([math.log(0.6), math.nan]))
    found = correct(TIS(level="sequence", high=9.0), behaviour, proximal)
    assert as_array(found.weights) == pytest.approx([1.2, 1.2])
    assert as_array(found.proximal) == pytest.approx(np.log([0.6, 0.5]))


# ---- advantages ----

GROUPS = st.lists(st.lists(st.integers(-3, 3), min_size=2, max_size=6), min_size=1, max_size=4)


def arrays(groups: list[list[int]]) -> list[Doubles]:
    return [np.array(group, dtype=np.float64) for group in groups]


def everybody(groups: list[list[int]]) -> list[NDArray[np.bool_]]:
    return [np.ones(len(group), dtype=np.bool_) for group in groups]


@given(GROUPS)
def test_a_reward_is_held_against_the_mean_of_the_others(groups: list[list[int]]):
    found = batch_advantages(LeaveOneOut(), arrays(groups), everybody(groups))
    for group, advantages in zip(groups, found, strict=True):
        for index, advantage in enumerate(advantages.tolist()):
            others = [reward for other, reward in enumerate(group) if other != index]
            assert advantage == pytest.approx(group[index] - sum(others) / len(others), abs=1e-12)


@pytest.mark.parametrize("baseline", ["none", "group"])
@given(GROUPS)
def test_a_batch_is_normalized_by_its_own_mean_and_deviation(baseline: str, groups: list[list[int]]):
    part = BatchNormalized.model_validate({"baseline": baseline})
    found = np.concatenate(batch_advantages(part, arrays(groups), everybody(groups)))
    means = [sum(group) / len(group) if baseline == "group" else 0.0 for group in groups]
    left = np.array([reward - mean for group, mean in zip(groups, means, strict=True) for reward in group])
    spread = left.max() - left.min() > 1e-9
    expected = (left - left.mean()) / left.std() if spread else np.zeros(len(left))
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_a_return_is_the_reward_less_a_constant():
    found = batch_advantages(Return(baseline=0.4), [np.array([1.0])], [np.array([True])])
    assert found[0].tolist() == pytest.approx([0.6])


def test_members_without_a_vote_are_left_out_of_every_statistic():
    rewards, valid = np.array([1.0, 7.0, 0.0, 0.0]), np.array([True, False, True, True])
    assert leave_one_out(rewards, valid).tolist() == pytest.approx([1.0, 0.0, -0.5, -0.5])
    (found,) = batch_normalized([rewards], [valid])
    voting = np.array([1.0, 0.0, 0.0])
    expected = (voting - voting.mean()) / voting.std()
    assert found.tolist() == pytest.approx([expected[0], 0.0, *expected[1:]])


@pytest.mark.parametrize("part", [LeaveOneOut(), BatchNormalized(), BatchNormalized(baseline="group")])
def test_equal_rewards_give_exactly_nothing(part: LeaveOneOut | BatchNormalized):
    equal = np.full(8, 0.1)
    (found,) = batch_advantages(part, [equal], [np.ones(8, dtype=np.bool_)])
    assert found.tolist() == [0.0] * 8


@pytest.mark.parametrize("part", [LeaveOneOut(), BatchNormalized(), Return()])
@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(part: LeaveOneOut | BatchNormalized | Return, reward: float):
    with pytest.raises(RecordError, match="not finite"):
        batch_advantages(part, [np.array([1.0, reward])], [np.ones(2, dtype=np.bool_)])


def test_one_alone_has_no_others_to_be_held_against():
    with pytest.raises(RecordError, match="two are needed"):
        leave_one_out(np.array([1.0]))


# ---- distances ----

DISTRIBUTIONS = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4)


@pytest.mark.parametrize(("estimator", "low"), [("k1", -1e9), ("k2", 0.0), ("k3", 0.0)])
@given(DISTRIBUTIONS, DISTRIBUTIONS)
def test_the_mean_of_k1_and_of_k3_over_samples_of_p_is_the_divergence(
    estimator: str, low: float, ours: list[float], theirs: list[float]
):
    p, q = np.array(ours) / sum(ours), np.array(theirs) / sum(theirs)
    difference = np.log(p) - np.log(q)
    found = as_array(divergence(estimator, doubles(difference)))
    assert (found >= low - 1e-12).all()
    if estimator != "k2":
        assert float((p * found).sum()) == pytest.approx(float((p * difference).sum()), abs=1e-9)
