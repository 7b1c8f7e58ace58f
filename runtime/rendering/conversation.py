"""The record of one program in the making: its messages, and its context as token ids (`tape.py`)."""

from collections.abc import Iterable
from dataclasses import replace

from sostenuto.records import Experts, Sequence
from sostenuto.runtime.engines.wire import FinishReason, GenerateReply
from sostenuto.runtime.rendering.renderer import Piece, Renderer, Turn
from sostenuto.runtime.rendering.tape import Tape
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Message


class Conversation:
    """One program's; its driver is the only writer.

    begin, then sampled and observe in turn.  Several `sampled` in a row are one turn in parts (an aborted
    generation that was taken up again).
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tools: tuple[ToolSchema, ...] = ()
        self._settled: list[Message] = []
        self._turn: Turn | None = None
        self._turn_ids: list[int] = []
        self._tape = Tape()

    @property
    def token_ids(self) -> list[int]:
        """The whole current context; not to be changed by the caller."""
        return self._tape.token_ids

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, the turn that was sampled last included."""
        return (*self._settled, *([self._turn.message] if self._turn else []))

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        """What the policy was told it can call."""
        return self._tools

    @property
    def has_sampled(self) -> bool:
        """Whether the last message is a turn of the policy."""
        return self._turn is not None

    @property
    def branches(self) -> int:
        """How often the history was rewritten."""
        return self._tape.branches

    @property
    def generated_tokens(self) -> int:
        return self._tape.generated_tokens

    def sequences(self) -> tuple[Sequence, ...]:
        """Every branch, the current one last, as it stands."""
        return self._tape.sequences()

    def seen_sequences(self) -> tuple[Sequence, ...]:
        """For the Trajectory: every branch, without the spans at its end that no engine was sent."""
        return self._tape.seen_sequences()

    @property
    def routed_tokens(self) -> int:
        """How many tokens of the current sequence have recorded experts."""
        return self._tape.routed_tokens

    def seen_experts(self) -> tuple[Experts | None, ...]:
        """For the Trajectory: those of each of `seen_sequences`."""
        return self._tape.seen_experts()

    def begin(
        self, messages: tuple[Message, ...], tools: tuple[ToolSchema, ...] = (), *, at_s: float = 0.0
    ) -> None:
        """Render the first prompt; ConfigError when the template refuses it."""
        if self._settled:
            raise ValueError("this conversation has begun already")
        self.rewrite(messages, tools, at_s=at_s)

    def go_on(self, pieces: Iterable[Piece], *, at_s: float = 0.0) -> None:
        """Begin with the tokens of somebody else's history, up to where a turn begins."""
        self._tape.feed(pieces, at_s=at_s)

    def rewrite(
        self, messages: tuple[Message, ...], tools: tuple[ToolSchema, ...] = (), *, at_s: float = 0.0
    ) -> None:
        """Go on with another history, whose own turns are context and nothing more; ConfigError as above."""
        pieces = self._renderer.start(messages, tools)
        self._tape.close()
        self._settled, self._tools = list(messages), tools
        self._turn, self._turn_ids = None, []
        self._tape.feed(pieces, at_s=at_s)

    def sent(self) -> None:
        """Take note that the whole context goes to an engine now."""
        self._tape.sent()

    def sampled(self, reply: GenerateReply, *, started_s: float, ended_s: float) -> Turn:
        """Take in what the engine returned, every token of it; EngineError when its parts disagree."""
        self._tape.sampled(reply, started_s=started_s, ended_s=ended_s)
        self._turn_ids += reply.token_ids
        finished = reply.finish_reason is FinishReason.STOP
        turn = self._renderer.parse(self._turn_ids, finished=finished, tools=self._tools)
        self._turn = _without_stop(turn, reply.matched) if isinstance(reply.matched, str) else turn
        return self._turn

    def observe(self, new: tuple[Message, ...], *, at_s: float = 0.0) -> None:
        """Go on with `new` messages after the sampled turn."""
        if self._turn is None:
            raise ValueError("nothing was sampled since the last observation")
        extension = self._renderer.extend(
            self._settled,
            self._turn.message,
            self._turn_ids,
            context_ids=self._tape.token_ids,
            new=new,
            tools=self._tools,
        )
        if extension.rewritten:
            self._tape.close()
        self._settled += (self._turn.message, *new)
        self._turn, self._turn_ids = None, []
        self._tape.feed(extension.pieces, at_s=at_s)


def _without_stop(turn: Turn, stop: str) -> Turn:
    """A stop string ends a turn, and is no part of what it says; its tokens stay in the context."""
    said = turn.message.content
    at = said.rfind(stop)
    return turn if at < 0 else replace(turn, message=replace(turn.message, content=said[:at].rstrip()))
