"""From a critic's values to advantages and the value loss, on real forward passes of tiny models."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sostenuto.errors import Blame, RecordError
from sostenuto.records import Producer, Span, Trajectory
from sostenuto.trainer.algorithms import PPO, SFT
from sostenuto.trainer.gae import Valued, credit_by_critic, generalized_advantages
from sostenuto.trainer.learner import Learner
from sostenuto.trainer.losses import clipped_value
from sostenuto.trainer.model import load_reference
from sostenuto.trainer.parts import GAE, KL, Critic, CriticHead, CriticModel
from sostenuto.trainer.samples import Sample, demonstration, trajectory_samples
from sostenuto.trainer.tensors import as_array
from sostenuto.trainer.turns import turns_of
from sostenuto.types import Outcome, OutcomeKind
from trainer_world import (
    credit_by,
    learner,
    sampled,
    trajectory,
    write_bigram,
)

P, U, B, D = range(4)
VALUES = {P: 0.2, U: 0.6, B: 0.4}
PLAIN = GAE(whiten=False)


@pytest.fixture(scope="module")
def bigram(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bigram(tmp_path_factory.mktemp("bigram"), {P: {U: 0.5}, U: {B: 0.2}, B: {D: 0.4}}, size=4)


def valued(bigram: Path, critic: Critic | None = None) -> Learner:
    """Its critic says 0.2 after P, 0.6 after u and 0.4 after b."""
    subject = learner(bigram, critic=critic or CriticHead())
    assert subject.critic is not None
    with torch.no_grad():
        for token, value in VALUES.items():
            # RMS normalization turns a one-hot of width 16 into one of length 4.
            subject.critic.head.weight[token] = value / 4.0
    return subject


def told(*, reward: float | None = 1.0, name: str = "program") -> Trajectory:
    start = Span.fed(Producer.USER, [P])
    return trajectory(name, reward, sequences=((start, sampled([U, B, D])),))


def advantages(samples: list[Sample]) -> list[list[float]]:
    return [sample.advantages[sample.mask].tolist() for sample in samples]


# ---- advantages ----


@pytest.mark.parametrize("critic", [CriticHead(), CriticModel()], ids=["head", "model"])
def test_a_return_of_1_after_values_of_0_2_0_6_and_0_4_gives_0_8_0_4_and_0_6(bigram: Path, critic: Critic):
    (sample,) = credit_by(valued(bigram, critic), [(told(),)], PPO(advantage=PLAIN, critic=critic))
    assert sample.extras["value"][1:] == pytest.approx([0.2, 0.6, 0.4], abs=1e-6)
    assert advantages([sample]) == [pytest.approx([0.8, 0.4, 0.6], abs=1e-6)]
    assert sample.extras["return"][1:] == pytest.approx([1.0, 1.0, 1.0], abs=1e-6)
    assert np.isnan(sample.extras["value"][0])
    assert sample.advantages[0] == 0


def test_with_lambda_below_1_temporal_differences_are_put_together(bigram: Path):
    """delta = 0.6 - 0.2, 0.4 - 0.6, 1 - 0.4; a half of what comes later is believed."""
    half = GAE(lambda_=0.5, whiten=False)
    (sample,) = credit_by(valued(bigram), [(told(),)], PPO(advantage=half))
    assert advantages([sample]) == [
        pytest.approx([0.4 + 0.5 * (-0.2 + 0.5 * 0.6), -0.2 + 0.5 * 0.6, 0.6], abs=1e-6)
    ]
    (alone,) = credit_by(valued(bigram), [(told(),)], PPO(advantage=GAE(lambda_=0, whiten=False)))
    assert advantages([alone]) == [pytest.approx([0.4, -0.2, 0.6], abs=1e-6)]


def test_a_discount_is_taken_for_each_trained_token(bigram: Path):
    tenth = GAE(gamma=0.9, whiten=False)
    (sample,) = credit_by(valued(bigram), [(told(),)], PPO(advantage=tenth))
    assert sample.extras["return"][1:] == pytest.approx([0.81, 0.9, 1.0], abs=1e-6)
    assert advantages([sample]) == [pytest.approx([0.61, 0.3, 0.6], abs=1e-6)]


def test_what_the_environment_says_between_turns_has_no_value_and_takes_no_discount(bigram: Path):
    start, seen = Span.fed(Producer.USER, [P]), Span.fed(Producer.ENVIRONMENT, [D, D, B])
    turns = trajectory("p", 1.0, sequences=((start, sampled([U]), seen, sampled([D])),))
    algorithm = PPO(advantage=GAE(gamma=0.9, lambda_=0.5, whiten=False))
    (sample,) = credit_by(valued(bigram), [(turns,)], algorithm)
    # From P to u, then from the observation's last token, b, to d.
    last = 1.0 - 0.4
    assert advantages([sample]) == [pytest.approx([0.9 * 0.4 - 0.2 + 0.45 * last, last], abs=1e-6)]
    assert np.isfinite(sample.extras["value"]).tolist() == [False, True, False, False, False, True]


def test_a_rewritten_history_goes_on_where_the_program_was(bigram: Path):
    """The reward comes with what was sampled last, whichever sequence it stands in."""
    start = Span.fed(Producer.USER, [P])
    early, late = sampled([U]), replace(sampled([U, B]), started_s=5.0, ended_s=6.0)
    forked = trajectory("p", 1.0, sequences=((start, late), (start, early)))
    (first,), (second,) = turns_of(forked)
    assert [(sample, places.tolist()) for sample, places in (first, second)] == [(1, [1]), (0, [1, 2])]
    algorithm = PPO(advantage=GAE(lambda_=0, whiten=False))
    samples = credit_by(valued(bigram), [(forked,)], algorithm)
    assert advantages(samples) == [
        pytest.approx([0.6 - 0.2, 1.0 - 0.6], abs=1e-6),
        pytest.approx([0.2 - 0.2], abs=1e-6),
    ]


def test_the_price_of_the_distance_is_taken_off_token_by_token(bigram: Path, tmp_path: Path):
    """k1 of log-probabilities -1 and a reference that says log 0.5, log 0.2 and log 0.4."""
    subject = valued(bigram)
    subject.reference = load_reference(bigram, subject.policy, "float32")
    kl = KL(coefficient=0.1, estimator="k1", place="reward")
    (sample,) = credit_by(subject, [(told(),)], PPO(advantage=PLAIN, kl=kl))
    prices = -0.1 * (-1.0 - np.log([0.5, 0.2, 0.4]))
    returns = np.cumsum([1 + prices[2], prices[1], prices[0]])[::-1]
    assert sample.extras["return"][1:] == pytest.approx(returns, abs=1e-6)
    assert advantages([sample]) == [pytest.approx(returns - [0.2, 0.6, 0.4], abs=1e-6)]


def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_tokens_of_a_batch(bigram: Path):
    groups = [(told(name="a"),), (told(reward=0.0, name="b"),)]
    raw = np.concatenate(advantages(credit_by(valued(bigram), groups, PPO(advantage=PLAIN))))
    white = credit_by(valued(bigram), groups, PPO())
    assert np.concatenate(advantages(white)) == pytest.approx((raw - raw.mean()) / raw.std(), abs=1e-6)
    returns = [sample.extras["return"][1:].tolist() for sample in white]
    assert returns == [pytest.approx([1, 1, 1], abs=1e-6), pytest.approx([0, 0, 0], abs=1e-6)]
    same = credit_by(learner(bigram, critic=CriticHead()), [(told(),)], PPO())
    assert advantages(same) == [[0.0, 0.0, 0.0]]


def of_the_paper(
    rewards: NDArray[np.float64], values: NDArray[np.float64], gamma: float, lambda_: float
) -> list[float]:
    """Equations 11 to 16 of arXiv 1506.02438: the mean of k-step advantages, weighed by lambda^(k - 1)."""
    end, after = len(rewards), [*values.tolist(), 0.0]
    found: list[float] = []
    for t in range(end):
        steps = [
            sum(gamma**i * float(rewards[t + i]) for i in range(k)) + gamma**k * after[t + k] - after[t]
            for k in range(1, end - t + 1)
        ]
        weights = [(1 - lambda_) * lambda_ ** (k - 1) for k in range(1, len(steps))]
        # Beyond the end every k-step advantage is the last one.
        weights.append(lambda_ ** (len(steps) - 1))
        found.append(sum(weight * step for weight, step in zip(weights, steps, strict=True)))
    return found


@given(st.integers(0, 2**32 - 1), st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_advantages_are_those_of_the_paper_whatever_the_lengths_and_masks(
    seed: int, gamma: float, lambda_: float
):
    noise = np.random.default_rng(seed)
    batch: list[Valued] = []
    for number in range(int(noise.integers(1, 4))):
        spans = [Span.fed(Producer.USER, [1] * int(noise.integers(1, 4)))]
        for _ in range(int(noise.integers(1, 5))):
            policy = sampled([1] * int(noise.integers(1, 6)))
            spans.append(replace(policy, mask=noise.random(len(policy)) < 0.7))
            spans.append(Span.fed(Producer.ENVIRONMENT, [1] * int(noise.integers(0, 4))))
        one = trajectory(f"p{number}", float(noise.normal()), sequences=(tuple(spans),))
        samples = trajectory_samples(one, 0.0)
        values = [noise.normal(size=len(sample)).astype(np.float32) for sample in samples]
        rewards = [noise.normal(size=len(sample)) for sample in samples]
        batch.append(Valued(one, samples, values, rewards))
    found = iter(credit_by_critic(batch, GAE(gamma=gamma, lambda_=lambda_, whiten=False)))
    for valued in batch:
        for before, values, rewards in zip(valued.samples, valued.values, valued.rewards or (), strict=True):
            sample, mask = next(found), before.mask
            earned = rewards[mask].copy()
            earned[-1] += valued.trajectory.reward or 0.0
            expected = of_the_paper(earned, values[mask].astype(np.float64), gamma, lambda_)
            assert sample.advantages[mask] == pytest.approx(expected, abs=1e-4)
    assert next(found, None) is None


def test_a_member_without_a_reward_is_left_out_and_one_that_is_not_finite_is_refused(bigram: Path):
    failed = replace(
        told(name="b"), outcome=Outcome(OutcomeKind.FAILED, "sandbox died", Blame.INFRASTRUCTURE)
    )
    groups = [(told(name="a"),), (told(reward=None, name="c"),), (failed,)]
    samples = credit_by(valued(bigram), groups, PPO())
    assert [sample.origin for sample in samples] == ["a"]
    for wrong in (math.nan, math.inf):
        with pytest.raises(RecordError, match="x: a reward is missing or not finite"):
            credit_by(valued(bigram), [(told(reward=wrong, name="x"),)], PPO())


def test_a_trajectory_without_a_trained_token_gives_nothing(bigram: Path):
    empty = trajectory("e", 1.0, sequences=((Span.fed(Producer.USER, [P, U]),),))
    assert credit_by(valued(bigram), [(empty,)], PPO()) == []
    both = credit_by(valued(bigram), [(empty,), (told(),)], PPO(advantage=PLAIN))
    assert advantages(both) == [pytest.approx([0.8, 0.4, 0.6], abs=1e-6)]
    assert generalized_advantages(np.zeros(0), np.zeros(0), gamma=1, lambda_=1).tolist() == []


# ---- the value loss ----


def test_the_value_loss_is_the_larger_of_two_squared_errors(bigram: Path):
    """Values 0.2, 0.6 and 0.4 now; at the batch's beginning they were others."""
    subject = valued(bigram)
    (sample,) = credit_by(subject, [(told(),)], PPO(advantage=PLAIN))
    before = np.array([np.nan, 0.2, 0.1, 0.9], np.float32)
    moved = replace(sample, extras={"value": before, "return": sample.extras["return"]})
    report = subject.learn([moved], PPO())
    # 0.1 may rise to 0.3 and 0.9 may fall to 0.7: the first is held back, and the error at 0.7 is smaller.
    errors = np.array([0.8, 0.7, 0.6]) ** 2 / 2
    assert report.value_loss == pytest.approx(errors.mean(), rel=1e-5)
    assert report.value_clip_share == pytest.approx(1 / 3)
    unbounded = PPO(critic=CriticHead(clip=None))
    report = valued(bigram, unbounded.critic).learn([moved], unbounded)
    assert report.value_loss == pytest.approx((np.array([0.8, 0.4, 0.6]) ** 2 / 2).mean(), rel=1e-5)
    assert report.value_clip_share == 0


