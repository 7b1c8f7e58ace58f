"""What one lane of a program has said, by messages or by tokens, and how a call stands to it."""

from collections.abc import Sequence as Seq

from sostenuto.errors import ConfigError
from sostenuto.records import Experts, Producer, Sequence
from sostenuto.runtime.engines.wire import FinishReason, GenerateReply
from sostenuto.runtime.gateway.matching import Match, common, match
from sostenuto.runtime.gateway.turn import Ask, Refused, Standing
from sostenuto.runtime.rendering.conversation import Conversation
from sostenuto.runtime.rendering.renderer import Piece, Renderer, Turn
from sostenuto.runtime.rendering.tape import Tape


class MessageRecord:
    """Of a lane whose calls are lists of messages."""

    def __init__(self, renderer: Renderer) -> None:
        self._conversation = Conversation(renderer)

    @property
    def token_ids(self) -> list[int]:
        return self._conversation.token_ids

    def nearness(self, ask: Ask) -> tuple[int, int]:
        """(2: goes on, 1: rewrites, 0: is about something else; messages in common)."""
        if not ask.messages:
            return 0, 0
        shared = common(self._conversation.messages, ask.messages)
        if all(message.role == "system" for message in ask.messages[:shared]):
            # Agents of one kind have that in common, whatever they work on.
            return 0, 0
        return 1 if self._match(ask) is Match.DIFFERS else 2, shared

    def take(self, ask: Ask, *, at_s: float) -> Standing:
        """Bring the context to where `ask` goes on; Refused when the template refuses its messages."""
        known = self._conversation.messages
        matched = self._match(ask) if known else Match.DIFFERS
        try:
            if matched is Match.CONTINUES:
                branches = self._conversation.branches
                self._conversation.observe(ask.messages[len(known) :], at_s=at_s)
                return Standing.BRANCHED if self._conversation.branches > branches else Standing.EXTENDED
            if matched is Match.SAME:
                return Standing.EXTENDED
            self._conversation.rewrite(ask.messages, ask.tools, at_s=at_s)
        except ConfigError as error:
            raise Refused(str(error), field="messages") from error
        return Standing.BRANCHED if self._conversation.branches else Standing.BEGUN

    def sent(self) -> None:
        self._conversation.sent()

    def sampled(self, reply: GenerateReply, *, started_s: float, ended_s: float) -> Turn:
        """What the reply says; EngineError when its parts disagree."""
        return self._conversation.sampled(reply, started_s=started_s, ended_s=ended_s)

    def sequences(self) -> tuple[Sequence, ...]:
        return self._conversation.seen_sequences()

    def experts(self) -> tuple[Experts | None, ...]:
        return self._conversation.seen_experts()

    def _match(self, ask: Ask) -> Match:
        known = self._conversation
        return match(known.messages, known.tools, ask.messages, ask.tools, answered=known.has_sampled)


class TokenRecord:
    """Of a lane whose calls are token ids."""

    def __init__(self) -> None:
        self._tape = Tape()

    @property
    def token_ids(self) -> list[int]:
        return self._tape.token_ids

    def nearness(self, ask: Ask) -> tuple[int, int]:
        """As that of a MessageRecord, in tokens."""
        if not ask.token_ids:
            return 0, 0
        shared = _common(self.token_ids, ask.token_ids)
        if shared == len(self.token_ids):
            return 2, shared
        # Less is what prompts of one kind begin with.
        return (1 if 2 * shared >= len(self.token_ids) else 0), shared

    def take(self, ask: Ask, *, at_s: float) -> Standing:
        """Bring the context to `ask.token_ids`."""
        known, asked = self.token_ids, list(ask.token_ids)
        goes_on = bool(known) and asked[: len(known)] == known
        if known and not goes_on:
            self._tape.close()
        new = asked[len(known) :] if goes_on else asked
        if new:
            self._tape.feed([Piece(Producer.ENVIRONMENT if goes_on else Producer.USER, new)], at_s=at_s)
        if goes_on:
            return Standing.EXTENDED
        return Standing.BRANCHED if self._tape.branches else Standing.BEGUN

    def sent(self) -> None:
        self._tape.sent()

    def sampled(self, reply: GenerateReply, *, started_s: float, ended_s: float) -> None:
        """EngineError when the parts of the reply disagree."""
        self._tape.sampled(reply, started_s=started_s, ended_s=ended_s)

    def sequences(self) -> tuple[Sequence, ...]:
        return self._tape.seen_sequences()

    def experts(self) -> tuple[Experts | None, ...]:
        return self._tape.seen_experts()


LaneRecord = MessageRecord | TokenRecord


def record_for(ask: Ask, renderer: Renderer) -> LaneRecord:
    return TokenRecord() if ask.token_ids else MessageRecord(renderer)


def called(turn: Turn | None, reply: GenerateReply) -> tuple[str, ...]:
    """The tools that the client runs now; it may also have none to run, and answer itself."""
    if turn is None or turn.problem is not None or reply.finish_reason is not FinishReason.STOP:
        return ()
    return tuple(call.name for call in turn.message.tool_calls)


def _common(known: Seq[int], asked: Seq[int]) -> int:
    for index, (one, other) in enumerate(zip(known, asked, strict=False)):
        if one != other:
            return index
    return min(len(known), len(asked))
