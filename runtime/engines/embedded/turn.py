"""One request in the engine, from submission to its one answer.

- `tokens[:length]` is the context with what was sampled; `tokens[:computed]` has its KV in the row.
- The KV of the last sampled token is computed by the step that samples the next one, so a finished turn
  has KV for length - 1 tokens, and the next turn's suffix begins with that token.
- A request that lost its row (no room, new weights) computes `tokens[:length]` again; what it sampled
  stays, and `cached_tokens + prefilled_tokens` remains the length of the request's context.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from sostenuto.runtime.engines.embedded.lanes import Lane
from sostenuto.runtime.engines.embedded.lora import Adapter
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.rows import Drawn, Row, TopLogprobs
from sostenuto.runtime.engines.embedded.speculation.acceptance import Acceptance
from sostenuto.runtime.engines.wire import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    RoutedExperts,
    WireSpan,
    WireVersionSpan,
)
from sostenuto.types import Version

if TYPE_CHECKING:
    # The library behind it is optional.
    from sostenuto.runtime.engines.embedded.grammar.guide import Guide

Ids = NDArray[np.int32]

KvTags = tuple[tuple[Version, int], ...]
"""Which version computed the KV from which token on; the first entry is the oldest."""


def tagged(tags: KvTags, version: Version, start: int) -> KvTags:
    """`tags` with `version` from `start` on."""
    return tags if tags and tags[-1][0] == version else (*tags, (version, start))


def cut(tags: KvTags, tokens: int) -> KvTags:
    """The tags of the first `tokens` tokens."""
    return tuple(tag for tag in tags if tag[1] < tokens)


def common_prefix(one: Ids, other: Ids) -> int:
    """How many leading tokens are equal."""
    shorter = min(len(one), len(other))
    if not shorter:
        return 0
    differs = one[:shorter] != other[:shorter]
    first = int(differs.argmax())
    return first if differs[first] else shorter


class StopStrings:
    """Watches the text of the sampled tokens; nothing is ever cut from the tokens."""

    def __init__(self, tokenizer: Tokenizer, strings: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._strings = strings
        self._stream = DecodeStream(skip_special_tokens=False)
        self._longest = max(map(len, strings))
        self._tail = ""

    def matched(self, token: int) -> str | None:
        """The stop string that `token` completes; the first in the request's order when several."""
        piece: str | None = self._stream.step(self._tokenizer, token)
        if piece is None:  # in the middle of a character
            return None
        text = self._tail + piece
        self._tail = text[1 - self._longest :] if self._longest > 1 else ""
        return next((string for string in self._strings if string in text), None)


Ending = tuple[FinishReason, int | str | None]
"""Why a turn is over, and what its last tokens matched."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of the tokens that one step drew for a request."""

    taken: int
    tested: int
    """Guesses up to the first wrong one, with it."""
    accepted: int
    ending: Ending | None


