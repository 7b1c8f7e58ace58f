"""The tokens of one program's contexts, in the order in which they were fed and sampled.

Invariants:
- `token_ids` is what was sent to and returned by the engine, in order; the spans of the last sequence
  concatenate to it.  Adding costs what is added.
- A sampled token is masked in exactly one sequence.  A history that is rewritten closes the sequence as it
  is; the next one begins with a prompt in which nothing is trained.
"""

from collections.abc import Iterable

import numpy as np

from sostenuto.errors import EngineError
from sostenuto.records import Experts, Producer, Sequence, Span, VersionSpan
from sostenuto.runtime.engines.wire import GenerateReply
from sostenuto.runtime.rendering.experts import ExpertLog
from sostenuto.runtime.rendering.renderer import Piece
from sostenuto.types import Version


class Tape:
    """Its owner is the only writer."""

    def __init__(self) -> None:
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
    def branches(self) -> int:
        """How often the history was rewritten."""
        return len(self._closed)

    @property
    def routed_tokens(self) -> int:
        """How many tokens of the current sequence have recorded experts."""
        return self._experts.tokens

    def sequences(self) -> tuple[Sequence, ...]:
        """Every branch, the current one last, as it stands."""
        return (*self._closed, tuple(self._spans))

    def seen_sequences(self) -> tuple[Sequence, ...]:
        """For the Trajectory: every branch, without the spans at its end that no engine was sent."""
        seen = tuple(self._spans[: self._seen_spans])
        return (*self._closed, seen) if seen else tuple(self._closed)

    def seen_experts(self) -> tuple[Experts | None, ...]:
        """For the Trajectory: those of each of `seen_sequences`."""
        return self._experts.sequences(len(self.seen_sequences()))

    def feed(self, pieces: Iterable[Piece], *, at_s: float) -> None:
        """Add what nobody sampled."""
        for producer, token_ids in pieces:
            self._spans.append(Span.fed(producer, token_ids, at_s=at_s))
            self._token_ids += token_ids

    def sent(self) -> None:
        """Take note that the whole context goes to an engine now."""
        self._seen_spans = len(self._spans)

    def sampled(self, reply: GenerateReply, *, started_s: float, ended_s: float) -> None:
        """Add what the engine returned, every token of it; EngineError when its parts disagree."""
        if reply.token_ids:
            self._spans.append(_policy_span(reply, started_s, ended_s))
        if reply.routed_experts is not None:
            self._experts.add(reply.routed_experts, context=len(self._token_ids) + len(reply.token_ids))
        self._seen_spans = len(self._spans)
        self._token_ids += reply.token_ids
        self.generated_tokens += len(reply.token_ids)

    def close(self) -> None:
        """The history is rewritten: what is fed next begins a sequence.

        What no engine has seen of the old one never was in a context.
        """
        seen = tuple(self._spans[: self._seen_spans])
        if seen:
            self._closed.append(seen)
            self._experts.close()
        self._spans, self._token_ids, self._seen_spans = [], [], 0


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
