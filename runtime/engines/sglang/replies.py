"""Reading what `/generate` answers.  Nothing in it is taken on trust: counts, ids and versions must agree.

`meta_info.weight_version` is the version of the last span alone: each token's own is in `weight_versions`.
"""

import base64
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.sglang.bodies import is_truncated, routed_from
from sostenuto.runtime.engines.wire import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    RoutedExperts,
    ScoreReply,
    ScoreRequest,
    WireVersionSpan,
)

Entry = tuple[float | None, int, str | None]
"""Log-probability, token, its text."""


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Finish(_Said):
    type: Literal["stop", "length", "abort"]
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class MetaInfo(_Said):
    id: str
    finish_reason: Finish | None = None
    prompt_tokens: int | None = None
    """Missing where a request was aborted in the queue."""
    cached_tokens: int = 0
    weight_version: str = ""
    """Of the last tokens."""
    weight_versions: list[WireVersionSpan] = Field(default_factory=list[WireVersionSpan])
    e2e_latency: float = 0.0
    queue_time: float = 0.0
    first_token_latency: float = 0.0
    input_token_logprobs: list[Entry] | None = None
    input_top_logprobs: list[list[Entry] | None] | None = None
    output_token_logprobs: list[Entry] = Field(default_factory=list[Entry])
    output_top_logprobs: list[list[Entry] | None] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | list[list[float]] | None = None
    routed_experts: str | None = None


class StreamError(_Said):
    message: str


class Generated(_Said):
    """One answer, or one event of a stream."""

    output_ids: list[int]
    meta_info: MetaInfo


