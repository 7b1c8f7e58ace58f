"""Our requests in vLLM's words.

- vLLM's noise depends on the seed and on how many tokens it sampled since the request came, ours on the
  position in the context: its seed is made of ours and the length of the context.  Where it takes none
  its noise is its own.
- Without `ignore_eos` the model's own end of text would end a turn, whether or not it is a stop token.  A
  grammar, though, ends with it.
- What a request does not say the server takes from the model's generation_config.json, so all is said.
- vLLM serves lower priorities first.
- Of the most probable tokens the sampled one takes a place, so one more is asked for.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from sostenuto.runtime.engines.vllm.facts import Facts, Route
from sostenuto.runtime.engines.wire import GenerateRequest, Grammar, Sampling, ScoreRequest

_SEED_BITS = 63
_ONLY_ENDS = 1 << 20
"""Tokens between two events: only the first one and the end are told."""
_ALWAYS = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands in the engine."""

    request_id: str
    salt: str
    """Only requests with the same one find each other's KV."""
    streams_tokens: bool = False
    """Every token is told as it comes; else when the first came, and all at the end."""


def generate_body(request: GenerateRequest, facts: Facts, place: Place) -> dict[str, Any]:
    tokens = min(request.max_new_tokens, facts.context_tokens - len(request.token_ids))
    parameters = {"max_tokens": tokens, **_sampling(request.sampling)}
    if facts.takes_seeds:
        parameters["seed"] = _seed(request.sampling.seed, len(request.token_ids))
    parameters["logprobs"] = request.top_logprobs + 1 if request.top_logprobs else 0
    if not place.streams_tokens:
        parameters["stream_interval"] = _ONLY_ENDS
    common = {
        "model": facts.server.name,
        "request_id": place.request_id,
        "cache_salt": place.salt,
        "priority": -request.priority if facts.has_priorities else 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if facts.route is Route.TOKENS:
        detokenizes = bool(request.sampling.stop_strings or request.sampling.grammar)
        parameters["detokenize"] = detokenizes
        return {**common, "token_ids": request.token_ids, "sampling_params": parameters}
    flat = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return {**common, **parameters, **flat, "prompt": request.token_ids}


def score_body(request: ScoreRequest, facts: Facts, place: Place) -> dict[str, Any]:
    """One token is sampled on top: no request goes without."""
    parameters = {
        "max_tokens": 1, "temperature": 1.0, "ignore_eos": True,
        "logprobs": 0, "prompt_logprobs": request.top_logprobs, "detokenize": False,
    }  # fmt: skip
    return {
        "model": facts.server.name,
        "request_id": place.request_id,
        "cache_salt": place.salt,
        "token_ids": request.token_ids,
        "sampling_params": parameters,
    }


def engine_ids(route: Route, request_id: str) -> list[str]:
    """What the engine calls a request with this id."""
    return [f"generate-tokens-{request_id}" if route is Route.TOKENS else f"cmpl-{request_id}-0"]


def _sampling(sampling: Sampling) -> dict[str, Any]:
    body: dict[str, Any] = {
        "temperature": sampling.temperature,
        "ignore_eos": sampling.grammar is None,
        "skip_special_tokens": False,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop_strings),
    }
    body |= {name: getattr(sampling, name) for name in _ALWAYS}
    if sampling.grammar is not None:
        body["structured_outputs"] = _grammar(sampling.grammar)
    return body


def _grammar(grammar: Grammar) -> dict[str, str]:
    fields = {"json": grammar.json_schema, "regex": grammar.regex, "grammar": grammar.lark}
    fields |= {"structural_tag": grammar.structural_tag}
    return {name: value for name, value in fields.items() if value is not None}


def _seed(seed: int, context_tokens: int) -> int:
    digest = hashlib.blake2b(f"{seed} {context_tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