@dataclass(slots=True, eq=False)
class Turn:
    """The engine thread alone changes it."""

    request: GenerateRequest
    answer: Callable[[GenerateReply | Refusal], None]
    tokens: Ids
    """As long as it can become; `length` are there."""
    length: int
    matcher: StopStrings | None
    submitted_s: float
    hold: bool
    order: int
    """Of its submission."""
    stop_ids: frozenset[int]
    guide: "Guide | None" = None
    """Where it is in its grammar."""
    lane: Lane | None = None
    row: int = -1
    computed: int = 0
    tags: KvTags = ()
    drafted: int = 0
    """Guesses at tokens[length:] that the next pass verifies; 0 between steps."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    cached_tokens: int | None = None
    logprobs: list[float] = field(default_factory=list[float])
    top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    version_starts: list[tuple[Version, int]] = field(default_factory=list[tuple[Version, int]])
    admitted_s: float | None = None
    first_token_s: float | None = None
    pause_s: float = 0.0
    routed_experts: RoutedExperts | None = None
    adapter: Adapter | None = None
    """What it is sampled with, to its end."""

    @property
    def place(self) -> tuple[int, int]:
        """Among those that wait, the least goes first."""
        return -self.request.priority, self.order

    @property
    def is_started(self) -> bool:
        """Whether it has had a row."""
        return self.admitted_s is not None

    @property
    def context(self) -> Ids:
        return self.tokens[: self.length]

    @property
    def decodes(self) -> bool:
        """Whether all but its last token have their KV in its row."""
        return self.lane is not None and self.row < self.lane.decoding

    @property
    def verifiable(self) -> bool:
        """Whether several tokens can be drawn at once: what a grammar allows is known for one alone."""
        return self.request.sampling.grammar is None

    @property
    def rows(self) -> list[Row]:
        """How the token after its context, and after each guess behind it, is drawn."""
        return [self.row_at(end) for end in range(self.length, self.length + self.drafted + 1)]

    def row_at(self, position: int) -> Row:
        """How the token at `position` is drawn."""
        allowed = None if self.guide is None else self.guide.allowed
        return Row(self.request.sampling, self.tokens[:position], len(self.request.token_ids), allowed)

    @property
    def remaining(self) -> int:
        """Tokens that it may still sample."""
        return len(self.tokens) - self.length

    @property
    def generated(self) -> int:
        return self.length - len(self.request.token_ids)

    def append(self, drawn: Drawn, version: Version) -> None:
        """Take one sampled token."""
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, self.generated))
        self.tokens[self.length] = drawn.token
        self.length += 1
        self.logprobs.append(drawn.logprob)
        if self.request.top_logprobs:
            self.top_logprobs.append(drawn.top)
        if self.guide is not None:
            self.guide.take(drawn.token)

    def take(self, drawn: Sequence[Drawn], version: Version) -> Verified:
        """Take tokens that were drawn at `length` and after each guess.

        They are those of the context as it is now while they equal the guesses; the first other one is
        the last of them.
        """
        guesses = self.tokens[self.length : self.length + self.drafted].tolist()
        self.drafted, accepted = 0, 0
        for taken, one in enumerate(drawn, 1):
            self.append(one, version)
            right = taken <= len(guesses) and one.token == guesses[taken - 1]
            accepted += right
            if (ending := self.ending()) is not None or not right:
                return Verified(taken, min(taken, len(guesses)), accepted, ending)
            self.computed += 1  # the pass fed the guess that this token is
        raise AssertionError("one more token is drawn than guessed")

    def ending(self) -> Ending | None:
        """Whether the token that was just appended ends the turn, and what it matched."""
        token = int(self.tokens[self.length - 1])
        if token in self.stop_ids:
            return FinishReason.STOP, token
        if self.guide is not None and (self.guide.is_over or self.guide.problem is not None):
            return FinishReason.STOP, None
        if self.matcher is not None and (string := self.matcher.matched(token)) is not None:
            return FinishReason.STOP, string
        return None if self.remaining else (FinishReason.LENGTH, None)

    def outcome(
        self, reason: FinishReason, matched: int | str | None, *, now_s: float
    ) -> GenerateReply | Refusal:
        """What the request is answered with when it ends at `now_s`."""
        if self.guide is not None and self.guide.problem is not None:
            message = f"sampling.grammar: after {self.generated} tokens: {self.guide.problem}"
            return Refusal(400, "grammar", message, "make the grammar simpler, or leave it out")
        return self._reply(reason, matched, now_s)

    def _reply(self, reason: FinishReason, matched: int | str | None, now_s: float) -> GenerateReply:
        admitted_s = now_s if self.admitted_s is None else self.admitted_s
        first_token_s = now_s if self.first_token_s is None else self.first_token_s
        cached = self.cached_tokens or 0
        return GenerateReply(
            token_ids=self.tokens[len(self.request.token_ids) : self.length].tolist(),
            logprobs=self.logprobs,
            versions=self._version_spans(),
            finish_reason=reason,
            matched=matched,
            cached_tokens=cached,
            prefilled_tokens=len(self.request.token_ids) - cached,
            queue_s=admitted_s - self.submitted_s,
            prefill_s=first_token_s - admitted_s,
            decode_s=now_s - first_token_s,
            pause_s=self.pause_s,
            top_logprobs=self.top_logprobs if self.request.top_logprobs else None,
            routed_experts=self.routed_experts,
        )

    def spans_since(self, start: int) -> list[WireSpan]:
        """What was sampled from place `start` on.  Any thread may ask: what is there does not change."""
        end, first = len(self.logprobs), len(self.request.token_ids)
        starts = [*self.version_starts]
        ends = [*(begin for _, begin in starts[1:]), end]
        parts = [
            (version, max(start, begin), min(end, stop))
            for (version, begin), stop in zip(starts, ends, strict=True)
        ]
        return [
            WireSpan(
                token_ids=self.tokens[first + begin : first + stop].tolist(),
                logprobs=self.logprobs[begin:stop],
                version=str(version),
            )
            for version, begin, stop in parts
            if begin < stop
        ]

    def _version_spans(self) -> list[WireVersionSpan]:
        edges = [*(start for _, start in self.version_starts), self.generated]
        return [
            WireVersionSpan(version=str(version), start=start, end=end)
            for (version, start), end in zip(self.version_starts, edges[1:], strict=True)
        ]
