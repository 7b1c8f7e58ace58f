"""What the scheduler keeps of one program, and what it shows of all."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from sostenuto.scheduler.events import NO_CLAIM, SandboxClaim, Submitted
from sostenuto.scheduler.fleet import EngineSeat
from sostenuto.scheduler.kv import Footprint
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.scheduler.requirements import ANY, Requirement
from sostenuto.types import EngineId, GroupId, ProgramId, Version

_NOTHING = Footprint(0)
NEVER = float("inf")


class Reason(StrEnum):
    """What a program waits for.  The list is closed."""

    KV = "kv"
    SLOTS = "slots"
    """A place among those that decode together."""
    SANDBOX = "sandbox"
    """Its environment, or room for it on the tool server."""
    VERSION = "version"
    """No engine with a verified version takes requests."""
    TOOL = "tool"
    ORDER = "order"
    """There is room, and it is another's turn first."""


class Home(Protocol):
    """The engine that a program has something on."""

    id: EngineId

    def unclaim(self) -> None: ...

    def take_from_host(self, program_id: ProgramId) -> None: ...


@dataclass(slots=True)
class Program:
    """One program as the scheduler keeps it.  Written by the scheduler alone."""

    id: ProgramId
    rank: int
    """By order of submission."""
    lease_s: float
    group: GroupId | None = None
    group_size: int = 1
    trainable_until: Version | None = None
    sandbox: SandboxClaim = NO_CLAIM
    has_environment: bool = True
    is_urgent: bool = False
    requires: Requirement = ANY
    began: Version | None = None
    """What its first turn was granted under."""
    has_sampled: bool = False
    """Whether something came of that."""
    slack: int | None = None
    """So many versions may open over the one that it began with until its record is too stale to be trained;
    None: any number."""
    pinned_to: Version | None = None
    """While an engine still has this version, it goes on under it and under no other."""
    submitted_s: float = 0.0
    expires_s: float = NEVER
    """A queued program holds nothing and needs no lease."""
    phase: Phase = Phase.QUEUED
    since_s: float = 0.0
    """When its phase began."""
    is_unstarted: bool = False
    """Its environment is ready, and it waits for its first turn."""
    claims: "Home | None" = None
    """The engine that is kept clear for it."""
    offloaded_to: "Home | None" = None
    """Whose lower tier has its KV."""
    acting_since_s: float = 0.0
    """When its last tool call began."""
    decoding_since_s: float = 0.0
    """When its last turn was started."""
    decoding_from: float = 0.0
    """Program-seconds of its engine at that time."""
    turn: int = 0
    footprint: Footprint = _NOTHING
    wanted: Footprint = _NOTHING
    """What its next turn needs: its context and all that the turn can add."""
    engine: EngineSeat | None = None
    """Where its KV is; while it decodes, where it decodes."""
    kv_of: Version | None = None
    """The version that its KV is as old as."""
    tool: str = ""
    """Whose return it waits for."""
    runnable_since_s: float = 0.0
    """When it last began to lack nothing but an engine; an eviction meanwhile does not start it anew."""
    held_tokens: int = 0
    """What only it keeps on its engine between turns."""
    fatigue: float = 0.0
    """How often its KV was given up; half of that is forgotten with each turn."""
    reason: Reason | None = None
    reason_since_s: float = 0.0
    waited_s: dict[Reason, float] = field(default_factory=dict[Reason, float])

    @classmethod
    def submitted(cls, event: Submitted, rank: int, now_s: float) -> "Program":
        return cls(
            id=event.program_id,
            rank=rank,
            lease_s=event.lease_s,
            group=event.group,
            group_size=event.group_size,
            trainable_until=event.trainable_until,
            sandbox=event.sandbox,
            has_environment=event.has_environment,
            is_urgent=event.is_urgent,
            requires=event.requires,
            submitted_s=now_s,
            since_s=now_s,
        )

    @property
    def required(self) -> Requirement:
        """What its next turn requires."""
        if self.pinned_to is not None:
            return Requirement.exactly(self.pinned_to)
        return self.requires.of(self.began)

    def lacks_engine(self, footprint: Footprint, turn_tokens: int) -> None:
        """Its context is known, and its next turn adds at most `turn_tokens`."""
        self.footprint = footprint
        self.wanted = Footprint(footprint.private_tokens + turn_tokens, footprint.shared)

    def leave_host(self) -> None:
        """Nothing of it is in a lower tier any more.  Safe to call twice."""
        if self.offloaded_to is not None:
            self.offloaded_to.take_from_host(self.id)
            self.offloaded_to = None

    def waits_for(self, reason: Reason | None, now_s: float) -> Reason | None:
        """Note what it waits for from now on; returns what it waited for until now."""
        before = self.reason
        if before is not None:
            self.waited_s[before] = self.waited_s.get(before, 0.0) + now_s - self.reason_since_s
        self.reason, self.reason_since_s = reason, now_s
        return before


@dataclass(frozen=True, slots=True)
class Doing:
    """One program, for people."""

    program_id: ProgramId
    phase: Phase
    since_s: float
    """When its phase began."""
    turn: int
    tool: str
    """Whose return it waits for; empty: none's."""
    engine: EngineId | None
    """Where its KV is."""

    @classmethod
    def of(cls, program: Program) -> "Doing":
        engine = program.engine.id if program.engine else None
        tool = program.tool if program.phase in {Phase.ACTING, Phase.PARKED} else ""
        return cls(program.id, program.phase, program.since_s, program.turn, tool, engine)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """For people and tests."""

    phases: dict[ProgramId, Phase]
    engines: dict[EngineId, tuple[int, int]]
    """Reserved KV tokens and programs that decode."""
    waiting: int
    late_events: int = 0
    waits_for: dict[ProgramId, Reason] = field(default_factory=dict[ProgramId, Reason])
    waited_s: dict[Reason, float] = field(default_factory=dict[Reason, float])
    """Over all programs, those that are over included."""

    @classmethod
    def of(
        cls,
        programs: Iterable[Program],
        engines: Iterable[EngineSeat],
        *,
        waiting: int,
        late_events: int,
        waited_s: dict[Reason, float],
    ) -> "Snapshot":
        everybody = list(programs)
        return cls(
            phases={program.id: program.phase for program in everybody},
            engines={seat.id: (seat.kv.statistics().reserved_tokens, len(seat.decoding)) for seat in engines},
            waiting=waiting,
            late_events=late_events,
            waits_for={p.id: p.reason for p in everybody if p.reason is not None},
            waited_s=dict(waited_s),
        )
