"""What turns conversations into tokens and back.

Invariants of every renderer:
- What `extend` returns as a suffix continues the context token by token; nothing sampled is encoded again.
- A text of a message never becomes a control token, whoever wrote it.
- `parse` does not raise for anything a policy can sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sostenuto.records import Producer
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Message


class Piece(NamedTuple):
    """Tokens with one producer.

    The template renderer cuts where a message's content begins and ends (a token over the cut belongs to
    where it begins); a family renderer of the `renderers` library cuts per message, markers included.
    """

    producer: Producer
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy.  With a `problem`, a text for the policy, none of its calls may run."""

    message: Message
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Extension:
    """How a conversation goes on.

    Not `rewritten`: `pieces` follow the tokens so far.  `rewritten`: the template changes what was
    there before, and `pieces` are the whole new prompt.
    """

    pieces: tuple[Piece, ...]
    rewritten: bool = False

    @property
    def token_ids(self) -> list[int]:
        return [id_ for piece in self.pieces for id_ in piece.token_ids]


class Renderer(Protocol):
    """Renders for one model.  Stateless; shared by all programs."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        ...

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        """The prompt up to where the policy begins; ConfigError when the template refuses the messages."""
        ...

    def parse(self, token_ids: Sequence[int], *, finished: bool, tools: Sequence[ToolSchema] = ()) -> Turn:
        """Read a sampled turn; `finished` when the policy ended it rather than a limit."""
        ...

    def extend(
        self,
        before: Sequence[Message],
        turn: Message,
        sampled_ids: Sequence[int],
        *,
        context_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> Extension:
        """Go on after `turn`, sampled as `sampled_ids`, with `new` messages.

        `context_ids` is everything before and including the sampled tokens.  A terminator that the policy
        did not sample (length, stop string) is part of the suffix.
        """
        ...

    def write(self, before: Sequence[Message], turn: Message, tools: Sequence[ToolSchema]) -> list[int]:
        """`turn` as the policy would sample it after `start(before)`, its terminator included."""
        ...
