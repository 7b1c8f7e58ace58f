"""The nouns every package shares.  Values only: frozen, comparable, no I/O."""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from operator import add, attrgetter
from typing import ClassVar, NamedTuple, NewType, Self

from sostenuto.errors import Blame, ConfigError

ProgramId = NewType("ProgramId", str)
GroupId = NewType("GroupId", str)
CallId = NewType("CallId", str)
EngineId = NewType("EngineId", str)


class Version(NamedTuple):
    """A version of the policy weights.  Ordered; a pair is never used twice.

    `epoch` rises by one each time a run is taken up again after a crash; `number` goes on.
    """

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` wrote, or raise ValueError."""
        epoch, _, number = text.partition(".")
        return cls(int(epoch), int(number))

    def next(self) -> "Version":
        return Version(self.epoch, self.number + 1)


class Purpose(StrEnum):
    """What a program is run for."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    SERVE = "serve"


class StopReason(StrEnum):
    """Why a program's last turn was its last.  The list is closed."""

    ANSWERED = "answered"
    """The policy ended a turn without asking for a tool."""
    ENVIRONMENT_DONE = "environment_done"
    """The environment said that the task is over."""
    TURN_LIMIT = "turn_limit"
    TURN_TOKENS = "turn_tokens"
    """A turn reached its token limit before the policy ended it."""
    TOTAL_TOKENS = "total_tokens"
    CONTEXT_FULL = "context_full"
    """What comes next does not fit in the engine's context."""
    TOOL_CALL_LIMIT = "tool_call_limit"
    DEADLINE = "deadline"
    FAILED = "failed"
    CANCELLED = "cancelled"


class OutcomeKind(StrEnum):
    """How a program ended.  Every program ends in exactly one of these."""

    TRAINED = "trained"
    EVALUATED = "evaluated"
    SERVED = "served"
    DROPPED = "dropped"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RECYCLED = "recycled"


class SandboxRung(StrEnum):
    """How much of a sandbox is kept.  Each rung down frees more and costs more to come back from."""

    RUNNING = "running"
    PAUSED = "paused"
    """Frees CPU."""
    RECLAIMED = "reclaimed"
    """Frees memory, too: paged out."""
    SNAPSHOTTED = "snapshotted"
    """Frees all but its disk: it is started anew from there."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The one end of a program.  `blame` is given for FAILED alone."""

    kind: OutcomeKind
    reason: str = ""
    blame: Blame | None = None

    def __post_init__(self) -> None:
        if (self.kind is OutcomeKind.FAILED) != (self.blame is not None):
            raise ValueError(f"{self.kind}: blame is for failed programs, and for all of them")

    def __str__(self) -> str:
        inner = ", ".join(part for part in (self.blame, self.reason) if part)
        return f"{self.kind}({inner})" if inner else str(self.kind)


@dataclass(frozen=True, slots=True)
class Usage:
    """Where a program's time and tokens went.  Times in seconds, summed over its turns."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    tool_s: float = 0.0
    queue_s: float = 0.0
    """Waiting for the scheduler or for a place in the engine's batch."""
    pause_s: float = 0.0
    """Standing still inside the engine while weights were swapped."""
    environment_s: float = 0.0
    """Preparing the environment and scoring the episode."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*map(add, _amounts(self), _amounts(other)))


_amounts = attrgetter(*(field.name for field in fields(Usage)))


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use at the most.  `None`: no limit of its own."""

    turns: int = 16
    turn_tokens: int = 512
    """Generated in one turn."""
    total_tokens: int | None = None
    """Prompt, generated and fed tokens of the whole program."""
    tool_calls: int | None = None
    wall_s: float = 600.0

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and value <= 0:
                raise ConfigError(f"limits: {limit.name} is {value}; give more than 0")


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which tokens are left out when one is drawn.  What training learns from is sampled without."""

    top_p: float = 1.0
    """Only the smallest set of most probable tokens that has at least this probability."""
    top_k: int = 0
    """Only the most probable tokens; 0: all."""
    min_p: float = 0.0
    """Only tokens at least this times as probable as the most probable one."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        right = {"top_p": 0 < self.top_p <= 1, "top_k": self.top_k >= 0, "min_p": 0 <= self.min_p <= 1}
        for name, is_right in right.items():
            if not is_right:
                ranges = "top_p above 0 up to 1, top_k from 0, min_p from 0 to 1"
                raise ConfigError(f"truncation: {name} is {getattr(self, name)}; give {ranges}")

    def refuse_in_training(self) -> None:
        """ConfigError that names what is set."""
        for cut in fields(self):
            if (value := getattr(self, cut.name)) != cut.default:
                raise ConfigError(
                    f"truncation.{cut.name}: is {value}, and training recomputes the log-probabilities of "
                    "the whole distribution: the support is not in the record; leave it out, or set it in "
                    "an evaluation"
                )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the policy wrote it.  `arguments` is JSON text, not yet checked."""

    name: str
    arguments: str


class ToolStatus(StrEnum):
    """What came of a tool call.  Only the last two end the program."""

    OK = "ok"
    TOOL_ERROR = "tool_error"
    """The tool refused on purpose; the text says why."""
    INVALID_ARGUMENTS = "invalid_arguments"
    """Unknown tool, malformed JSON or arguments that break the schema."""
    TIMEOUT = "timeout"
    ENVIRONMENT_FAILURE = "environment_failure"
    INFRASTRUCTURE_FAILURE = "infrastructure_failure"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool call came to, as the tool server recorded it."""

    status: ToolStatus
    content: str
    cut_bytes: int = 0
    """How much was taken out of the middle to keep within the output cap."""
    elapsed_s: float = 0.0
    done: bool = False
    """The environment says that the task is over."""
    queued_s: float = 0.0
    """Waited for its turn at the tool; not in `elapsed_s`."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, as templates and environments see it."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    name: str = ""
    """Of the tool that answered, for role `tool`."""


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """How an agent that runs its own loop reaches its model."""

    base_url: str
    """As SDKs take it, such as http://127.0.0.1:8000/v1."""
    api_key: str = field(repr=False)
    """Of its program alone."""
    wall_s: float | None = None
    """How long the agent may take; None: as long as it wants."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What a reward function sees: the conversation and how it ended."""

    messages: tuple[Message, ...]
    stop_reason: StopReason
    tool_results: tuple[ToolResult, ...] = ()
    """In call order, over all turns."""
    turns: int = 0
    seed: int = 0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    model: ModelAccess | None = None
    """Of a program that has yet to run, in an agent of its own."""

    @property
    def answer(self) -> str:
        """The text of the last assistant message; empty when there is none."""
        for message in reversed(self.messages):
            if message.role == "assistant":
                return message.content
        return ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(call for message in self.messages for call in message.tool_calls)
