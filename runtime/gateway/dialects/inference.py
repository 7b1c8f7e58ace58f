"""`/inference/v1/generate`: vLLM's surface that takes tokens and gives tokens.

The experts of a mixture-of-experts model come with the reply where `routed_experts_prompt_start` is given
and the engines tell them.  Keys of `sampling_params` mean what they mean to `/v1/completions`.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field

from sostenuto.runtime.engines.wire import Feature, WireSpan
from sostenuto.runtime.gateway.bodies import Body, Count, SamplingBody, Text, read
from sostenuto.runtime.gateway.dialects.chat import StreamOptions
from sostenuto.runtime.gateway.dialects.dialect import COMMENT, Call, Json, Live, Served
from sostenuto.runtime.gateway.dialects.openai import error_json, event, usage_json
from sostenuto.runtime.gateway.dialects.plain import check_choices, refuse, token_prompt
from sostenuto.runtime.gateway.dialects.routed import as_npy
from sostenuto.runtime.gateway.texts import TokenText
from sostenuto.runtime.gateway.turn import Ask, Refused, Told

_LEAST_LOGPROB = -9999.0
_UNSUPPORTED: Json = {"features": None, "kv_transfer_params": None}
_UNSUPPORTED_SAMPLING: Json = {
    "prompt_logprobs": None, "logit_bias": {}, "min_tokens": 0, "bad_words": [], "allowed_token_ids": None,
    "structured_outputs": None,
}  # fmt: skip

Salt = Annotated[str, Field(max_length=256, pattern=r"^[^\x00]*$")]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class InferenceSampling(SamplingBody):
    max_tokens: Annotated[int, Field(gt=0, le=2**31 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    logprobs: Annotated[Count, Field(le=20)] | None = None
    ignore_eos: bool | None = None
    routed_experts_prompt_start: Count | None = None


class InferenceBody(Body):
    model: Text | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None
    token_ids: list[Any]
    sampling_params: InferenceSampling = InferenceSampling()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None


class InferenceDialect:
    keep_alive = COMMENT

    def read(self, body: Json, served: Served) -> Call:
        asked = read(InferenceBody, body)
        served.check(asked.model)
        refuse(body, _UNSUPPORTED)
        refuse(body.get("sampling_params") or {}, _UNSUPPORTED_SAMPLING, within="sampling_params.")
        choices = asked.sampling_params.n or 1
        check_choices(1, choices, "sampling_params.n")
        return Call(
            asks=_ask(asked, served).times(choices),
            streams=bool(asked.stream),
            body=asked,
            id=asked.request_id or f"generate-tokens-{uuid4().hex}",
        )

    def reply(self, call: Call, told: Sequence[Told], served: Served) -> Json:
        return {
            **_answer(call, [_choice(call, index, one, served) for index, one in enumerate(told)]),
            "prompt_token_ids": list(told[0].prompt_token_ids),
            "usage": usage_json(told),
        }

    def events(self, call: Call, told: Sequence[Told], served: Served) -> Iterator[bytes]:
        for index, one in enumerate(told):
            yield event(_answer(call, [_choice(call, index, one, served)]))
        yield from _closing(call, told)

    def live(self, call: Call, served: Served) -> Live | None:
        # The most probable tokens are told when a turn is over.
        is_plain = len(call.asks) == 1 and not call.asks[0].top_logprobs
        return TokenStream(call, served) if is_plain else None

    def error(self, error: Refused) -> Json:
        return error_json(error)

    def error_event(self, error: Refused) -> bytes:
        return event(error_json(error))


class TokenStream:
    """One choice as chunks: tokens as they are sampled, what is known of the whole with the last of them."""

    def __init__(self, call: Call, served: Served) -> None:
        self._call = call
        self._served = served
        self._told = 0

    def span(self, span: WireSpan) -> Iterator[bytes]:
        self._told += len(span.token_ids)
        new: Json = {"index": 0, "token_ids": span.token_ids, "logprobs": None, "finish_reason": None}
        if self._call.body.sampling_params.logprobs is not None:
            tokens = self._served.texts.logprobs(span.token_ids, span.logprobs, None)
            new["logprobs"] = {"content": [_logprob(token) for token in tokens]}
        yield event(_answer(self._call, [new]))

    def end(self, told: Told) -> Iterator[bytes]:
        choice = _choice(self._call, 0, told, self._served)
        choice["token_ids"] = choice["token_ids"][self._told :]
        if choice["logprobs"] is not None:
            choice["logprobs"] = {"content": choice["logprobs"]["content"][self._told :]}
        yield event(_answer(self._call, [choice]))
        yield from _closing(self._call, [told])


def _closing(call: Call, told: Sequence[Told]) -> Iterator[bytes]:
    asked: InferenceBody = call.body
    if asked.stream_options is not None and asked.stream_options.include_usage:
        yield event(_answer(call, []) | {"usage": usage_json(told)})
    yield event("[DONE]")


def _ask(asked: InferenceBody, served: Served) -> Ask:
    wanted = asked.sampling_params
    features = served.features()
    # Clients that want the sampled token's alone ask for 1; not every engine gives more than that.
    top = wanted.logprobs or 0
    return Ask(
        token_ids=token_prompt(asked.token_ids, served, "token_ids"),
        sampling=wanted.sampling(() if wanted.ignore_eos else served.stop_token_ids),
        seeded=wanted.seed is not None,
        max_tokens=wanted.max_tokens,
        top_logprobs=top if top > 1 or Feature.TOP_LOGPROBS in features else 0,
        routed_experts=(
            wanted.routed_experts_prompt_start is not None and Feature.ROUTED_EXPERTS in features
        ),
        salt=asked.cache_salt or "",
        # vLLM serves the lowest number first.
        priority=-(asked.priority or 0),
    )


def _answer(call: Call, choices: list[Json]) -> Json:
    return {"request_id": call.id, "choices": choices}


def _choice(call: Call, index: int, told: Told, served: Served) -> Json:
    wanted = call.body.sampling_params
    reply = told.reply
    choice: Json = {
        "index": index,
        "token_ids": reply.token_ids,
        "finish_reason": reply.finish_reason.value,
        "stop_reason": reply.matched,
        "logprobs": None,
        "weight_versions": [span.model_dump() for span in reply.versions],
    }
    if wanted.logprobs is not None:
        tokens = served.texts.logprobs(reply.token_ids, reply.logprobs, reply.top_logprobs)
        choice["logprobs"] = {"content": [_logprob(token) for token in tokens]}
    if call.asks[index].routed_experts:
        choice["routed_experts"] = as_npy(reply, wanted.routed_experts_prompt_start or 0)
    return choice


def _logprob(token: TokenText) -> Json:
    top = [_named(token_id, value) for token_id, _, value in token.top]
    return {**_named(token.token_id, token.logprob), "bytes": None, "top_logprobs": top}


def _named(token_id: int, logprob: float) -> Json:
    return {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": max(logprob, _LEAST_LOGPROB)}
