"""vLLM's answers in our words; what is not plausible is an EngineError.

- A reply is put together from events: tokens as they come, at the end why it ended, then the usage.
- A request that was aborted ends with status 200 and the tokens it has.
- A log-probability of -9999 stands for one that vLLM does not know.
"""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.http import Answer
from sostenuto.runtime.engines.telling import Telling
from sostenuto.runtime.engines.wire import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    RoutedExperts,
    ScoreReply,
    ScoreRequest,
    WireVersionSpan,
)
from sostenuto.types import Version

_UNKNOWN = -9000.0
_ROUNDING = 1e-5
_TOKEN_ID = "token_id:"

Top = list[tuple[int, float]]


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Logprob(_Said):
    logprob: float


class _Candidate(_Logprob):
    token_id: int


class _Sampled(_Candidate):
    top_logprobs: list[_Candidate] = []


class _Logprobs(_Said):
    """Of one route `content`, of the other the rest."""

    content: list[_Sampled] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Span(_Said):
    version: str
    start: int
    end: int


class _Choice(_Said):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None


class _CachedTokens(_Said):
    cached_tokens: int | None = None


class _Usage(_Said):
    prompt_tokens: int
    prompt_tokens_details: _CachedTokens | None = None


class _Error(_Said):
    message: str = "no reason given"


class Event(_Said):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class Scored(_Said):
    choices: list[_Choice] = Field(min_length=1)
    prompt_logprobs: list[dict[int, _Logprob] | None]


