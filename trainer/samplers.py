"""Which groups start, which make a batch, and which are given up: the order of use as a choice.

    in_order    as they were opened: batches do not depend on how long anything takes
    fifo        the oldest versions first, and a running group that would be overtaken for too long is
                waited for: what is finished is used
    ready_first as they become ready, whatever still runs: no batch waits for a straggler
    windowed:N  as they become ready, but none is overtaken by more than the N - 1 opened after it

All of them keep generation as far ahead as `pacing` allows, so the bound on staleness holds; they differ in
what waits for what.  `ready_first` and `windowed` give up running groups that have become too old to be used.
No torch, no I/O, no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from pydantic import JsonValue

from sostenuto.errors import ConfigError, nearest
from sostenuto.trainer.groups import ReadyGroup, RunningGroup
from sostenuto.trainer.lineage import NO_BRANCHES, Lineage
from sostenuto.trainer.pacing import Pacing
from sostenuto.types import GroupId, Version


@dataclass(frozen=True, slots=True)
class Standing:
    """What a sampler decides on."""

    deployed: Version
    max_staleness: int
    groups_per_step: int
    """That raise the version by one."""
    learning: int
    """Groups that were taken, and whose version is not deployed yet."""
    opened: int
    """Groups since the job began: the place of the next one."""
    ready: tuple[ReadyGroup, ...]
    """All within the bound."""
    running: tuple[RunningGroup, ...]
    lineage: Lineage = NO_BRANCHES

    def staleness(self, version: Version) -> int:
        return self.lineage.staleness(version, self.deployed)

    def staleness_at_use(self, version: Version) -> int:
        """At the earliest: what was taken raises the version before a group that is ready now can be used."""
        return self.staleness(version) + self.learning // self.groups_per_step


class Sampler(Protocol):
    """A policy, one for each job; it is asked, and changes nothing but its own state."""

    @property
    def name(self) -> str:
        """As `open_sampler` takes it."""
        ...

    def check(self, groups_per_step: int) -> None:
        """ConfigError when batches of this size can never come."""
        ...

    def admit(self, standing: Standing) -> int:
        """How many groups may start now."""
        ...

    def select(self, standing: Standing, groups: int) -> Sequence[ReadyGroup]:
        """The next batch: so many of the ready ones, or none yet."""
        ...

    def evict(self, standing: Standing) -> Mapping[GroupId, str]:
        """Ready groups that are to be dropped now, and why; those beyond the bound are gone already.

        Counted as dropped(stale) where they would be beyond it when they could be used, else as evicted.
        """
        ...

    def should_abort(self, group: RunningGroup, standing: Standing) -> str:
        """Why a running group is to be given up; empty: it is not."""
        ...

    def state_dict(self) -> dict[str, JsonValue]: ...

    def load_state_dict(self, state: Mapping[str, JsonValue]) -> None:
        """ConfigError for the state of another sampler."""
        ...


@dataclass(slots=True)
class _Paced:
    """What all have in common."""

    kind: ClassVar[str] = ""
    selected: int = 0
    """Groups, since the job began."""

    @property
    def name(self) -> str:
        return self.kind

    def check(self, groups_per_step: int) -> None:
        del groups_per_step

    def admit(self, standing: Standing) -> int:
        return Pacing(standing.groups_per_step, standing.max_staleness).room(
            open_groups=len(standing.running),
            ready_groups=len(standing.ready),
            learning_groups=standing.learning,
        )

    def evict(self, standing: Standing) -> Mapping[GroupId, str]:
        """What every batch to come would be too late for: its place is another's at once."""
        ages = {group.group_id: standing.staleness_at_use(group.oldest_version) for group in standing.ready}
        return {
            group_id: f"staleness {age} when it could be used, bound {standing.max_staleness}"
            for group_id, age in ages.items()
            if age > standing.max_staleness
        }

    def should_abort(self, group: RunningGroup, standing: Standing) -> str:
        del group, standing
        return ""

    def select(self, standing: Standing, groups: int) -> Sequence[ReadyGroup]:
        chosen = self._choose(standing, groups)
        self.selected += len(chosen)
        return chosen

    def _choose(self, standing: Standing, groups: int) -> Sequence[ReadyGroup]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, JsonValue]:
        return {"sampler": self.name, "selected": self.selected}

    def load_state_dict(self, state: Mapping[str, JsonValue]) -> None:
        if state.get("sampler") != self.name:
            raise ConfigError(f"sampler: the state is of {state.get('sampler')!r}, not of {self.name!r}")
        selected = state.get("selected")
        if not isinstance(selected, int):
            raise ConfigError(f"sampler: 'selected' of its state is {selected!r}; give what state_dict gave")
        self.selected = selected


