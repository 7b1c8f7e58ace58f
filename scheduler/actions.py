"""What comes out of the scheduler: what the shell has to do.  Values only, in a closed union."""

from dataclasses import dataclass

from sostenuto.scheduler.requirements import ANY, Requirement
from sostenuto.types import EngineId, ProgramId, SandboxRung, Version


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make the program's environment."""

    program_id: ProgramId


@dataclass(frozen=True, slots=True)
class Decode:
    """Run turn number `turn` of the program there."""

    program_id: ProgramId
    engine_id: EngineId
    turn: int
    requires: Requirement = ANY


@dataclass(frozen=True, slots=True)
class Evict:
    """Give up the program's KV on that engine; the program goes on."""

    program_id: ProgramId
    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class Offload:
    """Move the program's KV to the engine's lower tier; it comes back with the next Decode there."""

    program_id: ProgramId
    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class MoveSandbox:
    """Bring the program's sandbox to this rung.  RUNNING: before its next tool call."""

    program_id: ProgramId
    rung: SandboxRung


@dataclass(frozen=True, slots=True)
class TurnAway:
    """Too much waits already: the program is not taken in, and may be submitted again later."""

    program_id: ProgramId
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """No engine can ever hold the program's next turn."""

    program_id: ProgramId
    needed_tokens: int
    largest_tokens: int


@dataclass(frozen=True, slots=True)
class Unserved:
    """No version that the program requires is served, and none can come any more: to be submitted again."""

    program_id: ProgramId
    wanted: Requirement
    deployed: Version


@dataclass(frozen=True, slots=True)
class EndStale:
    """Its record cannot be trained any more."""

    program_id: ProgramId
    trainable_until: Version
    deployed: Version


@dataclass(frozen=True, slots=True)
class Expire:
    """Nothing was heard of the program for the length of its lease."""

    program_id: ProgramId


@dataclass(frozen=True, slots=True)
class StageUpdate:
    engine_id: EngineId
    version: Version


@dataclass(frozen=True, slots=True)
class CommitUpdate:
    engine_id: EngineId
    version: Version
    oldest_kv: Version | None = None
    """KV of an older version is not used any more; None: as the terms say of all of it."""
    drops_kv: bool = False
    """All of it is given up: some is too old, and the engine cannot tell which."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """End what runs there, with the tokens it has."""

    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class Opened:
    """Every engine that takes part, or a quorum of them, serves this version."""

    version: Version


@dataclass(frozen=True, slots=True)
class PublicationFailed:
    """No engine is left that could serve this version."""

    version: Version


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The engine starts nothing more until a full verified update."""

    engine_id: EngineId
    reason: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Find out how fast the engine is, and report `Probed`."""

    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class Slowed:
    """The engine is slow: nothing starts there until probes find it as fast as its peers."""

    engine_id: EngineId
    reason: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """The engine takes requests again."""

    engine_id: EngineId


ProgramAction = (
    Prepare | Decode | Evict | Offload | MoveSandbox | TurnAway | Refuse | Unserved | EndStale | Expire
)
PaceAction = Probe | Slowed | Recovered
UpdateAction = StageUpdate | Interrupt | CommitUpdate | Opened | PublicationFailed | Quarantine
Action = ProgramAction | PaceAction | UpdateAction
