"""What crosses between the runtime and the tool server, as JSON over HTTP.

    POST   /v1/programs/{program_id}/prepare   PrepareRequest  -> Prepared
    POST   /v1/programs/{program_id}/resume    ResumeRequest   -> Prepared  after the death of its server
    POST   /v1/programs/{program_id}/call      CallRequest     -> ToolResult
    POST   /v1/programs/{program_id}/reward    RewardRequest   -> Reward
    POST   /v1/programs/{program_id}/release                   -> {}     idempotent
    POST   /v1/programs/{program_id}/rung      RungRequest     -> Moved  the sandbox
    POST   /v1/programs/{program_id}/shell     ShellRequest    -> ShellReply
    POST   /v1/programs/{program_id}/exec      ExecRequest     -> ShellReply
    GET    /v1/programs/{program_id}/files/{path}              -> bytes
    PUT    /v1/programs/{program_id}/files/{path}   bytes      -> {}
    GET    /v1/programs/{program_id}/archive/{path}            -> a tar  `?max_bytes=N`, of the tar
    PUT    /v1/programs/{program_id}/archive/{path} a tar      -> {}     plain, gzip or bzip2
    POST   /v1/owners/{owner}/heartbeat        Heartbeat       -> {}     renews every lease of the owner
    GET    /v1/state                                           -> State
    GET    /v1/limits                                          -> Supply
    GET    /health                                             -> {}     the one route without a token

    GET    /metrics                                            -> Prometheus text

Every request carries `Authorization: Bearer TOKEN`.  One that names its owner, quoted as in a URL, in
`X-Sostenuto-Owner` is refused with 409 when a newer epoch has fenced it.  `X-Request-Id` is answered as it
came, or with a new one, and stands in the server's logs.  The path of an archive may be empty: the whole
workspace.  A refusal is a Refusal with a 4xx or 5xx status;
a path without a file is a PathError, 404 where it is missing and 400 elsewhere.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from sostenuto.errors import Blame
from sostenuto.types import Episode, Message, SandboxRung

OWNER = "X-Sostenuto-Owner"
GATEWAY = "gateway.sostenuto.internal"
"""In the network of a sandbox: where its program's model is."""
REQUEST_ID = "X-Request-Id"


class Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


LONGEST_S = 366 * 24 * 3600.0
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S, allow_inf_nan=False)]


class EnvironmentRef(Wire):
    """An environment class, by import path or by value."""

    name: str
    import_path: str | None = None
    """`package.module:Class`."""
    pickled: str | None = None
    """Base64 of a cloudpickle of the class, for classes of a script or a notebook."""
    options: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Passed to the class as keyword arguments."""
    gateway: str = ""
    """HOST:PORT that the entry `gateway.sostenuto.internal` in the network of its sandbox stands for."""
    requirements: tuple[str, ...] = ()
    """What pip installs into the virtual environment of its workers; none: they run as the server does."""
    interpreter: str | None = None
    """Absolute path of the python that runs its workers, instead of requirements."""
    memory_bytes: int = Field(default=0, ge=0)
    """What its sandbox may take at most; 0: it has none."""


class ToolLimits(Wire):
    """What the calls of one tool may use together, over all programs; None: as much as there is."""

    queue: str | None = None
    """Tools that name the same one share its concurrency and rate; None: the tool has one of its own."""
    concurrency: int | None = Field(default=None, gt=0)
    """Calls that run at the same time."""
    rate_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Starts a second."""
    burst: int = Field(default=1, gt=0)
    """Starts that may come at once after a quiet time; only with a rate."""
    cpus: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Claimed by one call while it runs."""
    memory_bytes: int = Field(default=0, ge=0)
    """Claimed by one call while it runs, if its last ones did not take more."""


class ToolSchema(Wire):
    """One tool as the model is told of it."""

    name: str
    description: str
    parameters: dict[str, JsonValue]
    """JSON Schema of the arguments object."""
    timeout_s: float
    serial: bool = False
    idempotent: bool = False
    """Running it again under the same call id does no harm."""
    output_bytes: int | None = Field(default=None, gt=0)
    """Cap of its observations; None: the tool server's."""
    limits: ToolLimits = ToolLimits()
    """Not told to the model."""

    def as_function(self) -> dict[str, JsonValue]:
        """In the form that chat templates take."""
        function: dict[str, JsonValue] = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}


class PrepareRequest(Wire):
    owner: str = Field(min_length=1, max_length=200)
    """Whose lease keeps this program alive."""
    environment: EnvironmentRef
    task: dict[str, JsonValue]
    seed: int = 0
    timeout_s: Seconds = 60.0
    idle_s: Annotated[Seconds, Field(ge=1)] | None = None
    """How long the program may be here without a request; None: the server's own bound."""
    max_s: Seconds | None = None
    """How long it may be here at all; a reward that has begun ends in its own time."""
    continues: bool = False
    """Take up the calls of this id that a server which died had recorded: what ended is answered, what was
    under way is unknown, or is run again if its tool is idempotent.  Otherwise they are forgotten."""


