"""What the scheduler keeps of one program, and what it shows of all."""

from dataclasses import dataclass

from sostenuto.scheduler.fleet import EngineSeat
from sostenuto.scheduler.kv import Footprint
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.types import EngineId, ProgramId

_NOTHING = Footprint(0)
_NEVER = float("inf")


@dataclass(slots=True)
class Program:
    """One program as the scheduler keeps it.  Written by the scheduler alone."""

    id: ProgramId
    rank: int
    lease_s: float
    expires_s: float = _NEVER
    """A queued program holds nothing and needs no lease."""
    phase: Phase = Phase.QUEUED
    since_s: float = 0.0
    turn: int = 0
    footprint: Footprint = _NOTHING
    turn_tokens: int = 0
    engine: EngineSeat | None = None

    @property
    def wanted(self) -> Footprint:
        """What its next turn needs: its context and all that the turn can add."""
        return Footprint(self.footprint.private_tokens + self.turn_tokens, self.footprint.shared)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """For people and tests."""

    phases: dict[ProgramId, Phase]
    engines: dict[EngineId, tuple[int, int]]
    """Reserved KV tokens and programs that decode."""
    waiting: int
    late_events: int = 0
