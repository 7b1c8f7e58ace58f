"""Who sampled what when: a trajectory's decisions in their order, and its turns.  No torch.

A turn is what was sampled in one go: policy spans that stand one after the other.  Turns are in the order in
which they began, whatever sequences they stand in.

Suffix K: turns of one trajectory.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from sostenuto.errors import RecordError
from sostenuto.records import Floats, Trajectory
from sostenuto.trainer.advantages import Doubles, group_advantages
from sostenuto.trainer.parts import TurnReturn

Places = NDArray[np.int64]
Turn = list[tuple[int, Places]]
"""Its trained tokens, span by span: which sample of the trajectory, and where in it."""


def turns_of(trajectory: Trajectory) -> list[Turn]:
    """Those with something to train; spans of one time are in the order of the record."""
    found: list[tuple[float, tuple[int, int], int, Places]] = []
    samples = 0
    for index, sequence in enumerate(trajectory.sequences):
        start, turn, is_trained = 0, 0, False
        for span in sequence:
            if span.mask.any():
                found.append((span.started_s, (index, turn), samples, start + np.flatnonzero(span.mask)))
                is_trained = True
            elif len(span):
                turn += 1
            start += len(span)
        samples += is_trained
    found.sort(key=lambda each: each[0])
    return [
        [(sample, places) for _, _, sample, places in spans]
        for _, spans in groupby(found, key=lambda each: each[1])
    ]


def earned_by_turn(trajectory: Trajectory, turns: Sequence[Turn]) -> Doubles:
    """(K,) rewards, which add up to the trajectory's: what nobody has given to a turn comes with the last.

    RecordError when there is a number for each of other turns, or the reward is missing or not finite.
    """
    name, told = trajectory.program_id, trajectory.turn_rewards
    if told and len(told) != len(turns):
        raise RecordError(f"{name}: rewards of {len(told)} turns, the record has {len(turns)}")
    if trajectory.reward is None or not np.isfinite([trajectory.reward, *told]).all():
        raise RecordError(f"{name}: a reward is missing or not finite")
    rewards = np.array(told or [0.0] * len(turns), dtype=np.float64)
    if len(rewards):
        rewards[-1] += trajectory.reward - rewards.sum()
    return rewards


def returns_to_go(rewards_K: Doubles, gamma: float) -> Doubles:  # noqa: N803
    """(K,) of r_k + gamma r_{k+1} + gamma^2 r_{k+2} + ..."""
    returns, later = np.zeros_like(rewards_K), 0.0
    for turn in range(len(rewards_K) - 1, -1, -1):
        returns[turn] = later = float(rewards_K[turn]) + gamma * later
    return returns


def turn_advantages(members: Sequence[Trajectory], part: TurnReturn) -> list[Doubles]:
    """(K,) for each member of one group.  RecordError for fewer than two with a turn.

    One without a turn has nothing to train: it votes in nothing.
    """
    turns = [turns_of(member) for member in members]
    returns = [
        returns_to_go(earned_by_turn(member, own), part.gamma)
        for member, own in zip(members, turns, strict=True)
    ]
    voting = [found for found in returns if len(found)]
    advantages = [np.zeros_like(found) for found in returns]
    compared = iter(range(len(voting)))
    rows = {index: next(compared) for index, found in enumerate(returns) if len(found)}
    for turn in range(max((len(found) for found in voting), default=0)):
        here = np.array([found[min(turn, len(found) - 1)] for found in voting])
        against = group_advantages(here, normalize_std=part.normalize_std)
        for index, row in rows.items():
            if turn < len(returns[index]):
                advantages[index][turn] = against[row]
    return advantages


def gathered(turns: Sequence[Turn], of_samples: Sequence[Floats] | Sequence[Doubles]) -> Doubles:
    """What stands at the trained tokens, in their order."""
    parts = [of_samples[sample][places] for turn in turns for sample, places in turn]
    return np.concatenate([np.zeros(0), *parts]).astype(np.float64)


def scattered(turns: Sequence[Turn], numbers: Doubles, lengths: Sequence[int]) -> list[Floats]:
    """(T,) for each sample of `lengths`: the numbers of the trained tokens at their places, NaN elsewhere."""
    arrays = [np.full(length, np.nan, dtype=np.float32) for length in lengths]
    begin = 0
    for turn in turns:
        for sample, places in turn:
            arrays[sample][places] = numbers[begin : begin + len(places)]
            begin += len(places)
    return arrays


def tokens_of(turn: Turn) -> int:
    return sum(len(places) for _, places in turn)
