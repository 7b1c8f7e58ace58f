"""What a request must be before it is sent, and an answer before it is believed; else an EngineError."""

from dataclasses import dataclass

from sostenuto.errors import EngineError, VersionRefused
from sostenuto.runtime.engines.needs import missing, unmet
from sostenuto.runtime.engines.sglang.bodies import is_truncated
from sostenuto.runtime.engines.sglang.facts import Facts
from sostenuto.runtime.engines.wire import Feature, GenerateReply, GenerateRequest, Sampling, ScoreRequest
from sostenuto.types import Version


@dataclass(frozen=True, slots=True)
class Checks:
    """Of one engine; `where` names it."""

    where: str

    def generate(self, request: GenerateRequest, facts: Facts, *, served: str) -> None:
        self.features(missing(request, facts.features), facts)
        self._tokens(request.token_ids, facts)
        self._sampling(request.sampling, facts)
        tokens, limit = len(request.token_ids), facts.context_tokens
        if tokens >= limit:
            raise self.error(
                f"token_ids: {tokens} tokens and one to sample do not fit into {limit}; shorten the context, "
                "or start the engine with a larger --context-length and more KV"
            )
        self._wanted(request, served, "wait until the update is committed")

    def score(self, request: ScoreRequest, facts: Facts) -> None:
        self.features(missing(request, facts.features), facts)
        self._tokens(request.token_ids, facts)
        if request.temperature != 1.0:
            raise self.error("temperature: SGLang scores at temperature 1 alone; ask for that")
        tokens, limit = len(request.token_ids), facts.context_tokens
        if request.start >= tokens:
            raise self.error(f"start: {request.start}, but there are {tokens} tokens; score at least one")
        if tokens >= limit:
            raise self.error(f"token_ids: {tokens} tokens do not fit into {limit - 1}; shorten them")

    def features(self, lacking: list[Feature], facts: Facts) -> None:
        if lacking:
            raise self.error(f"it cannot do {lacking[0]}; {facts.remedy(lacking[0])}")

    def versions(self, reply: GenerateReply, request: GenerateRequest) -> None:
        """A server that was started anew serves the weights that it was started with."""
        for span in reply.versions:
            self._wanted(request, span.version, "was it updated meanwhile, or started anew?")

    def version(self, label: str) -> Version:
        """What a label of the server means."""
        try:
            return Version.parse(label)
        except ValueError as error:
            remedy = "start it with --weight-version EPOCH.NUMBER of its weights, such as 0.0"
            raise self.error(f"weight_version {label!r} is none of ours; {remedy}") from error

    def _wanted(self, request: GenerateRequest, served: str, remedy: str) -> None:
        if (problem := unmet(request, self.version(served))) is not None:
            raise VersionRefused(f"{self.where}: {problem}; {remedy}")

    def error(self, what: str) -> EngineError:
        return EngineError(f"{self.where}: {what}")

    def _tokens(self, token_ids: list[int], facts: Facts) -> None:
        if not token_ids:
            raise self.error("token_ids: is empty; send at least one token")
        size = facts.model.vocabulary_size
        if wrong := [token for token in token_ids if not 0 <= token < size]:
            remedy = "use the tokenizer of the model folder"
            raise self.error(f"token_ids: {wrong[0]} is not in the model's vocabulary of {size}; {remedy}")

    def _sampling(self, sampling: Sampling, facts: Facts) -> None:
        """Refuse what this server does otherwise than was asked for, where its answer would not show it."""
        if not facts.is_tempered and sampling.temperature not in (0.0, 1.0):
            raise self.error(
                f"temperature: {sampling.temperature:g}, but its log-probabilities are those of "
                "temperature 1; start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )
        if sampling.repetition_penalty != 1.0:
            remedy = "leave it out, or use presence_penalty"
            raise self.error(f"repetition_penalty: SGLang counts sampled tokens, not the context; {remedy}")
        cap = facts.server.sampling_mask_max_tokens
        if is_truncated(sampling) and not 0 < sampling.top_k <= cap:
            raise self.error(
                f"top_k: {sampling.top_k}: what is kept is known for 1 to {cap} tokens; set it in this "
                "range, or start the engine with a larger --sampling-mask-max-tokens"
            )
        if sampling.grammar is not None and sampling.grammar.lark is not None:
            raise self.error("grammar.lark: SGLang takes none; use json_schema, regex or structural_tag")
        if sampling.stop_strings and facts.server.skip_tokenizer_init:
            raise self.error("stop_strings: it has no tokenizer; start it without --skip-tokenizer-init")
