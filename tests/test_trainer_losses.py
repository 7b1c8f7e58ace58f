"""Losses, corrections and schedules against plain float64 arithmetic."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sostenuto.trainer.corrections import correct, known_rollout, ratio
from sostenuto.trainer.losses import clipped_policy, policy_gradient, supervised
from sostenuto.trainer.optimizer import learning_rate
from sostenuto.trainer.parts import TIS
from sostenuto.trainer.settings import Schedule
from sostenuto.trainer.tensors import as_array, backpropagate


def log(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def derivative(loss: torch.Tensor, variable: torch.Tensor) -> list[float]:
    backpropagate(loss.sum())
    assert variable.grad is not None
    return as_array(variable.grad).tolist()


def test_return_1_and_baseline_0_4_give_loss_minus_0_6_z_and_derivative_minus_0_6():
    z = log(0.5).requires_grad_()
    loss = policy_gradient(z, torch.tensor([1.0 - 0.4]))
    assert float(loss.detach()) == pytest.approx(-0.6 * math.log(0.5))
    assert derivative(loss, z) == pytest.approx([-0.6])


def test_current_0_6_over_old_0_5_is_1_2():
    assert float(ratio(log(0.6), log(0.5))) == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("current", "advantage", "pushes"),
    [
        (0.60, +1.0, True),  # r = 1.2, inside
        (0.65, +1.0, False),  # r = 1.3, raised enough
        (0.65, -1.0, True),  # a bad choice that has become likelier is still pushed down
        (0.41, -1.0, True),  # r = 0.82, inside
        (0.39, -1.0, False),  # r = 0.78, lowered enough
        (0.39, +1.0, True),  # a good choice that has become rarer is still pushed up
    ],
)
def test_clipping_stops_a_choice_that_has_moved_far_enough_in_its_direction(
    current: float, advantage: float, pushes: bool
):
    z = log(current).requires_grad_()
    loss, stopped = clipped_policy(z, log(0.5), torch.tensor([advantage]), low=0.2, high=0.28)
    assert bool(stopped) is not pushes
    expected = -advantage * current / 0.5 if pushes else 0.0
    assert derivative(loss, z) == pytest.approx([expected])


@given(st.integers(0, 2**32 - 1))
def test_the_clipped_loss_is_that_of_its_formula(seed: int):
    noise = np.random.default_rng(seed)
    current, old, advantage = noise.normal(-2, 1, 50), noise.normal(-2, 1, 50), noise.normal(0, 2, 50)
    loss, _ = clipped_policy(
        torch.tensor(current), torch.tensor(old), torch.tensor(advantage), low=0.2, high=0.3
    )
    for found, c, o, a in zip(as_array(loss), current, old, advantage, strict=True):
        r = math.exp(c - o)
        assert found == pytest.approx(-min(r * a, max(0.8, min(1.3, r)) * a))


def test_supervised_is_cross_entropy():
    z = log(0.25).requires_grad_()
    loss = supervised(z)
    assert float(loss.detach()) == pytest.approx(math.log(4))
    assert derivative(loss, z) == [-1.0]


def test_engine_and_update_difference_are_told_apart_where_both_are_known():
    """Engine v1: 0.50, trainer v1: 0.52, trainer v2: 0.60."""
    correction = correct(TIS(), log(0.50), log(0.52))
    assert float(correction.weights) == pytest.approx(0.52 / 0.50)
    assert float(ratio(log(0.60), correction.proximal)) == pytest.approx(0.60 / 0.52)
    both = float(correction.weights) * float(ratio(log(0.60), correction.proximal))
    assert both == pytest.approx(0.60 / 0.50)


@pytest.mark.parametrize("settings", [None, TIS()])
def test_where_they_cannot_be_told_apart_the_ratio_carries_both(settings: TIS | None):
    unknown = torch.full((1,), math.nan, dtype=torch.float64)
    correction = correct(settings, log(0.50), unknown)
    assert float(correction.weights) == 1.0
    assert float(ratio(log(0.60), correction.proximal)) == pytest.approx(1.2)


def test_a_fresh_token_was_sampled_under_the_weights_of_now():
    current, unknown = log(0.3, 0.4).requires_grad_(), torch.full((2,), math.nan, dtype=torch.float64)
    rollout = known_rollout(current, unknown, torch.tensor([True, False]))
    assert not rollout.requires_grad
    assert rollout[0] == current[0]
    assert rollout[1].isnan()


def test_weights_are_truncated_and_counted():
    correction = correct(TIS(low=0.5, high=2.0), log(0.1, 0.5, 0.5), log(0.9, 0.1, 0.5))
    assert as_array(correction.weights) == pytest.approx([2.0, 0.5, 1.0])
    assert as_array(correction.truncated).tolist() == [True, True, False]


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_no_pair_of_log_probabilities_overflows(numerator: float, denominator: float):
    found = ratio(torch.tensor([numerator]), torch.tensor([denominator]))
    assert math.exp(-20.001) <= float(found) <= math.exp(20.001)


def test_schedules_warm_up_and_end_where_they_say():
    linear = Schedule(
        learning_rate=1.0, final_learning_rate=0.1, shape="linear", warmup_steps=3, total_steps=10
    )
    rates = [learning_rate(linear, step) for step in range(12)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[9:] == pytest.approx([0.1, 0.1, 0.1])
    assert rates[6] == pytest.approx(0.55)
    cosine = Schedule(learning_rate=1.0, shape="cosine", total_steps=5)
    assert [learning_rate(cosine, step) for step in (0, 2, 4, 9)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    constant = Schedule(learning_rate=1.0, warmup_steps=1)
    assert [learning_rate(constant, step) for step in (0, 1, 99)] == [0.5, 1.0, 1.0]


def test_a_decay_without_an_end_is_refused():
    with pytest.raises(ValueError, match="needs total_steps"):
        Schedule(shape="linear")
    with pytest.raises(ValueError, match="above learning_rate"):
        Schedule(shape="linear", total_steps=3, learning_rate=1e-3, final_learning_rate=1e-2)
