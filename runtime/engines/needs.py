"""What a request asks of an engine."""

from sostenuto.runtime.engines.wire import Feature, GenerateRequest, Sampling, ScoreRequest


def missing(request: GenerateRequest | ScoreRequest, features: frozenset[Feature]) -> list[Feature]:
    """What the request needs and an engine with `features` has not; empty when it can be served."""
    return sorted(_needed(request) - features)


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
