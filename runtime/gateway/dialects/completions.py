"""`/v1/completions`, as OpenAI and vLLM have it: prompts that are texts or token ids.

Beside OpenAI's own keys: `return_token_ids` gives each choice's `prompt_token_ids` and `token_ids`, and
`return_tokens_as_token_ids` names tokens `token_id:ID`.  `logprobs: 0` gives those of the sampled tokens.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from time import monotonic
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field

from sostenuto.runtime.engines.wire import WireSpan
from sostenuto.runtime.gateway.bodies import Count, SamplingBody, Text, read
from sostenuto.runtime.gateway.dialects.chat import FormatBody, StreamOptions
from sostenuto.runtime.gateway.dialects.dialect import COMMENT, Call, Json, Live, Served
from sostenuto.runtime.gateway.dialects.openai import error_json, event, usage_json
from sostenuto.runtime.gateway.dialects.plain import check_choices, prompts_of, refuse, text_of
from sostenuto.runtime.gateway.turn import Ask, Refused, Told
from sostenuto.runtime.gateway.unfolding import OFTEN_S, overlap

_LEAST_LOGPROB = -9999.0
_UNSUPPORTED: Json = {
    "suffix": "", "logit_bias": {}, "prompt_logprobs": None, "prompt_embeds": None, "min_tokens": 0,
    "use_beam_search": False,
}  # fmt: skip


class CompletionBody(SamplingBody):
    model: Text | None = None
    prompt: Any
    max_tokens: Annotated[int, Field(gt=0, le=2**31 - 1)] | None = 16
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: Annotated[Count, Field(le=20)] | None = None
    response_format: FormatBody | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool = True
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionDialect:
    keep_alive = COMMENT

    def read(self, body: Json, served: Served) -> Call:
        asked = read(CompletionBody, body)
        served.check(asked.model)
        refuse(body, _UNSUPPORTED)
        _refuse_combinations(asked)
        prompts, choices = prompts_of(asked.prompt, served, "prompt"), asked.n or 1
        check_choices(len(prompts), choices, "n")
        stops = () if asked.ignore_eos else served.stop_token_ids
        sampling = asked.sampling(stops, asked.response_format.grammar() if asked.response_format else None)
        asks = [
            Ask(
                token_ids=prompt,
                sampling=sampling,
                seeded=asked.seed is not None,
                max_tokens=asked.max_tokens,
                top_logprobs=asked.logprobs or 0,
            )
            for prompt in prompts
        ]
        return Call(
            asks=tuple(choice for ask in asks for choice in ask.times(choices)),
            streams=bool(asked.stream),
            body=asked,
            id=f"cmpl-{uuid4().hex}",
        )

    def reply(self, call: Call, told: Sequence[Told], served: Served) -> Json:
        choices = [_choice(call, index, one, served) for index, one in enumerate(told)]
        return _answer(call, served, choices, usage=_usage(call, told))

    def events(self, call: Call, told: Sequence[Told], served: Served) -> Iterator[bytes]:
        for index, one in enumerate(told):
            yield event(_answer(call, served, [_choice(call, index, one, served)]))
        yield from _closing(call, told, served)

    def live(self, call: Call, served: Served) -> Live | None:
        return CompletionStream(call, served) if len(call.asks) == 1 else None

    def error(self, error: Refused) -> Json:
        return error_json(error)

    def error_event(self, error: Refused) -> bytes:
        return event(error_json(error))


class CompletionStream:
    """One choice as chunks: text as it is certain; tokens and log-probabilities with the last of them."""

    def __init__(self, call: Call, served: Served) -> None:
        self._call = call
        self._served = served
        self._ask = call.asks[0]
        self._asked: CompletionBody = call.body
        self._token_ids: list[int] = []
        self._read_s = float("-inf")
        self._told = ""

    def span(self, span: WireSpan) -> Iterator[bytes]:
        self._token_ids += span.token_ids
        if monotonic() < self._read_s + OFTEN_S:
            return
        self._read_s = monotonic()
        text = self._certain()
        if text.startswith(self._told) and len(text) > len(self._told):
            new = {"index": 0, "text": text[len(self._told) :], "logprobs": None, "finish_reason": None}
            self._told = text
            yield event(_answer(self._call, self._served, [new]))

    def end(self, told: Told) -> Iterator[bytes]:
        choice = _choice(self._call, 0, told, self._served)
        choice["text"] = choice["text"].removeprefix(self._told)
        yield event(_answer(self._call, self._served, [choice]))
        yield from _closing(self._call, [told], self._served)

    def _certain(self) -> str:
        """Without half a character, a stop token, and what may be the beginning of a stop text."""
        token_ids, sampling = self._token_ids, self._ask.sampling
        if token_ids[-1] in sampling.stop_token_ids:
            token_ids = token_ids[:-1]
        text = self._served.texts.decode(token_ids, special=not self._asked.skip_special_tokens)
        for stop in sampling.stop_strings:
            text = text.partition(stop)[0]
            text = text[: len(text) - overlap(text, stop)]
        return _echoed(self._call, 0, self._served) + text.rstrip("\ufffd")


def _closing(call: Call, told: Sequence[Told], served: Served) -> Iterator[bytes]:
    asked: CompletionBody = call.body
    if asked.stream_options is not None and asked.stream_options.include_usage:
        yield event(_answer(call, served, [], usage=_usage(call, told)))
    yield event("[DONE]")


def _echoed(call: Call, index: int, served: Served) -> str:
    """The prompt, where it is wanted."""
    asked: CompletionBody = call.body
    if not asked.echo:
        return ""
    return served.texts.decode(call.asks[index].token_ids, special=not asked.skip_special_tokens)


def _refuse_combinations(asked: CompletionBody) -> None:
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise Refused(
            "best_of: choosing among samples is not supported; ask for them with n", field="best_of"
        )
    if asked.echo and asked.logprobs is not None:
        raise Refused(
            "echo: log-probabilities of the prompt are not supported; leave out echo or logprobs",
            field="echo",
        )


def _answer(call: Call, served: Served, choices: list[Json], **more: object) -> Json:
    return {
        "id": call.id,
        "object": "text_completion",
        "created": served.created,
        "model": served.model,
        "choices": choices,
        **more,
    }


def _usage(call: Call, told: Sequence[Told]) -> Json:
    asked: CompletionBody = call.body
    return usage_json(told, choices=asked.n or 1)


def _choice(call: Call, index: int, told: Told, served: Served) -> Json:
    asked: CompletionBody = call.body
    text = text_of(told, call.asks[index], served, special=not asked.skip_special_tokens)
    choice: Json = {
        "index": index,
        "text": _echoed(call, index, served) + text,
        "logprobs": _logprobs(told, asked, served),
        "finish_reason": told.reply.finish_reason.value,
        "stop_reason": told.reply.matched,
    }
    if asked.return_token_ids:
        choice["prompt_token_ids"] = list(told.prompt_token_ids)
        choice["token_ids"] = told.reply.token_ids
    return choice


def _logprobs(told: Told, asked: CompletionBody, served: Served) -> Json | None:
    """One entry for each sampled token, what ended the reply included."""
    if asked.logprobs is None:
        return None

    def name(token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if asked.return_tokens_as_token_ids else text

    reply = told.reply
    tokens = served.texts.logprobs(reply.token_ids, reply.logprobs, reply.top_logprobs)
    lengths = (len(token.text) for token in tokens)
    return {
        "text_offset": list(accumulate(lengths, initial=0))[:-1],
        "token_logprobs": [max(token.logprob, _LEAST_LOGPROB) for token in tokens],
        "tokens": [name(token.token_id, token.text) for token in tokens],
        "top_logprobs": [
            {
                name(token_id, text): max(value, _LEAST_LOGPROB)
                for token_id, text, value in ((token.token_id, token.text, token.logprob), *token.top)
            }
            for token in tokens
        ],
    }
