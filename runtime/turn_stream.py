"""A program's turn, also when it is interrupted or its engine is lost half way; for whoever reads it, too.

What an interrupted request has sampled is kept, and what was told stays told: on the next engine the turn
goes on behind it with what is left of its budget, so nobody is told a token twice, and the record has it as
a turn in parts.  A turn that does not come to an end is in no record.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from sostenuto.errors import EngineError, VersionRefused
from sostenuto.runtime.engines.wire import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Spans,
    WireSpan,
    WireVersionSpan,
)
from sostenuto.scheduler.actions import Unserved
from sostenuto.scheduler.requirements import Requirement
from sostenuto.types import EngineId

TurnSpans = Callable[[int, WireSpan], None]
"""Called with the number of a turn, from 0, and tokens of it as they come."""


class Generate(Protocol):
    """Samples a turn on an engine; None: the engine was lost."""

    async def __call__(
        self, engine_id: EngineId, request: GenerateRequest, spans: Spans | None = None, /
    ) -> GenerateReply | None: ...


_REFUSALS = 8
"""So often in a row a turn may be refused for its version; then nobody knows what the engines serve."""


class TurnStream:
    """Of one program.  `spans` is called with tokens as they come."""

    def __init__(self, spans: TurnSpans | None, now_s: Callable[[], float]) -> None:
        self._spans = spans
        self._now_s = now_s
        self._turn = 0
        self._kept: list[GenerateReply] = []
        """What the turn under way has from engines that did not end it."""
        self._told: list[tuple[float, WireSpan]] = []
        """What the engine that samples now has told of it, and when."""
        self._refusals = 0
        self.interrupted: int | None = None
        """Tokens of a turn that was not ended by an engine which is still there; None: there is none."""

    async def sampled(
        self, engine_id: EngineId, request: GenerateRequest, generate: Generate
    ) -> list[GenerateReply]:
        """A turn from its context, in a part for each engine; empty when it has to go on elsewhere.

        That is when the last engine was lost, or `interrupted` says that it was not.  EngineError when it has
        to go on in the middle of a turn that its tokens alone do not let go on.
        """
        self.interrupted = None
        tokens = [token for part in self._kept for token in part.token_ids]
        tell = self._tell if self._spans else None
        try:
            reply = _owed(request, tokens) or await generate(engine_id, _rest(request, tokens), tell)
        except VersionRefused:
            self._refusals += 1
            if self._refusals >= _REFUSALS or self._told:
                raise
            self.interrupted = len(tokens)
            return []
        self._refusals = 0
        told, self._told = self._told, []
        if reply is None:
            self._keep(request, told)
            return []
        if reply.finish_reason is FinishReason.ABORT:
            self._interrupt(request, reply, told)
            self.interrupted = sum(len(part.token_ids) for part in self._kept)
            return []
        parts, self._kept = [*self._kept, reply], []
        self._turn += 1
        return parts

    def _interrupt(
        self, request: GenerateRequest, reply: GenerateReply, told: list[tuple[float, WireSpan]]
    ) -> None:
        if not reply.token_ids:
            return
        if not _ties(request):
            # What comes behind it is told of all experts, from the beginning.
            self._kept.append(reply.model_copy(update={"routed_experts": None}))
        else:
            # Nobody has seen the tokens, and the turn begins anew.
            self._keep(request, told)

    def _keep(self, request: GenerateRequest, told: list[tuple[float, WireSpan]]) -> None:
        if not told:
            return
        if field := _ties(request):
            raise EngineError(
                f"the engine was lost or updated in the middle of a turn, and with {field} it cannot go on "
                "elsewhere: send it again, or do not stream it"
            )
        self._kept.append(_part(told))

    def _tell(self, span: WireSpan) -> None:
        assert self._spans is not None
        self._told.append((self._now_s(), span))
        self._spans(self._turn, span)


def joined(parts: Sequence[GenerateReply]) -> GenerateReply:
    """A turn in parts as one reply."""
    if len(parts) == 1:
        return parts[0]
    versions: list[WireVersionSpan] = []
    start = 0
    for part in parts:
        for span in part.versions:
            moved = {"start": start + span.start, "end": start + span.end}
            versions.append(span.model_copy(update=moved))
        start += len(part.token_ids)
    changes = {
        "token_ids": [token for part in parts for token in part.token_ids],
        "logprobs": [value for part in parts for value in part.logprobs],
        "versions": versions,
        "cached_tokens": parts[0].cached_tokens,
        "prefilled_tokens": sum(part.prefilled_tokens for part in parts),
        "decode_s": sum(part.decode_s for part in parts),
        # What an engine tells of experts is of its own part, from the beginning of the context.
        "routed_experts": parts[-1].routed_experts,
    }
    return parts[-1].model_copy(update=changes)


def versions_of(requires: Requirement) -> dict[str, str | None]:
    """The fields of a request for what the scheduler grants."""
    least = None if requires.least is None else str(requires.least)
    return {"exact_version": least} if requires.is_exact else {"min_version": least}


def unserved(told: Unserved) -> str:
    """Why no engine takes the program's next turn."""
    return (
        f"requires: {told.wanted} is served by no engine any more, {told.deployed} is deployed; submit it "
        "again, or require less"
    )


def _ties(request: GenerateRequest) -> str:
    """What makes a turn depend on where it began, or its reply on more than its tokens; empty: nothing."""
    sampling = request.sampling
    ties = {
        "sampling.stop_strings": bool(sampling.stop_strings),
        "sampling.grammar": sampling.grammar is not None,
        "sampling.presence_penalty": sampling.presence_penalty != 0,
        "sampling.frequency_penalty": sampling.frequency_penalty != 0,
        "top_logprobs": request.top_logprobs > 0,
    }
    return ", ".join(field for field, is_asked in ties.items() if is_asked)


def _rest(request: GenerateRequest, told: list[int]) -> GenerateRequest:
    """What is still to be sampled."""
    changes = {
        "token_ids": request.token_ids + told,
        "max_new_tokens": request.max_new_tokens - len(told),
    }
    return request.model_copy(update=changes) if told else request


def _owed(request: GenerateRequest, told: list[int]) -> GenerateReply | None:
    """The reply that a lost engine owed for a turn whose last token it had told; None for any other."""
    if told and told[-1] in request.sampling.stop_token_ids:
        return _reply([], FinishReason.STOP, matched=told[-1])
    return _reply([], FinishReason.LENGTH) if len(told) >= request.max_new_tokens else None


def _part(told: list[tuple[float, WireSpan]]) -> GenerateReply:
    """What an engine told before it was lost."""
    spans = [span for _, span in told]
    return _reply(spans, FinishReason.ABORT, decode_s=told[-1][0] - told[0][0])


def _reply(
    spans: list[WireSpan], reason: FinishReason, *, matched: int | None = None, decode_s: float = 0.0
) -> GenerateReply:
    ends = list(accumulate(len(span.token_ids) for span in spans))
    return GenerateReply(
        token_ids=[token for span in spans for token in span.token_ids],
        logprobs=[value for span in spans for value in span.logprobs],
        versions=[
            WireVersionSpan(version=span.version, start=end - len(span.token_ids), end=end)
            for span, end in zip(spans, ends, strict=True)
        ],
        finish_reason=reason,
        matched=matched,
        cached_tokens=0,
        prefilled_tokens=0,
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=decode_s,
    )
