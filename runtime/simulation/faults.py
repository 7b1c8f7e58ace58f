"""What can go wrong in a simulation, and when."""

from dataclasses import dataclass

from sostenuto.types import ProgramId


@dataclass(frozen=True, slots=True)
class EngineDies:
    """An engine is gone, and all KV on it."""

    at_s: float
    engine: int
    """Counted from 0."""
    back_after_s: float | None = None
    """None: it stays away.  Otherwise an empty one of the same name joins after that."""


@dataclass(frozen=True, slots=True)
class ClientDies:
    """Nothing is heard of a program any more: its request ends, its tool's result reaches nobody."""

    at_s: float
    program_id: ProgramId
    lease_s: float = 3600.0
    """Of that program, from its submission on: the scheduler gives up on it after so long a silence."""


Fault = EngineDies | ClientDies
