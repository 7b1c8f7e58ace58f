"""A group of programs in the hands of a trainer that is not ours."""

from collections.abc import Sequence
from typing import Protocol

from sostenuto.errors import ConfigError
from sostenuto.records import Trajectory
from sostenuto.trainer.buffer import ReadyGroup
from sostenuto.trainer.samples import Sample, trajectory_samples
from sostenuto.types import GroupId, Version


class Keeper(Protocol):
    """Who has handed the group out."""

    @property
    def version(self) -> Version: ...

    def commit(self, groups: Sequence[ReadyGroup]) -> None: ...

    def abandon(self, group: ReadyGroup, reason: str) -> None: ...


class Group:
    """Programs on one task, each with its exact record.

    It is yours until you publish, or say earlier what has become of it: `trained` or `drop`.
    """

    def __init__(self, ready: ReadyGroup, keeper: Keeper) -> None:
        self.ready = ready
        self._keeper = keeper

    def __repr__(self) -> str:
        rewards = ", ".join(f"{reward:g}" for reward in self.rewards)
        return f"<Group {self.id} rewards [{rewards}]>"

    @property
    def id(self) -> GroupId:
        return self.ready.group_id

    @property
    def task_id(self) -> str:
        return self.members[0].task_id

    @property
    def members(self) -> tuple[Trajectory, ...]:
        """The programs that can be trained: token ids, masks, log-probabilities, versions, rewards."""
        return self.ready.members

    @property
    def rewards(self) -> list[float]:
        return [member.reward or 0.0 for member in self.members]

    @property
    def has_signal(self) -> bool:
        """Whether the rewards differ."""
        return self.ready.has_signal

    @property
    def staleness(self) -> int:
        """Versions that its oldest trained token is behind what is deployed now."""
        return max(member.staleness(self._keeper.version) for member in self.members)

    def samples(self, advantages: Sequence[float] | None = None) -> list[Sample]:
        """Arrays to learn from, one Sample for each sequence, with one advantage for each member.

        Without advantages: the reward less the mean of the group.  A program whose history was rewritten
        has several sequences; each sampled token is masked in one of them alone.
        """
        if advantages is None:
            mean = sum(self.rewards) / len(self.rewards)
            advantages = [reward - mean for reward in self.rewards]
        if len(advantages) != len(self.members):
            raise ConfigError(f"advantages: {len(advantages)} of them for {len(self.members)} members")
        pairs = zip(self.members, advantages, strict=True)
        return [sample for member, advantage in pairs for sample in trajectory_samples(member, advantage)]

    def trained(self) -> None:
        """You have learnt from it: its one outcome.  ConfigError when it has one, or is too stale."""
        self._keeper.commit([self.ready])

    def drop(self, reason: str = "not_used") -> None:
        """You do not learn from it: another one takes its place.  ConfigError when it has an outcome."""
        self._keeper.abandon(self.ready, reason)
