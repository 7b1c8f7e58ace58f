"""Finished programs, put together by group, until a step uses them.  Metadata and policy; no torch, no I/O.

- Groups are known by id and members by program id; arrival order means nothing.
- A group is ready when every member has ended.  Members that failed, or have nothing to train, are left
  out; with too few left to learn from (`fewest`) the rest is dropped.
- Staleness and lineage are judged when a group is used, against the version deployed then.
- Every trajectory added comes back exactly once, in a batch or as Dropped; one that carries an outcome of
  its own has had its end already and does not come back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sostenuto.errors import RecordError
from sostenuto.records import Trajectory, validate
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
class Taken:
    """What one request for a batch came to."""

    batch: tuple[ReadyGroup, ...]
    """Together with `skipped` as many groups as were asked for, or none."""
    skipped: tuple[ReadyGroup, ...]
    """Took their place in the batch and teach nothing; their members are in `dropped`."""
    dropped: tuple[Dropped, ...]


@dataclass(slots=True)
class _OpenGroup:
    members: tuple[ProgramId, ...]
    started: Version
    ended: dict[ProgramId, Trajectory] = field(default_factory=dict[ProgramId, Trajectory])
    dropped: set[ProgramId] = field(default_factory=set[ProgramId])


class Buffer:
    """Groups of one job.  One owner calls it; nothing in it waits.

    `fewest`: members that a group can be trained with.  `needs_reward`: False where nothing is learnt from
    rewards; a program that continues a history never has one.
    `ancestors`: for each earlier run epoch the highest version number that the present weights descend
    from.  Records of an epoch that is not listed, or beyond its number, are of an abandoned lineage.
    """

    def __init__(
        self,
        *,
        zero_spread: Literal["skip", "replace", "keep"] = "skip",
        fewest: int = 2,
        needs_reward: bool = True,
        ancestors: Mapping[int, int] | None = None,
    ) -> None:
        self._zero_spread = zero_spread
        self._fewest = fewest
        self._needs_reward = needs_reward
        self._ancestors = dict(ancestors or {})
        self._open: dict[GroupId, _OpenGroup] = {}
        self._ready: list[ReadyGroup] = []
        self._arrivals = 0
        self._drained: str | None = None

    def __repr__(self) -> str:
        return f"<Buffer open={len(self._open)} ready={len(self._ready)}>"

    @property
    def open_groups(self) -> int:
        """Groups with members that have not ended."""
        return len(self._open)

    @property
    def ready_groups(self) -> int:
        return len(self._ready)

    @property
    def waiting_for(self) -> Mapping[GroupId, tuple[ProgramId, ...]]:
        """Members that have not ended, by open group."""
        return {
            group_id: tuple(member for member in group.members if member not in group.ended)
            for group_id, group in self._open.items()
        }

    def open(self, group_id: GroupId, members: Iterable[ProgramId], started: Version) -> None:
        """Expect these programs, which start under `started`.

        RecordError for an id in use or a group of too few.
        """
        expected = tuple(members)
        if group_id in self._open or any(group.group_id == group_id for group in self._ready):
            raise RecordError(f"group {group_id} is open already")
        if len(expected) < self._fewest or len(set(expected)) != len(expected):
            raise RecordError(
                f"group {group_id}: {self._fewest} or more different members are needed, not {expected}"
            )
        self._open[group_id] = _OpenGroup(expected, started)

    def add(self, trajectory: Trajectory) -> tuple[Dropped, ...]:
        """Take in a member that has ended; return whom this drops.

        RecordError for a member nobody expects, or one that has ended before.
        """
        if self._drained is not None:
            return () if trajectory.outcome else (Dropped(trajectory.program_id, self._drained),)
        group = self._expecting(trajectory)
        group.ended[trajectory.program_id] = trajectory
        fault = None if trajectory.outcome else _fault(trajectory, needs_reward=self._needs_reward)
        if fault:
            group.dropped.add(trajectory.program_id)
        completed = self._complete(trajectory.group_id) if len(group.ended) == len(group.members) else ()
        return ((fault,) if fault else ()) + completed

    def take(
        self, groups: int, deployed: Version, max_staleness: int, *, per_version: int = 0, used: int = 0
    ) -> Taken:
        """A batch of `groups` groups, the oldest versions first, all within the bound under `deployed`.

        Groups that are too stale or of another lineage leave the buffer, batch or not.  There is no batch
        that would leave groups behind, running or ready, which later batches could not all use in time.
        `per_version`: groups that raise the version by one, where that is not the batch; `used` of them
        were taken since the last one.
        """
        pace = _Pace(per_version or groups, used + groups, deployed, max_staleness)
        dropped: list[Dropped] = []
        usable: list[ReadyGroup] = []
        for group in self._ready:
            fault = self._unusable(group, deployed, max_staleness)
            dropped.extend(fault)
            if not fault:
                usable.append(group)
        usable.sort(key=lambda group: (group.oldest_version, group.arrived))
        enough = len(usable) >= groups and not self._should_wait(usable, groups, pace)
        self._ready = usable[groups:] if enough else usable
        batch = usable[:groups] if enough else []
        skipped = [group for group in batch if self._zero_spread == "skip" and not group.has_signal]
        for group in skipped:
            dropped.extend(group.drop("no_signal", group.describe_rewards()))
        learnt = [group for group in batch if group not in skipped]
        return Taken(tuple(learnt), tuple(skipped), tuple(dropped))

    def drain(self, reason: str) -> tuple[Dropped, ...]:
        """Close for good: everything here is dropped for `reason`, and so is what still arrives."""
        dropped = [drop for group in self._ready for drop in group.drop(reason)]
        for group in self._open.values():
            dropped.extend(Dropped(member.program_id, reason) for member in _trainable(group))
        self._open.clear()
        self._ready.clear()
        self._drained = reason
        return tuple(dropped)

    def _should_wait(self, usable: list[ReadyGroup], groups: int, pace: "_Pace") -> bool:
        """Whether a group that runs is more urgent than one of the batch, and would come too late."""
        running = [group.started for group in self._open.values()]
        left = [group.oldest_version for group in usable[groups:]] + running
        overtakes = any(started < usable[groups - 1].oldest_version for started in running)
        return overtakes and not pace.in_time(left)

    def _expecting(self, trajectory: Trajectory) -> _OpenGroup:
        group = self._open.get(trajectory.group_id)
        if group is None or trajectory.program_id not in group.members:
            raise RecordError(f"{trajectory.program_id}: group {trajectory.group_id} does not expect it")
        if trajectory.program_id in group.ended:
            raise RecordError(f"{trajectory.program_id}: has ended twice")
        return group

    def _complete(self, group_id: GroupId) -> tuple[Dropped, ...]:
        group = self._open.pop(group_id)
        members = _trainable(group)
        ready = ReadyGroup(group_id, members, self._arrivals)
        if len(members) < self._fewest:
            return ready.drop("group_too_small", f"{len(members)} of {len(group.members)} can be trained")
        if self._zero_spread == "replace" and not ready.has_signal:
            return ready.drop("no_signal", ready.describe_rewards())
        self._arrivals += 1
        self._ready.append(ready)
        return ()

    def _unusable(self, group: ReadyGroup, deployed: Version, max_staleness: int) -> tuple[Dropped, ...]:
        versions = {v.version for member in group.members for v in member.version_spans}
        strangers = sorted(version for version in versions if not self._is_ancestor(version, deployed))
        if strangers:
            return group.drop("lineage", f"sampled under {strangers[0]}, deployed is {deployed}")
        staleness = deployed.number - group.oldest_version.number
        if staleness > max_staleness:
            return group.drop("stale", f"staleness {staleness} at use, bound {max_staleness}")
        return ()

    def _is_ancestor(self, version: Version, deployed: Version) -> bool:
        if version.epoch == deployed.epoch:
            return version.number <= deployed.number
        return version.epoch < deployed.epoch and version.number <= self._ancestors.get(version.epoch, -1)


@dataclass(frozen=True, slots=True)
class _Pace:
    """How fast the version rises with what is taken."""

    per_version: int
    taken: int
    """Since `deployed` opened, this batch included."""
    deployed: Version
    max_staleness: int

    def in_time(self, left: list[Version]) -> bool:
        """Whether what comes next, the most urgent first, can use all that this batch leaves."""
        # How many versions each may still wait; one that is too old already is past help.
        newest = self.max_staleness - self.deployed.number
        may_wait = sorted(newest + v.number for v in left if v.epoch == self.deployed.epoch)
        urgent = [versions for versions in may_wait if versions >= 0]
        return all(
            versions >= (self.taken + place) // self.per_version for place, versions in enumerate(urgent)
        )


def _trainable(group: _OpenGroup) -> tuple[Trajectory, ...]:
    ended = (group.ended[member] for member in group.members if member in group.ended)
    return tuple(t for t in ended if t.outcome is None and t.program_id not in group.dropped)


def _fault(trajectory: Trajectory, *, needs_reward: bool) -> Dropped | None:
    """Why a program that ended well cannot be trained, if so."""
    program_id = trajectory.program_id
    if trajectory.reward is None and needs_reward and not trajectory.history:
        return Dropped(program_id, "reward_missing")
    if trajectory.reward is not None and not np.isfinite(trajectory.reward):
        return Dropped(program_id, "reward_not_finite", f"reward {trajectory.reward}")
    try:
        validate(trajectory)
    except RecordError as error:
        return Dropped(program_id, "invalid_record", str(error))
    if not trajectory.trained_tokens:
        return Dropped(program_id, "nothing_to_train")
    return None
