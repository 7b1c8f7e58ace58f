"""Finished programs, put together by group, until a step uses them.  Metadata and policy; no torch, no I/O.

- Groups are known by id and members by program id; arrival order means nothing.
- A group is ready when every member has ended.  Members that failed, or have nothing to train, are left
  out; with too few left to learn from (`fewest`) the rest is dropped.
- Staleness and lineage are judged when a group is used, against the version deployed then.
- Every trajectory added comes back exactly once, in a batch or as Dropped; one that carries an outcome of
  its own has had its end already and does not come back.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sostenuto.errors import RecordError
from sostenuto.records import Trajectory, validate
from sostenuto.trainer.groups import Dropped as Dropped
from sostenuto.trainer.groups import ReadyGroup as ReadyGroup
from sostenuto.trainer.groups import RunningGroup
from sostenuto.trainer.lineage import NO_BRANCHES, Lineage
from sostenuto.trainer.samplers import Fifo, Sampler, Standing
from sostenuto.types import GroupId, ProgramId, Version


@dataclass(frozen=True, slots=True)
class Taken:
    """What one request for a batch came to."""

    batch: tuple[ReadyGroup, ...]
    """Together with `skipped` as many groups as were asked for, or none."""
    skipped: tuple[ReadyGroup, ...]
    """Took their place in the batch and teach nothing; their members are in `dropped`."""
    dropped: tuple[Dropped, ...]


@dataclass(frozen=True, slots=True)
class Aborted:
    """A running group that was given up."""

    group_id: GroupId
    why: str
    running: tuple[ProgramId, ...]
    ended: tuple[ProgramId, ...]
    """Members without an outcome of their own."""


@dataclass(slots=True)
class _OpenGroup:
    members: tuple[ProgramId, ...]
    started: Version
    place: int
    ended: dict[ProgramId, Trajectory] = field(default_factory=dict[ProgramId, Trajectory])
    dropped: set[ProgramId] = field(default_factory=set[ProgramId])


class Buffer:
    """Groups of one job.  One owner calls it; nothing in it waits.

    `fewest`: members that a group can be trained with.  `needs_reward`: False where nothing is learnt from
    rewards; a program that continues a history never has one.
    `lineage`: what the present weights descend from in earlier run epochs; other records are of an
    abandoned lineage.
    `settles`: a group whose members have all ended waits until `settle` has told their rewards.
    `sampler`: which groups start, are used, and are given up; the bound on staleness is the buffer's own.
    """

    def __init__(
        self,
        *,
        zero_spread: Literal["skip", "replace", "keep"] = "skip",
        fewest: int = 2,
        needs_reward: bool = True,
        lineage: Lineage = NO_BRANCHES,
        settles: bool = False,
        sampler: Sampler | None = None,
    ) -> None:
        self.sampler = sampler or Fifo()
        self._zero_spread = zero_spread
        self._fewest = fewest
        self._needs_reward = needs_reward
        self._settles = settles
        self.lineage = lineage
        self._open: dict[GroupId, _OpenGroup] = {}
        self._ready: list[ReadyGroup] = []
        self._arrivals = self._openings = 0
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
    def is_drained(self) -> bool:
        """Whether all that arrives is dropped."""
        return self._drained is not None

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
        self._open[group_id] = _OpenGroup(expected, started, self._openings)
        self._openings += 1

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

    def replace(self, group_id: GroupId, old: ProgramId, new: ProgramId) -> None:
        """Expect `new` in the place of a member that came to nothing; what `old` came to is forgotten."""
        group = self._open[group_id]
        group.members = tuple(new if member == old else member for member in group.members)
        group.ended.pop(old, None)
        group.dropped.discard(old)

    def leave_out(self, group_id: GroupId, late: Iterable[ProgramId]) -> tuple[Dropped, ...]:
        """Go on without members that have not ended; return whom this drops, if it completes the group."""
        group, out = self._open[group_id], set(late)
        group.members = tuple(member for member in group.members if member not in out)
        return self._complete(group_id) if len(group.ended) == len(group.members) else ()

    def unsettled(self, group_id: GroupId) -> tuple[Trajectory, ...]:
        """The members of a group that waits for its rewards alone; none of any other group."""
        group = self._open.get(group_id)
        if group is None or not self._settles or len(group.ended) < len(group.members):
            return ()
        return _trainable(group)

    def settle(self, group_id: GroupId, members: Iterable[Trajectory]) -> tuple[Dropped, ...]:
        """Take the rewards of all members of such a group; return whom this drops."""
        group = self._open[group_id]
        group.ended |= {member.program_id: member for member in members}
        return self._finish(self._open.pop(group_id), group_id)

    def forget(self, group_id: GroupId) -> None:
        """A group comes to nothing; its members are the caller's to end."""
        del self._open[group_id]

    def room(self, deployed: Version, max_staleness: int, *, per_version: int, learning: int) -> int:
        """Groups that may start now; `learning` were taken, and their version is not deployed yet."""
        return self.sampler.admit(self.standing(deployed, max_staleness, per_version, learning))

    def take(
        self, groups: int, deployed: Version, max_staleness: int, *, per_version: int = 0, used: int = 0
    ) -> Taken:
        """A batch of `groups` groups, all within the bound under `deployed`, as the sampler chooses.

        Groups that are too stale or of another lineage leave the buffer, batch or not.
        `per_version`: groups that raise the version by one, where that is not the batch; `used` of them
        were taken since the last one.
        """
        dropped = self._cast_out(lambda group: self._unusable(group, deployed, max_staleness))
        dropped += self.evict(deployed, max_staleness, per_version=per_version or groups, learning=used)
        standing = self.standing(deployed, max_staleness, per_version or groups, used)
        batch = self._selected(standing, groups)
        skipped = [group for group in batch if self._zero_spread == "skip" and not group.has_signal]
        for group in skipped:
            dropped.extend(group.drop("no_signal", group.describe_rewards()))
        learnt = [group for group in batch if group not in skipped]
        return Taken(tuple(learnt), tuple(skipped), tuple(dropped))

    def evict(
        self, deployed: Version, max_staleness: int, *, per_version: int, learning: int
    ) -> tuple[Dropped, ...]:
        """Drop the ready groups that the sampler has no use for."""
        standing = self.standing(deployed, max_staleness, per_version, learning)
        evicted = self.sampler.evict(standing)
        return tuple(self._cast_out(lambda group: _evicted(group, evicted, standing))) if evicted else ()

    def give_up(
        self, deployed: Version, max_staleness: int, *, per_version: int, learning: int
    ) -> tuple[Aborted, ...]:
        """Forget the running groups that the sampler gives up; their members are the caller's to end."""
        standing = self.standing(deployed, max_staleness, per_version, learning)
        reasons = {group.group_id: self.sampler.should_abort(group, standing) for group in standing.running}
        return tuple(self._abort(group_id, why) for group_id, why in reasons.items() if why)

    def standing(self, deployed: Version, max_staleness: int, per_version: int, learning: int) -> Standing:
        """What a sampler decides on; `learning` groups were taken, and their version is not open yet."""
        running = tuple(
            RunningGroup(group_id, group.place, group.started, len(group.members), len(group.ended))
            for group_id, group in self._open.items()
        )
        return Standing(
            deployed,
            max_staleness,
            per_version,
            learning,
            self._openings,
            tuple(self._ready),
            running,
            self.lineage,
        )

    @property
    def group_ids(self) -> tuple[GroupId, ...]:
        """Of all groups here, in the order in which they were opened."""
        places = {group_id: group.place for group_id, group in self._open.items()}
        places |= {group.group_id: group.place for group in self._ready}
        return tuple(sorted(places, key=places.__getitem__))

    def restore(
        self, group_id: GroupId, members: tuple[Trajectory, ...], deployed: Version, max_staleness: int
    ) -> tuple[Dropped, ...]:
        """Take in a group that was ready before its run died; return whom that drops."""
        group = ReadyGroup(group_id, members, self._arrivals, self._openings)
        if faults := self._unusable(group, deployed, max_staleness):
            return faults
        if len(members) < self._fewest:
            return group.drop("group_too_small", f"{len(members)} of them can be trained")
        self._ready.append(group)
        self._arrivals += 1
        self._openings += 1
        return ()

    def drain(self, reason: str) -> tuple[Dropped, ...]:
        """Close for good: everything here is dropped for `reason`, and so is what still arrives."""
        dropped = [drop for group in self._ready for drop in group.drop(reason)]
        for group in self._open.values():
            dropped.extend(Dropped(member.program_id, reason) for member in _trainable(group))
        self._open.clear()
        self._ready.clear()
        self._drained = reason
        return tuple(dropped)

    def _cast_out(self, fault_of: Callable[[ReadyGroup], tuple[Dropped, ...]]) -> list[Dropped]:
        faults = [(group, fault_of(group)) for group in self._ready]
        self._ready = [group for group, fault in faults if not fault]
        return [drop for _, fault in faults for drop in fault]

    def _selected(self, standing: Standing, groups: int) -> list[ReadyGroup]:
        batch = list(self.sampler.select(standing, groups))
        chosen = {group.group_id for group in batch}
        if batch and (len(chosen) != groups or not chosen <= {group.group_id for group in self._ready}):
            raise RecordError(
                f"sampler {self.sampler.name!r} chose {len(chosen)} different groups of those that are "
                f"ready, {groups} were asked for"
            )
        self._ready = [group for group in self._ready if group.group_id not in chosen]
        return batch

    def _abort(self, group_id: GroupId, why: str) -> Aborted:
        group = self._open.pop(group_id)
        running = tuple(member for member in group.members if member not in group.ended)
        ended = tuple(member.program_id for member in _trainable(group))
        return Aborted(group_id, why, running, ended)

    def _expecting(self, trajectory: Trajectory) -> _OpenGroup:
        group = self._open.get(trajectory.group_id)
        if group is None or trajectory.program_id not in group.members:
            raise RecordError(f"{trajectory.program_id}: group {trajectory.group_id} does not expect it")
        if trajectory.program_id in group.ended:
            raise RecordError(f"{trajectory.program_id}: has ended twice")
        return group

    def _complete(self, group_id: GroupId) -> tuple[Dropped, ...]:
        group = self._open[group_id]
        members = _trainable(group)
        if self._settles and len(members) >= self._fewest and not any(m.history for m in members):
            return ()
        return self._finish(self._open.pop(group_id), group_id)

    def _finish(self, group: _OpenGroup, group_id: GroupId) -> tuple[Dropped, ...]:
        members = _trainable(group)
        ready = ReadyGroup(group_id, members, self._arrivals, group.place)
        if len(members) < self._fewest:
            return ready.drop("group_too_small", f"{len(members)} of {len(group.members)} can be trained")
        if self._zero_spread == "replace" and not ready.has_signal:
            return ready.drop("no_signal", ready.describe_rewards())
        self._arrivals += 1
        self._ready.append(ready)
        return ()

    def _unusable(self, group: ReadyGroup, deployed: Version, max_staleness: int) -> tuple[Dropped, ...]:
        versions = {v.version for member in group.members for v in member.version_spans}
        distances = {version: self.lineage.distance(version, deployed) for version in versions}
        strangers = sorted(version for version, distance in distances.items() if distance is None)
        if strangers:
            return group.drop("lineage", f"sampled under {strangers[0]}, deployed is {deployed}")
        staleness = max(distance for distance in distances.values() if distance is not None)
        if staleness > max_staleness:
            return group.drop("stale", f"staleness {staleness} at use, bound {max_staleness}")
        return ()


def _evicted(group: ReadyGroup, evicted: Mapping[GroupId, str], standing: Standing) -> tuple[Dropped, ...]:
    if group.group_id not in evicted:
        return ()
    is_stale = standing.staleness_at_use(group.oldest_version) > standing.max_staleness
    return group.drop("stale" if is_stale else "evicted", evicted[group.group_id])


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
