"""What goes into the scheduler and what comes out of it.  Values only.

Events say what happened; actions say what the shell has to do.  Both are closed unions.
"""

from dataclasses import dataclass

from sostenuto.scheduler.kv import Footprint
from sostenuto.types import EngineId, ProgramId, Version

# ---- events ----


@dataclass(frozen=True, slots=True)
class Submitted:
    """A program wants to run.  Once it holds something, without news of it for `lease_s` it is expired."""

    program_id: ProgramId
    lease_s: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """Its environment is ready and its prompt is known."""

    program_id: ProgramId
    footprint: Footprint
    turn_tokens: int
    """The most that the next turn can add."""


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """Decoding stopped because the policy asked for a tool; KV is held."""

    program_id: ProgramId
    turn: int
    footprint: Footprint


@dataclass(frozen=True, slots=True)
class ToolReturned:
    """The results are in the context: the next turn can start."""

    program_id: ProgramId
    turn: int
    footprint: Footprint
    turn_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The last turn is over: KV can go, the environment is still needed for the reward."""

    program_id: ProgramId


@dataclass(frozen=True, slots=True)
class Finished:
    """The program is over and holds nothing any more."""

    program_id: ProgramId


@dataclass(frozen=True, slots=True)
class EngineJoined:
    engine_id: EngineId
    version: Version
    kv_tokens: int
    concurrency: int
    block_tokens: int = 1


@dataclass(frozen=True, slots=True)
class EngineLost:
    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class PublicationBegun:
    version: Version


@dataclass(frozen=True, slots=True)
class UpdateStaged:
    engine_id: EngineId
    version: Version


@dataclass(frozen=True, slots=True)
class UpdateCommitted:
    engine_id: EngineId
    version: Version
    dropped_kv: bool
    """Whether the engine gave up the KV of programs between turns."""


@dataclass(frozen=True, slots=True)
class UpdateFailed:
    engine_id: EngineId
    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; `Scheduler.wake_at_s` says when one is due."""


ProgramEvent = Prepared | TurnEnded | ToolReturned | Answered | Finished
EngineEvent = EngineJoined | EngineLost | PublicationBegun | UpdateStaged | UpdateCommitted | UpdateFailed
Event = Submitted | Tick | ProgramEvent | EngineEvent

# ---- actions ----


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


@dataclass(frozen=True, slots=True)
class Evict:
    """Give up the program's KV on that engine; the program goes on."""

    program_id: ProgramId
    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class Refuse:
    """No engine can ever hold the program's next turn."""

    program_id: ProgramId
    needed_tokens: int
    largest_tokens: int


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


@dataclass(frozen=True, slots=True)
class Opened:
    """Every engine that takes part serves this version."""

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


ProgramAction = Prepare | Decode | Evict | Refuse | Expire
UpdateAction = StageUpdate | CommitUpdate | Opened | PublicationFailed | Quarantine
Action = ProgramAction | UpdateAction
