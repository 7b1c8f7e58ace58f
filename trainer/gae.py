"""Advantages of single tokens from a critic's values.  float64, no I/O, no torch.

A trajectory is one line of decisions: its trained tokens in the order in which they were sampled, whatever
sequences they stand in.  What the environment says between two turns is no decision: the step before it
leads to the value after it.  A rewritten history, or a sub-agent, goes on where the program was.

Suffix T: the trained tokens of a whole trajectory, in that order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sostenuto.errors import RecordError
from sostenuto.records import Floats, Trajectory
from sostenuto.trainer.advantages import Doubles, has_spread
from sostenuto.trainer.parts import GAE
from sostenuto.trainer.samples import Sample
from sostenuto.trainer.turns import earned_by_turn, gathered, scattered, tokens_of, turns_of


@dataclass(frozen=True, slots=True, eq=False)
class Valued:
    """What is known of one trajectory: `values` and `rewards` (tokens,) for each of its samples.

    `rewards` are of single tokens, beside the trajectory's own; NaN counts as none.
    """

    trajectory: Trajectory
    samples: Sequence[Sample]
    values: Sequence[Floats]
    rewards: Sequence[Doubles] | None = None


def generalized_advantages(rewards_T: Doubles, values_T: Doubles, *, gamma: float, lambda_: float) -> Doubles:  # noqa: N803
    """(T,) sums of (gamma lambda)^l delta_{t+l} with delta_t = r_t + gamma V_{t+1} - V_t.

    Nothing comes after the last token: its V_{t+1} is 0.
    """
    deltas = rewards_T + gamma * np.append(values_T[1:], 0.0) - values_T
    advantages, later = np.zeros_like(deltas), 0.0
    for t in range(len(deltas) - 1, -1, -1):
        advantages[t] = later = float(deltas[t]) + gamma * lambda_ * later
    return advantages


def credit_by_critic(batch: Sequence[Valued], part: GAE) -> list[Sample]:
    """The samples of a batch with their advantages, and with "value" and "return" among their extras.

    One that continues a history has no reward: it teaches the critic nothing, and a teacher alone the policy.
    RecordError for a reward or a value that is missing or not finite.
    """
    graded = [valued for valued in batch if not valued.trajectory.history]
    lines = [_line(valued) for valued in graded]
    advantages = [
        generalized_advantages(rewards, values, gamma=part.gamma, lambda_=part.lambda_)
        for rewards, values in lines
    ]
    returns = [found + values for found, (_, values) in zip(advantages, lines, strict=True)]
    told = _whitened(advantages) if part.whiten else advantages
    credited = [
        sample
        for valued, advantage, earned, (_, values) in zip(graded, told, returns, lines, strict=True)
        for sample in _samples(valued, advantage, earned, values)
    ]
    return credited + [
        sample for valued in batch if valued.trajectory.history for sample in _without_reward(valued)
    ]


def _without_reward(valued: Valued) -> list[Sample]:
    values = gathered(turns_of(valued.trajectory), valued.values)
    return _samples(valued, np.zeros_like(values), values, values)


def _line(valued: Valued) -> tuple[Doubles, Doubles]:
    """Rewards and values (T,): what a turn earned comes with its last token."""
    name, turns = valued.trajectory.program_id, turns_of(valued.trajectory)
    values = gathered(turns, valued.values)
    rewards = np.zeros_like(values)
    if valued.rewards is not None:
        rewards += np.nan_to_num(gathered(turns, valued.rewards), nan=0.0)
    ends = np.cumsum([tokens_of(turn) for turn in turns], dtype=np.int64)
    rewards[ends - 1] += earned_by_turn(valued.trajectory, turns)
    if not np.isfinite(values).all():
        raise RecordError(f"{name}: a value of a trained token is missing or not finite")
    return rewards, values


def _samples(valued: Valued, *told: Doubles) -> list[Sample]:
    """The samples with advantages, returns and values (T,) put where their tokens stand."""
    turns, lengths = turns_of(valued.trajectory), [len(sample) for sample in valued.samples]
    spread = [scattered(turns, numbers, lengths) for numbers in told]
    return [
        replace(
            sample,
            advantages=np.nan_to_num(advantages, nan=0.0),
            extras={**sample.extras, "return": returns, "value": values},
        )
        for sample, advantages, returns, values in zip(valued.samples, *spread, strict=True)
    ]


def _whitened(advantages: Sequence[Doubles]) -> list[Doubles]:
    everything = np.concatenate([np.zeros(0), *advantages])
    if not has_spread(everything):
        return [np.zeros_like(found) for found in advantages]
    mean, deviation = everything.mean(), everything.std()
    return [(found - mean) / deviation for found in advantages]
