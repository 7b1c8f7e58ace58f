"""Who gets how much of the outcomes: rewards to advantages to samples."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sostenuto.errors import RecordError
from sostenuto.records import Trajectory
from sostenuto.trainer.advantages import batch_advantages
from sostenuto.trainer.algorithms import Algorithm
from sostenuto.trainer.parts import TurnReturn
from sostenuto.trainer.samples import Sample, trajectory_samples
from sostenuto.trainer.turns import scattered, tokens_of, turn_advantages, turns_of

Group = Sequence[Trajectory]


def credit(groups: Sequence[Group], algorithm: Algorithm) -> list[Sample]:
    """Samples of a batch's valid members, each trained token with its trajectory's advantage.

    A member that failed, has no reward or nothing to train votes in no statistic and trains nothing.  One
    that continues a history has no reward: it votes in none either, and a teacher alone says what is learnt.
    RecordError for members of several groups together, or rewards that cannot be compared.
    """
    for members in groups:
        _refuse_strangers(members)
    scored = [members for members in groups if not _continue_history(members)]
    return [
        *_credited(scored, algorithm),
        *(
            sample
            for members in groups
            if _continue_history(members)
            for member in members
            if member.outcome is None
            for sample in trajectory_samples(member, 0.0)
        ),
    ]


def _credited(groups: Sequence[Group], algorithm: Algorithm) -> list[Sample]:
    part = algorithm.advantage
    if isinstance(part, TurnReturn):
        valid_groups = [[m for m in members if _is_valid(m, algorithm)] for members in groups]
        return [sample for members in valid_groups for sample in _credited_by_turn(members, part)]
    valid = [
        np.array([_is_valid(member, algorithm) for member in members], dtype=np.bool_) for members in groups
    ]
    rewards = [
        np.array([0.0 if m.reward is None else m.reward for m in members], dtype=np.float64)
        for members in groups
    ]
    advantages = batch_advantages(part, rewards, valid)
    return [
        sample
        for members, earned, votes in zip(groups, advantages, valid, strict=True)
        for member, advantage, has_vote in zip(members, earned.tolist(), votes.tolist(), strict=True)
        if has_vote
        for sample in trajectory_samples(member, advantage)
    ]


def _credited_by_turn(members: Group, part: TurnReturn) -> list[Sample]:
    found: list[Sample] = []
    for member, advantages in zip(members, turn_advantages(members, part), strict=True):
        samples, turns = trajectory_samples(member, 0.0), turns_of(member)
        of_tokens = np.repeat(advantages, [tokens_of(turn) for turn in turns])
        spread = scattered(turns, of_tokens, [len(sample) for sample in samples])
        found += [
            replace(sample, advantages=np.nan_to_num(told, nan=0.0))
            for sample, told in zip(samples, spread, strict=True)
        ]
    return found


def valid_members(members: Group, algorithm: Algorithm) -> list[Trajectory]:
    """Those that something is learnt from.  RecordError for members of several groups together."""
    _refuse_strangers(members)
    return [m for m in members if _is_valid(m, algorithm) or (m.history and m.outcome is None)]


def _continue_history(members: Group) -> bool:
    return any(member.history for member in members)


def _is_valid(member: Trajectory, algorithm: Algorithm) -> bool:
    is_scored = member.reward is not None or not algorithm.needs_reward
    return member.outcome is None and is_scored and member.trained_tokens > 0


def _refuse_strangers(members: Group) -> None:
    group_ids = {member.group_id for member in members}
    if len(group_ids) > 1:
        raise RecordError(f"credit: members of several groups: {', '.join(sorted(group_ids))}")