class Event(_Said):
    """One event of a stream: either of the two."""

    error: StreamError | None = None
    output_ids: list[int] | None = None
    meta_info: MetaInfo | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer is checked against."""

    where: str
    """Engine and call, for errors."""
    rid: str
    request: GenerateRequest
    experts_a_token: int
    pause_s: float = 0.0
    """How long the engine stood still meanwhile."""


def generate_reply(answer: Generated, asked: Asked) -> GenerateReply:
    """The answer in the protocol's words.

    EngineError when it belongs to another request, when its parts do not agree, or when the engine
    aborted the request with an error of its own.
    """
    said, finish = answer.meta_info, _finish(answer.meta_info, asked)
    _check_prompt(said, asked)
    queue_s = max(said.queue_time, 0.0)
    first_s = max(said.first_token_latency - queue_s, 0.0)
    cached = min(said.cached_tokens, len(asked.request.token_ids))
    return GenerateReply(
        token_ids=answer.output_ids,
        logprobs=logprobs(answer, asked),
        versions=versions(answer, asked),
        finish_reason=FinishReason(finish.type),
        matched=finish.matched[-1] if isinstance(finish.matched, list) else finish.matched,
        cached_tokens=cached,
        prefilled_tokens=0 if said.prompt_tokens is None else said.prompt_tokens - cached,
        queue_s=queue_s,
        prefill_s=first_s,
        decode_s=max(said.e2e_latency - queue_s - first_s - asked.pause_s, 0.0),
        pause_s=asked.pause_s,
        top_logprobs=_top(answer, asked) if asked.request.top_logprobs else None,
        routed_experts=_experts(answer, asked) if asked.request.routed_experts else None,
    )


def versions(answer: Generated, asked: Asked) -> list[WireVersionSpan]:
    """Of the tokens, covering all of them."""
    spans = [span for span in answer.meta_info.weight_versions if span.end > span.start]
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != len(answer.output_ids):
        raise _nonsense(asked, f"weight_versions {spans} do not cover {len(answer.output_ids)} tokens")
    return spans


def logprobs(answer: Generated, asked: Asked) -> list[float]:
    """Of the sampled tokens, each of the distribution that it was drawn from."""
    entries = answer.meta_info.output_token_logprobs
    if [token for _, token, _ in entries] != answer.output_ids:
        raise _nonsense(asked, f"{len(entries)} log-probabilities are not those of output_ids")
    if not is_truncated(asked.request.sampling):
        return [_number(value, asked) for value, _, _ in entries]
    selected = answer.meta_info.output_token_sampling_logprobs or []
    if len(selected) != len(answer.output_ids):
        raise _nonsense(asked, "output_token_sampling_logprobs are not those of output_ids")
    return [
        _number(_of(kept, i, token, answer, asked) if isinstance(kept, list) else kept, asked)
        for i, (token, kept) in enumerate(zip(answer.output_ids, selected, strict=True))
    ]


def score_reply(answer: Generated, asked: ScoreRequest, where: str) -> ScoreReply:
    """Log-probabilities of `token_ids[start:]`; the entry of the token before them is left out."""
    said = answer.meta_info
    entries = (said.input_token_logprobs or [])[1:]
    if [token for _, token, _ in entries] != asked.token_ids[asked.start :]:
        raise EngineError(f"{where}: input_token_logprobs are not those of token_ids; {_IS_IT_KNOWN}")
    if not said.weight_versions:
        raise EngineError(f"{where}: no weight_versions; {_IS_IT_KNOWN}")
    top = (said.input_top_logprobs or [])[1:]
    if asked.top_logprobs and len(top) != len(entries):
        raise EngineError(f"{where}: input_top_logprobs are not those of token_ids; {_IS_IT_KNOWN}")
    return ScoreReply(
        logprobs=[value if value is not None else float("nan") for value, _, _ in entries],
        version=said.weight_versions[-1].version,
        top_logprobs=[_pairs(row) for row in top] if asked.top_logprobs else None,
    )


_IS_IT_KNOWN = "is its version one that the adapter knows?"


def _finish(said: MetaInfo, asked: Asked) -> Finish:
    if said.id != asked.rid:
        raise _nonsense(asked, f"the answer is that of {said.id}, not of {asked.rid}")
    finish = said.finish_reason
    if finish is None:
        raise _nonsense(asked, "the answer says of no end")
    if finish.type == "abort" and finish.status_code is not None and finish.status_code >= 400:
        raise EngineError(
            f"{asked.where}: the engine gave the request up ({finish.status_code}): {finish.message}"
        )
    return finish


def _check_prompt(said: MetaInfo, asked: Asked) -> None:
    """A server with --allow-auto-truncate cuts prompts without a word."""
    tokens = len(asked.request.token_ids)
    if said.prompt_tokens is not None and said.prompt_tokens != tokens:
        raise _nonsense(asked, f"{said.prompt_tokens} of {tokens} prompt tokens were used")


def _of(kept: list[float], i: int, token: int, answer: Generated, asked: Asked) -> float | None:
    """The log-probability of the token among those of the support at position i."""
    return dict(zip(_support(answer, i, asked), kept, strict=False)).get(token)


def _support(answer: Generated, i: int, asked: Asked) -> list[int]:
    masks = answer.meta_info.output_token_sampling_mask or []
    if len(masks) != len(answer.output_ids):
        raise _nonsense(asked, "output_token_sampling_mask is not that of output_ids")
    return masks[i]


def _top(answer: Generated, asked: Asked) -> list[list[tuple[int, float]]]:
    """Of what could be drawn, the most probable first."""
    limit = asked.request.top_logprobs
    if is_truncated(asked.request.sampling):
        rows = answer.meta_info.output_token_sampling_logprobs or []
        pairs = [
            list(zip(_support(answer, i, asked), row, strict=True))
            for i, row in enumerate(rows)
            if isinstance(row, list)
        ]
        return [sorted(row, key=lambda pair: -pair[1])[:limit] for row in pairs]
    rows = answer.meta_info.output_top_logprobs or []
    if len(rows) != len(answer.output_ids):
        raise _nonsense(asked, "output_top_logprobs are not those of output_ids")
    return [_pairs(row)[:limit] for row in rows]


def _pairs(row: list[Entry] | None) -> list[tuple[int, float]]:
    return [(token, value) for value, token, _ in row or [] if value is not None]


def _experts(answer: Generated, asked: Asked) -> RoutedExperts | None:
    """From base64 of int32 in (tokens, layers, experts a token); None where nothing was computed."""
    encoded, start = answer.meta_info.routed_experts, routed_from(asked.request)
    if encoded is None and not answer.output_ids:
        return None
    tokens = max(len(asked.request.token_ids) + len(answer.output_ids) - 1 - start, 0)
    try:
        raw = base64.b64decode(encoded or "", validate=True)
        numbers = np.frombuffer(raw, dtype="<i4").reshape(tokens, -1, asked.experts_a_token)
    except ValueError as error:
        raise _nonsense(asked, f"routed_experts of {tokens} tokens: {error}") from error
    return RoutedExperts(
        start=start,
        shape=(numbers.shape[0], numbers.shape[1], numbers.shape[2]),
        data=base64.b64encode(numbers.astype("<i2").tobytes()).decode(),
    )


def _number(value: float | None, asked: Asked) -> float:
    if value is None:
        raise _nonsense(asked, "a sampled token has no log-probability")
    return value


def _nonsense(asked: Asked, what: str) -> EngineError:
    return EngineError(f"{asked.where}: {what}; {_IS_IT_KNOWN}")
