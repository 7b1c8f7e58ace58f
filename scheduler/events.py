"""What goes into the scheduler: what has happened.  Values only, in a closed union."""

from dataclasses import dataclass

from sostenuto.scheduler.kv import Footprint
from sostenuto.scheduler.requirements import ANY, Requirement
from sostenuto.scheduler.update_terms import DEFAULT, UpdateTerms
from sostenuto.types import EngineId, GroupId, ProgramId, SandboxRung, Version


@dataclass(frozen=True, slots=True)
class SandboxClaim:
    """What a program's sandbox takes of its tool server while it runs."""

    memory_bytes: int = 0
    disk_bytes: int = 0
    cpus: float = 0.0


NO_CLAIM = SandboxClaim()


@dataclass(frozen=True, slots=True)
class Submitted:
    """A program wants to run.  Once it holds something, without news of it for `lease_s` it is expired."""

    program_id: ProgramId
    lease_s: float
    group: GroupId | None = None
    """Its group is complete when `group_size` programs of it have finished."""
    group_size: int = 1
    trainable_until: Version | None = None
    """The newest deployed version under which its record can still be trained; None: no such limit."""
    sandbox: SandboxClaim = NO_CLAIM
    has_environment: bool = True
    """Whether one is made for it; without, it takes no place among live programs and needs only an engine."""
    is_urgent: bool = False
    """It goes before all that are not, for an environment, also in the reserved places, and for an engine."""
    requires: Requirement = ANY
    """Versions that its turns may be of; Unserved once none of them is served, or can still come."""
    may_be_ended: bool = False
    """By EndStale."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Its environment is ready and its prompt is known."""

    program_id: ProgramId
    footprint: Footprint
    turn_tokens: int
    """The most that the next turn can add."""
    requires: Requirement | None = None
    """From now on; None: as before."""


@dataclass(frozen=True, slots=True)
class TurnCost:
    """What the engine did for one turn."""

    prefilled_tokens: int
    prefill_s: float
    generated_tokens: int
    decode_s: float
    queue_s: float = 0.0
    """In the engine's own queue, before the first token was prefilled."""


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """Decoding stopped because the policy asked for a tool; KV is held."""

    program_id: ProgramId
    turn: int
    footprint: Footprint
    tools: tuple[str, ...] = ()
    """They run together; the next turn waits for the slowest."""
    cost: TurnCost | None = None


@dataclass(frozen=True, slots=True)
class ToolReturned:
    """The results are in the context: the next turn can start."""

    program_id: ProgramId
    turn: int
    footprint: Footprint
    turn_tokens: int
    queued_s: float = 0.0
    """Of the time since: waited for a turn at the tool."""
    requires: Requirement | None = None


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The turn stopped half way, with so many tokens, or was not begun: it wants an engine again."""

    program_id: ProgramId
    turn: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """The last turn is over: KV can go, the environment is still needed for the reward."""

    program_id: ProgramId


@dataclass(frozen=True, slots=True)
class Finished:
    """The program is over and holds nothing any more."""

    program_id: ProgramId


@dataclass(frozen=True, slots=True)
class Heard:
    """The program's client is alive: its lease begins anew."""

    program_id: ProgramId


@dataclass(frozen=True, slots=True)
class EngineJoined:
    engine_id: EngineId
    version: Version
    kv_tokens: int | None
    """None: the engine does not say, and the cap is found from its behaviour."""
    concurrency: int
    block_tokens: int = 1
    prefill_tokens_s: float | None = None
    """None: not known yet; learned from the cost of turns."""
    gives_up_parts: bool = False
    """Untold, its cache overwrites KV block by block from the end, least recently used first, for room."""
    host_tokens: int = 0
    """Of its lower tier; 0: it has none."""
    host_tokens_s: float = 0.0
    """Tokens a second that come back from the lower tier."""
    peers: str = ""
    """Engines that say the same here should be as fast as each other; empty: it is compared with none."""
    tells_kv_age: bool = True
    """It can give up the KV that is too old, and keep the rest; else it gives up all or none."""


@dataclass(frozen=True, slots=True)
class EngineLoaded:
    """What an engine says of itself now and then."""

    engine_id: EngineId
    waiting: int
    """Requests in its own queue."""
    used_share: float | None = None
    """Of its KV pool, by requests that run; None when it does not say."""
    hit_rate: float | None = None
    """Of prompt tokens since the last report."""
    preemptions: int = 0
    """Since it started."""


@dataclass(frozen=True, slots=True)
class EngineLost:
    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class EngineDraining:
    """It is about to leave: nothing new starts there, and what is between turns gives up its KV."""

    engine_id: EngineId
    reason: str


@dataclass(frozen=True, slots=True)
class Probed:
    """What a request that was sent to find out how fast an engine is cost; None: it failed."""

    engine_id: EngineId
    cost: TurnCost | None


@dataclass(frozen=True, slots=True)
class PublicationBegun:
    version: Version
    terms: UpdateTerms = DEFAULT


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
    dropped: tuple[ProgramId, ...] = ()
    """Else those of them whose KV it gave up because of its age."""


@dataclass(frozen=True, slots=True)
class UpdateFailed:
    engine_id: EngineId
    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class ToolServerJoined:
    """What the tool server can give to sandboxes; None: it sets no limit."""

    memory_bytes: int | None = None
    disk_bytes: int | None = None
    cpus: float | None = None


@dataclass(frozen=True, slots=True)
class SandboxMoved:
    """A sandbox stands on the rung that was asked for, or above it where it could not have come back."""

    program_id: ProgramId
    rung: SandboxRung
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; `Scheduler.wake_at_s` says when one is due."""


ProgramEvent = Prepared | TurnEnded | ToolReturned | Interrupted | Answered | Finished | Heard | SandboxMoved
EngineEvent = EngineJoined | EngineLoaded | EngineLost | EngineDraining | Probed
UpdateEvent = PublicationBegun | UpdateStaged | UpdateCommitted | UpdateFailed
Event = Submitted | Tick | ProgramEvent | EngineEvent | UpdateEvent | ToolServerJoined
