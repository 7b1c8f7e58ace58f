"""Who comes first among programs that nothing is missing but an engine.

Groups finish together: the members of a group have the place of its first member, a group of which little
is missing comes before the others, and a record that is about to become too stale to be trained before all.
Urgent programs, those of an evaluation, come before these.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedList

from sostenuto.scheduler.program import Program
from sostenuto.types import GroupId, ProgramId, Version

Key = tuple[int, int, int, int]
"""(staleness class, completeness class, place of the group, place of the program): smaller comes first."""

FIRST: Key = (-1, -1, -1, -1)
"""Before every program."""

_ALMOST = 0.25
"""A group is nearly complete when no larger share of it is still running."""


class KeyQueue:
    """Programs by key."""

    def __init__(self) -> None:
        self._sorted = SortedList[tuple[Key, ProgramId]]()
        self._members: dict[ProgramId, tuple[Key, Program]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, program_id: ProgramId) -> bool:
        return program_id in self._members

    def add(self, key: Key, program: Program) -> None:
        """A program that is here already gets the new key."""
        self.discard(program.id)
        self._members[program.id] = (key, program)
        self._sorted.add((key, program.id))

    def discard(self, program_id: ProgramId) -> None:
        member = self._members.pop(program_id, None)
        if member is not None:
            self._sorted.remove((member[0], program_id))

    def key_of(self, program_id: ProgramId) -> Key | None:
        member = self._members.get(program_id)
        return None if member is None else member[0]

    def first_of(self, count: int) -> list[Program]:
        """The first `count`, in order."""
        return [self._members[program_id][1] for _, program_id in self._sorted[:count]]

    def last_first(self) -> Iterator[Program]:
        """All of them, the last first.  Not to be changed meanwhile."""
        return (self._members[program_id][1] for _, program_id in reversed(self._sorted))


@dataclass(slots=True)
class _Group:
    place: int
    size: int
    finished: int = 0
    members: dict[ProgramId, Program] = field(default_factory=dict[ProgramId, Program])

    @property
    def is_almost_complete(self) -> bool:
        return self.finished > 0 and self.size - self.finished <= self.size * _ALMOST


class Order:
    """Keys of programs, and which of them change when one finishes or a version opens."""

    def __init__(self) -> None:
        self._groups: dict[GroupId, _Group] = {}

    def submitted(self, program: Program) -> None:
        if program.group is not None:
            group = self._groups.setdefault(program.group, _Group(program.rank, program.group_size))
            group.members[program.id] = program

    def key(self, program: Program, deployed: Version | None) -> Key:
        if program.is_urgent:
            return (0, -1, program.rank, program.rank)
        group = self._groups.get(program.group) if program.group is not None else None
        stale = _staleness_class(program, deployed)
        if group is None:
            return (stale, 1, program.rank, program.rank)
        return (stale, 0 if group.is_almost_complete else 1, group.place, program.rank)

    def finished(self, program: Program) -> list[Program]:
        """Members of its group whose key has changed by this."""
        group = self._groups.get(program.group) if program.group is not None else None
        if group is None or program.group is None:
            return []
        before = group.is_almost_complete
        group.members.pop(program.id, None)
        group.finished += 1
        if not group.members:
            del self._groups[program.group]
        return list(group.members.values()) if group.is_almost_complete != before else []


def _staleness_class(program: Program, deployed: Version | None) -> int:
    """0: this version is the last under which its record can be trained; 1: there is time; 2: too late."""
    until = program.trainable_until
    if until is None or deployed is None:
        return 1
    if deployed > until:
        return 2
    return 0 if deployed == until else 1