class ResumeRequest(PrepareRequest):
    """Go on with a program of a server that died: its sandbox from the last snapshot, no `reset`.

    Refused unless that is the program as the last result left it that its record has.  Fine to repeat.
    """

    seen: tuple[str, ...] = ()
    """Calls whose results the record has."""


class Prepared(Wire):
    messages: tuple[Message, ...]
    """The conversation so far: a system message if the environment has one, and the first user message."""
    tools: tuple[ToolSchema, ...]
    elapsed_s: float


class CallRequest(Wire):
    call_id: str = Field(min_length=1, max_length=200)
    """A repeated id joins the running call or returns the recorded result; it never runs twice."""
    name: str
    arguments: str
    """JSON text as the policy wrote it."""
    timeout_s: Seconds = 300.0
    """When the server ends the call, whatever the tool's own deadline is; its result is then a TIMEOUT.

    Waiting for its turn counts; the tool's own deadline begins with the turn.
    """
    priority: int = Field(default=0, ge=-100, le=100)
    """Of the program: smaller ones have their turn first."""


class RewardRequest(Wire):
    call_id: str = Field(min_length=1, max_length=200)
    episode: Episode
    timeout_s: Seconds = 60.0


class Reward(Wire):
    value: float | None
    """None: it comes later."""
    metrics: dict[str, float] = Field(default_factory=dict[str, float])
    turns: tuple[float, ...] = ()
    """What each turn earned, which adds up to `value`; empty where only that is known."""
    elapsed_s: float


class ShellRequest(Wire):
    command: str
    timeout_s: Seconds = 30.0
    output_bytes: int = Field(default=65536, gt=0)


class ExecRequest(Wire):
    """A program beside the shell."""

    argv: tuple[str, ...] = Field(min_length=1)
    stdin: str = ""
    """As UTF-8; what is no text or is large goes as a file."""
    timeout_s: Seconds = 30.0
    output_bytes: int = Field(default=65536, gt=0)


class ShellReply(Wire):
    exit_code: int | None
    """None: it was ended at its deadline."""
    output: str
    cut_bytes: int
    elapsed_s: float
    out_of_memory: bool = False
    """A process of it was ended because the sandbox's memory was used up."""


class RungRequest(Wire):
    rung: SandboxRung


class Moved(Wire):
    rung: SandboxRung
    """Which one it stands on; above the one that was asked for where it could not come back from that."""
    elapsed_s: float
    ends_with_server: str = ""
    """Why the program, if it is snapshotted, could not go on after the server's death; empty: it could."""


class Heartbeat(Wire):
    lease_s: Seconds


class ProgramState(Wire):
    program_id: str
    owner: str
    age_s: float
    left_s: float
    """Until it is released for its age or because it is idle, as things stand."""
    phase: Literal["preparing", "ready", "calling", "scoring", "releasing"]
    reason: str
    """Why it is here, in words, such as "calling bash for 3.2 s"."""
    sandbox: str | None
    """Backend that runs it; None for an environment without one."""
    rung: SandboxRung | None = None
    """Of the sandbox."""


class WarmSandbox(Wire):
    """A sandbox that was started ahead and that no program has yet."""

    sandbox: str
    """Backend that runs it."""
    age_s: float
    memory_bytes: int
    """The most that it may take."""
    reason: Literal["warm"] = "warm"


class State(Wire):
    programs: tuple[ProgramState, ...]
    hosts: int
    owners: dict[str, float]
    """Seconds left on each owner's lease."""
    counters: dict[str, int]
    queued: int
    """Calls that wait for their turn."""
    leaked: int
    """Environments and sandboxes that could not be given back yet."""
    warm: tuple[WarmSandbox, ...] = ()
    layer_bytes: int = 0
    """Disk that results of set-up commands take."""


class Supply(Wire):
    """What the server has for programs, for whoever spreads them over several servers."""

    backend: str
    isolation: str
    """What its sandboxes are separated by, for people."""
    cpus: float = Field(gt=0)
    memory_bytes: int = Field(gt=0)
    """What running calls may claim together."""
    sandbox_memory_bytes: int | None = None
    """What sandboxes may take together, each counted with its limit; None: no bound."""
    warm_memory_bytes: int = Field(default=0, ge=0)
    """What those may take, by their limits, that were started ahead and that no program has yet."""
    snapshot_idle_s: float | None = None
    """Sandboxes that were not used for so long are snapshotted; None: only those that step down so far."""


class Refusal(Wire):
    error: str
    """Type of the error, as in sostenuto.errors."""
    message: str
    blame: Blame | None = None
    retry_after_s: float | None = None
    """Of one that says that too much waits: when to ask again."""
