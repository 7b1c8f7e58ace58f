"""One model call as every dialect puts it, and what comes of it.  Values only."""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from sostenuto.errors import SostenutoError
from sostenuto.runtime.engines.wire import GenerateReply, Sampling
from sostenuto.runtime.rendering.renderer import Turn
from sostenuto.scheduler.requirements import Requirement
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Message, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a client wants sampled: after messages, or after tokens, exactly one of them."""

    messages: tuple[Message, ...] = ()
    token_ids: tuple[int, ...] = ()
    role: str = ""
    """In which the client speaks; "": the policy alone."""
    tools: tuple[ToolSchema, ...] = ()
    sampling: Sampling
    """Its stop tokens are those of the model where `messages` are given."""
    held_by: str = "response_format"
    """The key of the body that asks for the grammar of `sampling`."""
    seeded: bool = False
    """Whether the client chose the seed."""
    max_tokens: int | None = None
    """None: as many as there is room for."""
    top_logprobs: int = 0
    routed_experts: bool = False
    """Whether the reply says which experts its tokens were routed to."""
    salt: str = ""
    """Only calls with the same one share KV."""
    priority: int = 0
    """Among requests that wait in an engine, higher goes first."""
    requires: Requirement | None = None
    """Versions that may answer it; None: what its program requires."""

    def times(self, count: int) -> tuple["Ask", ...]:
        """So many choices.  Each has its own seed, as the noise depends on nothing else."""
        first = self.sampling.seed
        seeds = [(first + index) % 2**31 for index in range(count)]
        return tuple(
            replace(self, sampling=self.sampling.model_copy(update={"seed": seed})) for seed in seeds
        )


class Standing(StrEnum):
    """How a call stands to what its program has said before."""

    BEGUN = "begun"
    EXTENDED = "extended"
    """It goes on token by token."""
    BRANCHED = "branched"
    """Its history was rewritten: the record has one more sequence."""
    REPEATED = "repeated"
    """The reply to the same call, once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What came of an Ask."""

    reply: GenerateReply
    turn: Turn | None
    """The reply as a message; None when tokens were given."""
    prompt_token_ids: tuple[int, ...]
    standing: Standing
    waited_s: dict[str, float] = field(default_factory=dict[str, float])
    """For the scheduler, by reason."""

    @property
    def version(self) -> Version | None:
        """The oldest that sampled a token of it."""
        return min((Version.parse(span.version) for span in self.reply.versions), default=None)


class Refused(SostenutoError):  # noqa: N818 - reads as the fact it states
    """The request is at fault, or cannot be served now.  Each dialect has its own form for it."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        field: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """`field`: the key of the body that is wrong.  `code`: a word for programs."""
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code
        self.retry_after_s = retry_after_s
