"""Groups on their way from programs to a step.  Values; no torch."""

from dataclasses import dataclass

import numpy as np

from sostenuto.records import Trajectory
from sostenuto.trainer.advantages import has_spread
from sostenuto.types import GroupId, ProgramId, Version


@dataclass(frozen=True, slots=True)
class Dropped:
    """A finished program that will not be trained."""

    program_id: ProgramId
    reason: str
    """stale, lineage, no_signal, group_too_small, nothing_to_train, reward_missing, reward_not_finite,
    invalid_record, or what `drain` was given."""
    detail: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class ReadyGroup:
    """The members of one group that can be trained together, in the order in which the group was opened."""

    group_id: GroupId
    members: tuple[Trajectory, ...]
    arrived: int
    """Order in which groups became ready."""
    place: int
    """Order in which groups were opened."""

    @property
    def oldest_version(self) -> Version:
        return min(v.version for member in self.members for v in member.version_spans)

    @property
    def has_signal(self) -> bool:
        """Whether the members' rewards differ."""
        return has_spread(np.array([member.reward for member in self.members], dtype=np.float64))

    def describe_rewards(self) -> str:
        return f"every reward is {self.members[0].reward:g}"

    def drop(self, reason: str, detail: str = "") -> tuple[Dropped, ...]:
        return tuple(Dropped(member.program_id, reason, detail) for member in self.members)


@dataclass(frozen=True, slots=True)
class RunningGroup:
    """A group with members that have not ended."""

    group_id: GroupId
    place: int
    started: Version
    """What was deployed when it was opened: no token of it is older."""
    members: int
    ended: int
