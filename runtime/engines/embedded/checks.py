"""What a request must be before it is queued; everything else is refused, by field."""

from collections.abc import Iterable
from dataclasses import dataclass

from sostenuto.runtime.engines.embedded.model import Model
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.turn import Turn
from sostenuto.runtime.engines.needs import missing, unmet
from sostenuto.runtime.engines.wire import Feature, GenerateRequest, ScoreRequest
from sostenuto.types import Version

_MOST_TOP_LOGPROBS = 1024
"""Replies stay of a size that a process can hold."""


@dataclass(frozen=True, slots=True)
class Checks:
    """Of one engine.  `limit_tokens`: of a context and one token to sample."""

    model: Model
    kv_tokens: int
    limit_tokens: int
    features: frozenset[Feature]

    def generate(self, request: GenerateRequest, served: Version, known: Iterable[Turn]) -> None:
        """Refuse what cannot be sampled by an engine at version `served` that has `known` requests."""
        self._features(request)
        _tokens(request.token_ids, below=self.model.vocabulary_size)
        if len(request.token_ids) >= self.limit_tokens:
            raise self._too_long("token_ids", len(request.token_ids))
        if any(not string for string in request.sampling.stop_strings):
            raise Refusal(400, "stop_strings", "stop_strings: one is empty", "leave it out")
        if request.sampling.grammar is not None and request.sampling.stop_strings:
            message = "stop_strings: they would cut a text before its grammar is complete"
            raise Refusal(400, "stop_strings", message, "leave them out, or the grammar")
        for field, text in (("min_version", request.min_version), ("exact_version", request.exact_version)):
            if text is not None:
                _readable(field, text)
        if (problem := unmet(request, served)) is not None:
            remedy = "wait until the update is committed, or ask another engine"
            raise Refusal(409, "version", problem, remedy)
        if any(turn.request.request_id == request.request_id for turn in known):
            message = f"request_id: {request.request_id!r} is running"
            raise Refusal(409, "request_id", message, "give each request an id of its own")

    def score(self, request: ScoreRequest) -> None:
        """Refuse what cannot be scored."""
        self._features(request)
        _tokens(request.token_ids, below=self.model.tokenizer_size)
        if request.start >= len(request.token_ids):
            message = f"start: {request.start}, but there are {len(request.token_ids)} tokens"
            raise Refusal(400, "start", message, "score at least one token")
        if len(request.token_ids) > self.model.context_tokens:
            raise self._too_long("token_ids", len(request.token_ids))

    def _features(self, request: GenerateRequest | ScoreRequest) -> None:
        self.has(*missing(request, self.features))
        if request.top_logprobs > _MOST_TOP_LOGPROBS:
            message = f"top_logprobs: {request.top_logprobs} is more than {_MOST_TOP_LOGPROBS}"
            raise Refusal(400, "top_logprobs", message, "ask for fewer of each position")

    def has(self, *asked: Feature) -> None:
        """Refuse a request that asks for what this engine cannot do."""
        for feature in asked:
            if feature not in self.features:
                message = f"the request asks for {feature}, which this engine cannot do"
                remedy = "leave it out, or ask an engine that has this feature"
                raise Refusal(400, "unsupported", message, remedy)

    def _too_long(self, field: str, tokens: int) -> Refusal:
        message = (
            f"{field}: {tokens} tokens and one to sample do not fit: the context has "
            f"{self.model.context_tokens} tokens, the KV pool {self.kv_tokens}"
        )
        return Refusal(
            413, "too_long", message, "shorten the context, or start the engine with more KV tokens"
        )


def _tokens(token_ids: list[int], *, below: int) -> None:
    if not token_ids:
        raise Refusal(400, "token_ids", "token_ids: is empty", "send at least one token")
    if wrong := [token for token in token_ids if not 0 <= token < below]:
        message = f"token_ids: {wrong[0]} is not in the model's vocabulary of {below}"
        raise Refusal(400, "token_ids", message, "use the tokenizer of the model folder")


def _readable(field: str, version: str) -> None:
    try:
        Version.parse(version)
    except ValueError as exc:
        message = f"{field}: {version!r} is not EPOCH.NUMBER"
        raise Refusal(400, field, message, "send it as '0.7'") from exc
