"""What a request asks of an engine."""

from sostenuto.runtime.engines.wire import Feature, GenerateRequest, Sampling, ScoreRequest
from sostenuto.types import Version


def missing(request: GenerateRequest | ScoreRequest, features: frozenset[Feature]) -> list[Feature]:
    """What the request needs and an engine with `features` has not; empty when it can be served."""
    return sorted(_needed(request) - features)


def unmet(request: GenerateRequest, served: Version) -> str | None:
    """What it wants of the version that weights of `served` are not; ValueError where it names none."""
    least, exact = request.min_version, request.exact_version
    if least is not None and served < Version.parse(least):
        return f"min_version: {least} is wanted, {served} is served"
    if exact is not None and served != Version.parse(exact):
        return f"exact_version: {exact} is wanted, {served} is served"
    return None


def _needed(request: GenerateRequest | ScoreRequest) -> set[Feature]:
    needs = {Feature.TOP_LOGPROBS} if request.top_logprobs else set[Feature]()
    if request.adapter is not None:
        needs.add(Feature.ADAPTERS)
    if isinstance(request, ScoreRequest):
        return needs | {Feature.SCORE}
    if request.routed_experts:
        needs.add(Feature.ROUTED_EXPERTS)
    return needs | _needed_to_sample(request.sampling)


def _needed_to_sample(sampling: Sampling) -> set[Feature]:
    asked = {
        Feature.TRUNCATION: sampling.truncates,
        Feature.PENALTIES: sampling.penalises,
        Feature.GRAMMAR: sampling.grammar is not None,
    }
    return {feature for feature, is_asked in asked.items() if is_asked}
