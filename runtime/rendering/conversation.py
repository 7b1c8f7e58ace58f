"""The record of one program in the making: its messages, and its context as token ids.

Invariants:
- `token_ids` is what was sent to and returned by the engine, in order; the spans of the last sequence
  concatenate to it.  Adding costs what is added.
- A sampled token is masked in exactly one sequence.  When the template rewrites the history, the sequence
  is closed as it is and the next one begins with a prompt in which nothing is trained.
"""

import numpy as np

from sostenuto.errors import EngineError
from sostenuto.records import Experts, Producer, Sequence, Span, VersionSpan
from sostenuto.runtime.engines.wire import FinishReason, GenerateReply
from sostenuto.runtime.rendering.experts import ExpertLog
from sostenuto.runtime.rendering.renderer import Piece, Renderer, Turn
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Message, Version


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
        self._token_ids: list[int] = []
        self._spans: list[Span] = []
        self._closed: list[Sequence] = []
        self._seen_spans = 0
        """Of the current sequence: what an engine was sent or has returned."""
        self._experts = ExpertLog()
        self.generated_tokens = 0

    @property
    def token_ids(self) -> list[int]:
        """The whole current context; not to be changed by the caller."""
        return self._token_ids

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, the turn that was sampled last included."""
        return (*self._settled, *([self._turn.message] if self._turn else []))

    @property
    def branches(self) -> int:
        """How often the history was rewritten."""
        return len(self._closed)

    def sequences(self) -> tuple[Sequence, ...]:
        """Every branch, the current one last, as it stands."""
        return (*self._closed, tuple(self._spans))

    def seen_sequences(self) -> tuple[Sequence, ...]:
        """For the Trajectory: every branch, without the spans at its end that no engine was sent."""
        seen = tuple(self._spans[: self._seen_spans])
        return (*self._closed, seen) if seen else tuple(self._closed)

    @property
    def routed_tokens(self) -> int:
        """How many tokens of the current sequence have recorded experts."""
        return self._experts.tokens

    def seen_experts(self) -> tuple[Experts | None, ...]:
        """For the Trajectory: those of each of `seen_sequences`."""
        return self._experts.sequences(len(self.seen_sequences()))

    def begin(
        self, messages: tuple[Message, ...], tools: tuple[ToolSchema, ...] = (), *, at_s: float = 0.0
    ) -> None:
        """Render the first prompt; ConfigError when the template refuses it."""
        if self._settled:
            raise ValueError("this conversation has begun already")
        pieces = self._renderer.start(messages, tools)
        self._settled, self._tools = list(messages), tools
        self._feed(pieces, at_s)

    def sent(self) -> None:
        """Take note that the whole context goes to an engine now."""
        self._seen_spans = len(self._spans)

    def sampled(self, reply: GenerateReply, *, started_s: float, ended_s: float) -> Turn:
        """Take in what the engine returned, every token of it; EngineError when its parts disagree."""
        if reply.token_ids:
            self._spans.append(_policy_span(reply, started_s, ended_s))
        if reply.routed_experts is not None:
            self._experts.add(reply.routed_experts, context=len(self._token_ids) + len(reply.token_ids))
        self._seen_spans = len(self._spans)
        self._turn_ids += reply.token_ids
        self._token_ids += reply.token_ids
        self.generated_tokens += len(reply.token_ids)
        finished = reply.finish_reason is FinishReason.STOP
        self._turn = self._renderer.parse(self._turn_ids, finished=finished, tools=self._tools)
        return self._turn

    def observe(self, new: tuple[Message, ...], *, at_s: float = 0.0) -> None:
        """Go on with `new` messages after the sampled turn."""
        if self._turn is None:
            raise ValueError("nothing was sampled since the last observation")
        extension = self._renderer.extend(
            self._settled,
            self._turn.message,
            self._turn_ids,
            context_ids=self._token_ids,
            new=new,
            tools=self._tools,
        )
        if extension.rewritten:
            self._closed.append(tuple(self._spans))
            self._spans, self._token_ids, self._seen_spans = [], [], 0
            self._experts.close()
        self._settled += (self._turn.message, *new)
        self._turn, self._turn_ids = None, []
        self._feed(extension.pieces, at_s)

    def _feed(self, pieces: tuple[Piece, ...] | list[Piece], at_s: float) -> None:
        for producer, token_ids in pieces:
            self._spans.append(Span.fed(producer, token_ids, at_s=at_s))
            self._token_ids += token_ids


def _policy_span(reply: GenerateReply, started_s: float, ended_s: float) -> Span:
    """Sampled tokens, all of them trained, a sampled terminator included."""
    if len(reply.logprobs) != len(reply.token_ids):
        raise EngineError(
            f"the engine returned {len(reply.token_ids)} tokens and {len(reply.logprobs)} log-probabilities"
        )
    versions = tuple(VersionSpan(Version.parse(v.version), v.start, v.end) for v in reply.versions)
    if sum(v.end - v.start for v in versions) != len(reply.token_ids):
        raise EngineError("the versions that the engine returned do not cover its tokens")
    return Span(
        producer=Producer.POLICY,
        token_ids=np.asarray(reply.token_ids, dtype=np.int32),
        logprobs=np.asarray(reply.logprobs, dtype=np.float32),
        mask=np.ones(len(reply.token_ids), dtype=np.bool_),
        versions=versions,
        started_s=started_s,
        ended_s=ended_s,
    )