@given(st.integers(0, 2**32 - 1))
def test_the_clipped_value_loss_is_that_of_its_formula(seed: int):
    noise = np.random.default_rng(seed)
    now, before, returns = noise.normal(size=(3, 40))
    loss, held = clipped_value(torch.tensor(now), torch.tensor(before), torch.tensor(returns), 0.2)
    for each, stopped, v, b, r in zip(
        as_array(loss).tolist(), as_array(held).tolist(), now, before, returns, strict=True
    ):
        bounded = min(max(v, b - 0.2), b + 0.2)
        assert each == pytest.approx(max((v - r) ** 2, (bounded - r) ** 2) / 2)
        assert stopped is bool((bounded - r) ** 2 > (v - r) ** 2)


def test_explained_variance_is_of_the_returns(bigram: Path):
    subject = valued(bigram)
    algorithm = PPO(advantage=PLAIN)
    samples = credit_by(subject, [(told(name="a"),), (told(reward=0.0, name="b"),)], algorithm)
    report = subject.learn(samples, algorithm)
    returns, values = np.repeat([1.0, 0.0], 3), np.tile([0.2, 0.6, 0.4], 2)
    assert report.explained_variance == pytest.approx(1 - np.var(returns - values) / np.var(returns))
    alike = subject.learn(credit_by(subject, [(told(),)], algorithm), algorithm)
    assert alike.explained_variance is None
    assert subject.fit([demonstration([P, U], [False, True])], SFT()).value_loss is None
