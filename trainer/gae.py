"""Advantages of single tokens from a critic's values.  float64, no I/O, no torch.

A trajectory is one line of decisions: its trained tokens in the order in which they were sampled, whatever
sequences they stand in.  What the environment says between two turns is no decision: the step before it
leads to the value after it.  A rewritten history, or a sub-agent, goes on where the program was.

Suffix T: the trained tokens of a whole trajectory, in that order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sostenuto.errors import RecordError
from sostenuto.records import Floats, Trajectory
from sostenuto.trainer.advantages import Doubles, has_spread
from sostenuto.trainer.parts import GAE
from sostenuto.trainer.samples import Sample

Places = NDArray[np.int64]


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
    values = _gathered(decisions(valued.trajectory), valued.values)
    return _samples(valued, np.zeros_like(values), values, values)


def _line(valued: Valued) -> tuple[Doubles, Doubles]:
    """Rewards and values (T,)."""
    name, order = valued.trajectory.program_id, decisions(valued.trajectory)
    values = _gathered(order, valued.values)
    rewards = np.zeros_like(values)
    if valued.rewards is not None:
        rewards += np.nan_to_num(_gathered(order, valued.rewards), nan=0.0)
    if not len(values):
        return rewards, values
    rewards[-1] += np.nan if valued.trajectory.reward is None else valued.trajectory.reward
    for what, numbers in (("reward", rewards), ("value", values)):
        if not np.isfinite(numbers).all():
            raise RecordError(f"{name}: a {what} of a trained token is missing or not finite")
    return rewards, values


def decisions(trajectory: Trajectory) -> list[tuple[int, Places]]:
    """The trained tokens as they were sampled: span by span, which of its samples and where in it.

    By the time when a span began; spans of one time are in the order of the record.
    """
    found: list[tuple[float, int, Places]] = []
    samples = 0
    for sequence in trajectory.sequences:
        start = 0
        for span in sequence:
            if span.mask.any():
                found.append((span.started_s, samples, start + np.flatnonzero(span.mask)))
            start += len(span)
        samples += any(span.mask.any() for span in sequence)
    found.sort(key=lambda each: each[0])
    return [(sample, places) for _, sample, places in found]


def _gathered(
    order: Sequence[tuple[int, Places]], of_samples: Sequence[Floats] | Sequence[Doubles]
) -> Doubles:
    parts = [of_samples[sample][places] for sample, places in order]
    return np.concatenate([np.zeros(0), *parts]).astype(np.float64)


def _samples(valued: Valued, *told: Doubles) -> list[Sample]:
    """The samples with advantages, returns and values (T,) put where their tokens stand."""
    order = decisions(valued.trajectory)
    ends = np.cumsum([len(places) for _, places in order])
    spread = [[np.full(len(s), np.nan, dtype=np.float32) for s in valued.samples] for _ in told]
    for numbers, arrays in zip(told, spread, strict=True):
        for (sample, places), part in zip(order, np.split(numbers, ends[:-1]), strict=False):
            arrays[sample][places] = part
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