@dataclass(slots=True)
class Fifo(_Paced):
    """The oldest versions first.  No batch leaves a group behind that later ones could not use in time."""

    kind: ClassVar[str] = "fifo"

    def _choose(self, standing: Standing, groups: int) -> Sequence[ReadyGroup]:
        usable = sorted(standing.ready, key=lambda group: (group.oldest_version, group.arrived))
        if len(usable) < groups or _should_wait(usable, standing, groups):
            return ()
        return usable[:groups]


@dataclass(slots=True)
class InOrder(_Paced):
    """As groups were opened; one that comes to nothing is passed over."""

    kind: ClassVar[str] = "in_order"

    def _choose(self, standing: Standing, groups: int) -> Sequence[ReadyGroup]:
        first_running = min((group.place for group in standing.running), default=None)
        usable = sorted(standing.ready, key=lambda group: group.place)
        batch = usable[:groups]
        is_next = first_running is None or all(group.place < first_running for group in batch)
        return batch if len(batch) == groups and is_next else ()


@dataclass(slots=True)
class ReadyFirst(_Paced):
    """As groups become ready.  What takes longest is used last, if at all."""

    kind: ClassVar[str] = "ready_first"

    def _choose(self, standing: Standing, groups: int) -> Sequence[ReadyGroup]:
        usable = sorted(standing.ready, key=lambda group: group.arrived)
        return usable[:groups] if len(usable) >= groups else ()

    def should_abort(self, group: RunningGroup, standing: Standing) -> str:
        staleness = standing.staleness(group.started)
        if staleness <= standing.max_staleness:
            return ""
        return f"staleness {staleness} while it runs, bound {standing.max_staleness}"


@dataclass(slots=True)
class Windowed(ReadyFirst):
    """As groups become ready, among `window` that were opened one after the other."""

    kind: ClassVar[str] = "windowed"
    window: int = field(default=16, kw_only=True)

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.window}"

    def check(self, groups_per_step: int) -> None:
        if self.window < groups_per_step:
            raise ConfigError(
                f"sampler: a window of {self.window} holds no batch of {groups_per_step} groups; "
                f"give windowed:{groups_per_step} or more"
            )

    def admit(self, standing: Standing) -> int:
        first_running = min((group.place for group in standing.running), default=standing.opened)
        spanned = standing.opened - first_running
        # Not super(): a dataclass with slots is made twice, and the first one is what it would name.
        return max(0, min(_Paced.admit(self, standing), self.window - spanned))


_BY_NAME: dict[str, type[Fifo | InOrder | ReadyFirst]] = {
    kind.kind: kind for kind in (InOrder, Fifo, ReadyFirst)
}


def open_sampler(given: str | Sampler) -> Sampler:
    """By name, `windowed` with its window behind a colon; ConfigError lists the names."""
    if not isinstance(given, str):
        return given
    name, colon, argument = given.partition(":")
    if name == Windowed.kind:
        if not colon or not argument.isdecimal() or int(argument) < 1:
            raise ConfigError(f"sampler: {given!r} needs a number of groups, such as 'windowed:16'")
        return Windowed(window=int(argument))
    if name not in _BY_NAME or colon:
        raise ConfigError(f"sampler: {given!r}; {nearest(given, [*_BY_NAME, 'windowed:16'])}")
    return _BY_NAME[name]()


def _should_wait(usable: list[ReadyGroup], standing: Standing, groups: int) -> bool:
    """Whether a group that runs is more urgent than one of the batch, and would come too late."""
    running = [group.started for group in standing.running]
    left = [group.oldest_version for group in usable[groups:]] + running
    overtakes = any(started < usable[groups - 1].oldest_version for started in running)
    return overtakes and not _in_time(left, standing, groups)


def _in_time(left: list[Version], standing: Standing, groups: int) -> bool:
    """Whether what comes next, the most urgent first, can use all that this batch leaves."""
    # How many versions each may still wait; one that is too old already is past help.
    may_wait = sorted(
        standing.max_staleness - standing.staleness(version)
        for version in left
        if standing.lineage.distance(version, standing.deployed) is not None
    )
    urgent = [versions for versions in may_wait if versions >= 0]
    taken = standing.learning + groups
    return all(
        versions >= (taken + place) // standing.groups_per_step for place, versions in enumerate(urgent)
    )
