"""What a request must be before it is sent, and an answer before it is believed; else an EngineError."""

from dataclasses import dataclass

from sostenuto.errors import EngineError, VersionRefused
from sostenuto.runtime.engines.needs import missing, unmet
from sostenuto.runtime.engines.vllm.facts import UNLABELLED, Facts, Route
from sostenuto.runtime.engines.wire import Feature, GenerateReply, GenerateRequest, ScoreRequest
from sostenuto.types import Version


@dataclass(frozen=True, slots=True)
class Checks:
    """Of one engine; `where` names it."""

    where: str
    unlabelled: str | None
    """The version of weights that vLLM was started with; None: nobody knows."""

    def generate(self, request: GenerateRequest, facts: Facts, *, served: str) -> None:
        self.features(missing(request, facts.features), facts)
        self._tokens(request.token_ids, facts)
        self._temperature(request, facts)
        limit = facts.server.most_logprobs - 1
        if request.top_logprobs > limit:
            remedy = f"ask for less, or start it with --max-logprobs {request.top_logprobs + 1}"
            raise self.error(f"top_logprobs: {request.top_logprobs}, and it gives {limit}; {remedy}")
        if facts.route is Route.COMPLETIONS and request.routed_experts:
            raise self.error("routed_experts: start it with --enable-scale-out")
        self._wanted(request, served, "wait until the update is committed")

    def score(self, request: ScoreRequest, facts: Facts) -> None:
        self.features(missing(request, facts.features), facts)
        self._tokens(request.token_ids, facts)
        tokens, limit = len(request.token_ids), facts.server.most_logprobs
        if request.temperature != 1.0:
            raise self.error("temperature: vLLM scores at temperature 1 alone; ask for that")
        if request.start >= tokens:
            raise self.error(f"start: {request.start}, but there are {tokens} tokens; score at least one")
        if request.top_logprobs > limit:
            remedy = f"ask for less, or start it with --max-logprobs {request.top_logprobs}"
            raise self.error(f"top_logprobs: {request.top_logprobs}, and it gives {limit}; {remedy}")

    def features(self, lacking: list[Feature], facts: Facts) -> None:
        if lacking:
            raise self.error(f"it cannot do {lacking[0]}; {facts.remedy(lacking[0])}")

    def versions(self, reply: GenerateReply, request: GenerateRequest) -> None:
        """A server that was started anew serves the weights that it was started with."""
        for span in reply.versions:
            self._wanted(request, span.version, "was it updated meanwhile, or started anew?")

    def version(self, label: str) -> str:
        """What a label of the server means."""
        if label == UNLABELLED:
            if self.unlabelled is None:
                raise self.error("its weights have no version; was it started anew? Update it")
            return self.unlabelled
        try:
            return str(Version.parse(label))
        except ValueError as error:
            remedy = "set it with /update_weight_version to EPOCH.NUMBER of its weights, such as 0.0"
            raise self.error(
                f"its weights are labelled {label!r}, which is none of ours; {remedy}"
            ) from error

    def error(self, what: str) -> EngineError:
        return EngineError(f"{self.where}: {what}")

    def _wanted(self, request: GenerateRequest, served: str, remedy: str) -> None:
        if (problem := unmet(request, Version.parse(served))) is not None:
            raise VersionRefused(f"{self.where}: {problem}; {remedy}")

    def _tokens(self, token_ids: list[int], facts: Facts) -> None:
        if not token_ids:
            raise self.error("token_ids: is empty; send at least one token")
        size, limit = facts.model.vocabulary_size, facts.context_tokens
        if wrong := [token for token in token_ids if not 0 <= token < size]:
            remedy = "use the tokenizer of the model folder"
            raise self.error(f"token_ids: {wrong[0]} is not in the model's vocabulary of {size}; {remedy}")
        if len(token_ids) >= limit:
            remedy = "shorten them, or start it with a larger --max-model-len"
            raise self.error(f"token_ids: {len(token_ids)} tokens leave no room in {limit}; {remedy}")

    def _temperature(self, request: GenerateRequest, facts: Facts) -> None:
        """What is drawn at another temperature has other log-probabilities than those of the model."""
        if not facts.is_processed and request.sampling.temperature not in (0.0, 1.0):
            raise self.error(
                f"temperature: {request.sampling.temperature:g}, but its log-probabilities are those of "
                "temperature 1; start it with --logprobs-mode processed_logprobs"
            )
