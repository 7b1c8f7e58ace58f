"""Who gets how much of a group's outcome: rewards to advantages to samples, for GRPO."""

import numpy as np

from sostenuto.errors import RecordError
from sostenuto.records import Trajectory
from sostenuto.trainer.advantages import group_advantages
from sostenuto.trainer.samples import Sample, trajectory_samples
from sostenuto.trainer.settings import GRPO


def credit_group(members: tuple[Trajectory, ...], algorithm: GRPO) -> list[Sample]:
    """Samples of one group's valid members, each trained token with its trajectory's advantage.

    A member that failed, or has no reward, votes in no statistic and trains nothing.
    """
    group_ids = {member.group_id for member in members}
    if len(group_ids) > 1:
        raise RecordError(f"credit: members of several groups: {', '.join(sorted(group_ids))}")
    valid = np.array(
        [member.outcome is None and member.reward is not None for member in members], dtype=np.bool_
    )
    rewards = np.array([0.0 if m.reward is None else m.reward for m in members], dtype=np.float64)
    advantages = group_advantages(rewards, valid, normalize_std=algorithm.normalize_std)
    return [
        sample
        for member, advantage, votes in zip(members, advantages.tolist(), valid.tolist(), strict=True)
        if votes
        for sample in trajectory_samples(member, advantage)
    ]