@dataclass(slots=True)
class Gathered:
    """One request's answer as it comes."""

    where: str
    request: GenerateRequest
    served: str
    """The version when it was sent: what is sampled is of this one or a newer."""
    telling: Telling | None
    sent_s: float
    first_s: float | None = None
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top: list[Top] = field(default_factory=list[Top])
    end: _Choice | None = None
    usage: _Usage | None = None
    experts: str | None = None

    def take(self, answer: Answer) -> None:
        """One event."""
        event = answer.read(Event)
        if event.error is not None:
            raise EngineError(f"{self.where}: {event.error.message}; look into the engine's log")
        self.usage = event.usage or self.usage
        for choice in event.choices:
            self._take(choice)

    def reply(self, label: Callable[[str], str], *, pause_s: float) -> GenerateReply:
        """`label`: the version that a label of the engine means."""
        if self.end is None:
            raise self._nonsense("it ended without saying why")
        now_s = anyio.current_time()
        first_s = now_s if self.first_s is None else self.first_s
        cached = self._cached()
        return GenerateReply(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self._versions(self.end, label),
            finish_reason=self._reason(self.end),
            matched=self._matched(self.end),
            cached_tokens=cached,
            prefilled_tokens=len(self.request.token_ids) - cached,
            queue_s=0.0,
            prefill_s=first_s - self.sent_s,
            decode_s=now_s - first_s,
            pause_s=pause_s,
            top_logprobs=self.top if self.request.top_logprobs else None,
            routed_experts=self._experts() if self.request.routed_experts else None,
        )

    def _take(self, choice: _Choice) -> None:
        tokens = choice.token_ids or []
        if tokens:
            self.first_s = anyio.current_time() if self.first_s is None else self.first_s
            logprobs, top = self._read(choice.logprobs, len(tokens))
            self.token_ids += tokens
            self.logprobs += logprobs
            self.top += top
            if self.telling is not None:
                self.telling.tell(tokens, logprobs)
        self.experts = choice.routed_experts or self.experts
        if choice.finish_reason is not None:
            self.end = choice

    def _read(self, said: _Logprobs | None, tokens: int) -> tuple[list[float], list[Top]]:
        if said is None:
            raise self._nonsense("tokens without log-probabilities")
        if said.content is not None:
            values = [entry.logprob for entry in said.content]
            top = [[(c.token_id, c.logprob) for c in entry.top_logprobs] for entry in said.content]
        else:
            values = [_UNKNOWN if value is None else value for value in said.token_logprobs or []]
            top = [_by_id(entry or {}) for entry in said.top_logprobs or [None] * len(values)]
        if len(values) != tokens or len(top) != tokens:
            raise self._nonsense(f"{tokens} tokens with {len(values)} log-probabilities")
        if wrong := [value for value in values if not _UNKNOWN < value <= _ROUNDING]:
            raise self._nonsense(f"{wrong[0]} as a log-probability")
        count = self.request.top_logprobs
        if count and not all(top):
            raise self._nonsense("a token without the most probable ones, which were asked for")
        return values, [sorted(entry, key=lambda c: -c[1])[:count] for entry in top]

    def _versions(self, end: _Choice, label: Callable[[str], str]) -> list[WireVersionSpan]:
        spans = [
            WireVersionSpan(version=label(span.version), start=span.start, end=span.end)
            for span in end.weight_versions or ()
        ]
        if not spans and self.token_ids:
            spans = [WireVersionSpan(version=self.served, start=0, end=len(self.token_ids))]
        edges = [0, *(span.end for span in spans)]
        if edges[-1] != len(self.token_ids) or [span.start for span in spans] != edges[:-1]:
            raise self._nonsense(f"versions that do not cover its {len(self.token_ids)} tokens")
        return spans

    def _reason(self, end: _Choice) -> FinishReason:
        try:
            return FinishReason(end.finish_reason or "")
        except ValueError:
            raise self._nonsense(f"the finish reason {end.finish_reason!r}") from None

    def _matched(self, end: _Choice) -> int | str | None:
        """vLLM names no token where a grammar ended with the model's own end of text."""
        if end.stop_reason is None and end.finish_reason == FinishReason.STOP and self.token_ids:
            return self.token_ids[-1]
        return end.stop_reason

    def _cached(self) -> int:
        details = self.usage.prompt_tokens_details if self.usage else None
        return (details.cached_tokens if details else None) or 0

    def _experts(self) -> RoutedExperts | None:
        """None for a request that was aborted before the model saw it."""
        if self.experts is None:
            return None
        try:
            file = io.BytesIO(base64.b64decode(self.experts, validate=True))
            routed = np.load(file, allow_pickle=False)
            tokens, layers, experts = routed.shape
        except ValueError as error:
            raise self._nonsense(f"routed experts that cannot be read ({error})") from error
        data = base64.b64encode(routed.astype("<i2").tobytes()).decode()
        return RoutedExperts(start=0, shape=(tokens, layers, experts), data=data)

    def _nonsense(self, what: str) -> EngineError:
        return EngineError(f"{self.where}: answered with {what}; is its version one that the adapter knows?")


def score_reply(
    scored: Scored, request: ScoreRequest, *, served: str, label: Callable[[str], str], where: str
) -> ScoreReply:
    """`served`: the version when it was sent."""
    said, tokens = scored.prompt_logprobs[request.start :], request.token_ids[request.start :]
    if len(scored.prompt_logprobs) != len(request.token_ids) or any(entry is None for entry in said):
        raise EngineError(
            f"{where}: {len(request.token_ids)} tokens with {len(scored.prompt_logprobs)} log-probabilities"
        )
    entries = [{token: value.logprob for token, value in (entry or {}).items()} for entry in said]
    if any(token not in entry for token, entry in zip(tokens, entries, strict=True)):
        raise EngineError(f"{where}: answered without the log-probability of a token that was sent")
    spans = scored.choices[0].weight_versions or ()
    versions = [served, *(label(span.version) for span in spans)]
    count = request.top_logprobs
    return ScoreReply(
        logprobs=[entry[token] for token, entry in zip(tokens, entries, strict=True)],
        version=min(versions, key=Version.parse),
        top_logprobs=[_best(entry, count) for entry in entries] if count else None,
    )


def _best(entry: dict[int, float], count: int) -> Top:
    return sorted(entry.items(), key=lambda candidate: -candidate[1])[:count]


def _by_id(entry: dict[str, float]) -> Top:
    return [(int(name.removeprefix(_TOKEN_ID)), value) for name, value in entry.items()]
