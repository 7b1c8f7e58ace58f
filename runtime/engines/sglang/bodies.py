"""Bodies of `/generate`, as SGLang's GenerateReqInput and SamplingParams take them.

- Stop tokens: `ignore_eos` would switch off `stop_token_ids`, too, so it is set only where there are none;
  else the model's own end-of-text tokens also end a turn, and are reported as what was matched.
- Without `no_stop_trim` text that is looked at would lack what stopped it.  Token ids are never trimmed.
- What a request does not say a server may take from `--preferred-sampling-params`, so all is said.
- Truncated sampling: the log-probabilities are those before truncation, so the kept support is asked
  for; its log-probabilities are of the distribution that was drawn from.
"""

from dataclasses import dataclass
from typing import Any

from sostenuto.runtime.engines.sglang.facts import Facts
from sostenuto.runtime.engines.wire import GenerateRequest, Sampling, ScoreRequest

Body = dict[str, Any]

_ALL = -1
"""As top_k."""


@dataclass(frozen=True, slots=True)
class Place:
    """What the adapter adds to a request."""

    rid: str
    extra_key: str
    """Only requests with the same key share KV."""
    session_id: str | None = None
    stream: bool = False


def generate_body(request: GenerateRequest, facts: Facts, place: Place) -> Body:
    body: Body = {
        "rid": place.rid,
        "input_ids": request.token_ids,
        "sampling_params": sampling_params(request.sampling, _room(request, facts)),
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": request.top_logprobs,
        "extra_key": place.extra_key,
        "stream": place.stream,
    }
    if place.session_id is not None:
        body["session_id"] = place.session_id
    if facts.server.enable_priority_scheduling:
        lower_first = facts.server.schedule_low_priority_values_first
        body["priority"] = -request.priority if lower_first else request.priority
    if request.routed_experts:
        body["return_routed_experts"] = True
        body["routed_experts_start_len"] = routed_from(request)
    if is_truncated(request.sampling):
        body["return_sampling_mask"] = True
        body["sampling_logprobs_mode"] = "support" if request.top_logprobs else "selected"
    return body


def sampling_params(sampling: Sampling, max_new_tokens: int) -> Body:
    params: Body = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "sampling_seed": sampling.seed,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "ignore_eos": not sampling.stop_token_ids,
        "repetition_penalty": 1.0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        **_truncation(sampling),
    }
    optional: Body = {
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop_strings),
        **_grammar(sampling),
    }
    return params | {name: value for name, value in optional.items() if value}


def score_body(request: ScoreRequest, facts: Facts, place: Place) -> Body:
    """Input log-probabilities come with the token before the first one that is asked for."""
    return {
        "rid": place.rid,
        "input_ids": request.token_ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": request.start - 1,
        "top_logprobs_num": request.top_logprobs,
        "extra_key": place.extra_key,
        "stream": False,
    } | ({"priority": 0} if facts.server.enable_priority_scheduling else {})


def routed_from(request: GenerateRequest) -> int:
    """First token whose experts are returned; the server takes no place after the prompt."""
    return min(request.routed_experts_from, len(request.token_ids))


def is_truncated(sampling: Sampling) -> bool:
    """Whether tokens are left out of the distribution; greedy sampling leaves out none that it could draw."""
    chosen = (sampling.top_k, sampling.top_p, sampling.min_p)
    return sampling.temperature > 0 and chosen != (0, 1.0, 0.0)


def _room(request: GenerateRequest, facts: Facts) -> int:
    """Tokens that may be sampled; a request for more would be refused, not cut."""
    return min(request.max_new_tokens, facts.context_tokens - len(request.token_ids))


def _truncation(sampling: Sampling) -> Body:
    if not is_truncated(sampling):
        return {"top_k": _ALL, "top_p": 1.0, "min_p": 0.0}
    return {"top_k": sampling.top_k or _ALL, "top_p": sampling.top_p, "min_p": sampling.min_p}


def _grammar(sampling: Sampling) -> Body:
    grammar = sampling.grammar
    return grammar.model_dump(exclude_none=True) if grammar else {}
