"""`/generate`, as SGLang has it: one prompt, a text or token ids, and a reply with `meta_info`.

A batch is refused; clients that schedule programs send one prompt a request.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field

from sostenuto.runtime.engines.wire import Feature, FinishReason, Grammar
from sostenuto.runtime.gateway.bodies import Body, Count, SamplingBody, Text, read
from sostenuto.runtime.gateway.dialects.dialect import COMMENT, Call, Json, Served
from sostenuto.runtime.gateway.dialects.inference import Priority, Salt
from sostenuto.runtime.gateway.dialects.openai import error_json, event
from sostenuto.runtime.gateway.dialects.plain import refuse, text_of, text_prompt, token_prompt
from sostenuto.runtime.gateway.dialects.routed import as_int32
from sostenuto.runtime.gateway.turn import Ask, Refused, Told

_UNSUPPORTED: Json = {
    "input_embeds": None, "image_data": None, "audio_data": None, "video_data": None, "lora_path": None,
    "return_hidden_states": False, "return_indexer_topk": False, "return_sampling_mask": False,
    "return_entropy": False, "token_ids_logprob": None, "session_params": None, "kv_hints": None,
}  # fmt: skip
_UNSUPPORTED_SAMPLING: Json = {
    "n": 1, "min_new_tokens": 0, "logit_bias": {}, "custom_params": None, "ebnf": None, "stop_regex": None,
    "structural_tag": None,
}  # fmt: skip


class SGLangSampling(SamplingBody):
    max_new_tokens: Annotated[int, Field(gt=0, le=2**31 - 1)] | None = 128
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool = True
    json_schema: Text | None = None
    regex: Text | None = None

    def grammar(self) -> Grammar | None:
        if self.json_schema is not None and self.regex is not None:
            raise Refused(
                "sampling_params.regex: json_schema is given, too; leave one of them out",
                field="sampling_params.regex",
            )
        if self.json_schema is None and self.regex is None:
            return None
        return Grammar(json_schema=self.json_schema, regex=self.regex)


class SGLangBody(Body):
    model: Text | None = None
    rid: Annotated[str, Field(max_length=256)] | None = None
    text: Text | None = None
    input_ids: list[Any] | None = None
    sampling_params: SGLangSampling = SGLangSampling()
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None
    top_logprobs_num: Annotated[Count, Field(le=20)] | None = None
    return_text_in_logprobs: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Count = 0
    return_prompt_token_ids: bool | None = None
    stream: bool | None = None
    extra_key: Salt | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None


class SGLangDialect:
    keep_alive = COMMENT

    def read(self, body: Json, served: Served) -> Call:
        asked = read(SGLangBody, body)
        served.check(asked.model)
        refuse(body, _UNSUPPORTED)
        refuse(body.get("sampling_params") or {}, _UNSUPPORTED_SAMPLING, within="sampling_params.")
        return Call(
            asks=(_ask(asked, served),),
            streams=bool(asked.stream),
            body=asked,
            id=asked.rid or uuid4().hex,
        )

    def reply(self, call: Call, told: Sequence[Told], served: Served) -> Json:
        asked: SGLangBody = call.body
        (one,), (ask,) = told, call.asks
        body: Json = {
            "text": text_of(one, ask, served, special=not asked.sampling_params.skip_special_tokens),
            "output_ids": one.reply.token_ids,
            "meta_info": {"id": call.id, **_meta(one, asked), **_logprobs(one, asked, served)},
        }
        if asked.return_prompt_token_ids:
            body["prompt_token_ids"] = list(one.prompt_token_ids)
        return body

    def events(self, call: Call, told: Sequence[Told], served: Served) -> Iterator[bytes]:
        yield event(self.reply(call, told, served))
        yield event("[DONE]")

    def error(self, error: Refused) -> Json:
        return error_json(error)

    def error_event(self, error: Refused) -> bytes:
        return event(error_json(error))


def _ask(asked: SGLangBody, served: Served) -> Ask:
    wanted = asked.sampling_params
    sampling = wanted.sampling(() if wanted.ignore_eos else served.stop_token_ids, wanted.grammar())
    seed = wanted.sampling_seed if wanted.sampling_seed is not None else wanted.seed
    prompt = _prompt(asked, served)
    _check(asked, len(prompt), served)
    return Ask(
        token_ids=prompt,
        sampling=sampling.model_copy(update={"seed": (seed or 0) % 2**31}),
        seeded=seed is not None,
        max_tokens=wanted.max_new_tokens,
        top_logprobs=(asked.top_logprobs_num or 0) if asked.return_logprob else 0,
        routed_experts=bool(asked.return_routed_experts),
        salt=asked.cache_salt or asked.extra_key or "",
        priority=asked.priority or 0,
    )


def _prompt(asked: SGLangBody, served: Served) -> tuple[int, ...]:
    if (asked.text is None) == (asked.input_ids is None):
        raise Refused("input_ids: give exactly one of text and input_ids", field="input_ids")
    if asked.input_ids is not None:
        return token_prompt(asked.input_ids, served, "input_ids")
    return text_prompt(asked.text or "", served, "text")


def _check(asked: SGLangBody, prompt_tokens: int, served: Served) -> None:
    """Refused for log-probabilities of the prompt, and for experts that nobody tells."""
    start = asked.logprob_start_len
    if asked.return_logprob and start is not None and 0 <= start < prompt_tokens:
        raise Refused(
            "logprob_start_len: log-probabilities of the prompt are not supported; give -1",
            field="logprob_start_len",
        )
    if asked.return_routed_experts and Feature.ROUTED_EXPERTS not in served.features():
        raise Refused(
            "return_routed_experts: not every engine here tells them; serve a mixture-of-experts model on "
            "engines that do, or leave it out",
            field="return_routed_experts",
        )


def _meta(told: Told, asked: SGLangBody) -> Json:
    reply = told.reply
    meta: Json = {
        "finish_reason": _finish_reason(told),
        "prompt_tokens": len(told.prompt_token_ids),
        "completion_tokens": len(reply.token_ids),
        "cached_tokens": reply.cached_tokens,
        # As SGLang has it: that of the last span.  Staleness needs the oldest of `weight_versions`.
        "weight_version": reply.versions[-1].version if reply.versions else None,
        "weight_versions": [span.model_dump() for span in reply.versions],
        "e2e_latency": reply.queue_s + reply.prefill_s + reply.decode_s + reply.pause_s,
    }
    if asked.return_routed_experts:
        meta["routed_experts"] = as_int32(reply, asked.routed_experts_start_len)
    return meta


def _finish_reason(told: Told) -> Json:
    reply = told.reply
    match reply.finish_reason:
        case FinishReason.LENGTH:
            return {"type": "length", "length": len(reply.token_ids)}
        case FinishReason.ABORT:
            return {"type": "abort", "message": "the engine was told to end it"}
        case FinishReason.STOP:
            matched = reply.matched
            if matched is None and reply.token_ids:
                matched = reply.token_ids[-1]
            return {"type": "stop", "matched": matched}


def _logprobs(told: Told, asked: SGLangBody, served: Served) -> Json:
    """Triples of log-probability, token and its text, the text only where it is wanted."""
    if not asked.return_logprob:
        return {}
    reply, shows = told.reply, bool(asked.return_text_in_logprobs)
    tokens = served.texts.logprobs(reply.token_ids, reply.logprobs, reply.top_logprobs)
    found: Json = {
        "input_token_logprobs": [],
        "output_token_logprobs": [
            [token.logprob, token.token_id, token.text if shows else None] for token in tokens
        ],
        "output_token_logprobs_length": len(tokens),
    }
    if asked.top_logprobs_num:
        found["output_top_logprobs"] = [
            [[value, token_id, text if shows else None] for token_id, text, value in token.top]
            for token in tokens
        ]
    return found
