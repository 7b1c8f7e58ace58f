"""`/v1/chat/completions`, as OpenAI, vLLM and SGLang agree on it.

Beside OpenAI's own keys: `return_token_ids` gives `prompt_token_ids` and each choice's `token_ids`, and
`return_tokens_as_token_ids` names tokens of log-probabilities by them, as `token_id:7`; `top_k`, `min_p`,
`repetition_penalty` and `stop_token_ids` mean what they mean to the engines.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from time import monotonic
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from sostenuto.runtime.engines.wire import Grammar, WireSpan
from sostenuto.runtime.gateway.bodies import (
    Body,
    Count,
    FunctionBody,
    SamplingBody,
    Text,
    check_schema,
    read,
    tool_of,
)
from sostenuto.runtime.gateway.choosing import Choice, chosen, held_to, strict_of
from sostenuto.runtime.gateway.dialects.dialect import COMMENT, Call, Json, Live, Served
from sostenuto.runtime.gateway.dialects.openai import (
    MessageBody,
    call_ids,
    call_json,
    error_json,
    event,
    finish_reason,
    logprobs_json,
    message_json,
    messages_of,
    usage_json,
)
from sostenuto.runtime.gateway.turn import Ask, Refused, Told
from sostenuto.runtime.gateway.unfolding import Delta, Unfolding
from sostenuto.types import ToolCall

_CHOICES = 128


class ToolBody(Body):
    type: Literal["function"] = "function"
    function: FunctionBody


class ToolName(Body):
    name: Text


class ChosenTool(Body):
    function: ToolName


class AllowedBody(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=1024)]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedBody


class JsonSchemaBody(Body):
    name: Text | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class FormatBody(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None

    def grammar(self) -> Grammar | None:
        """What the text must be; Refused for a schema that is none."""
        if self.type == "text":
            return None
        schema: Json = {"type": "object"}
        if self.type == "json_schema":
            if self.json_schema is None or self.json_schema.json_schema is None:
                raise Refused("response_format.json_schema.schema is missing", field="response_format")
            schema = self.json_schema.json_schema
            check_schema(schema, "response_format.json_schema.schema")
        return Grammar(json_schema=json.dumps(schema))


class StreamOptions(Body):
    include_usage: bool = False


class ChatBody(SamplingBody):
    model: Text | None = None
    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=20_000)]
    tools: Annotated[list[ToolBody], Field(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    response_format: FormatBody | None = None
    max_tokens: Annotated[int, Field(gt=0, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(gt=0, le=2**31 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=_CHOICES)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Count, Field(le=20)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Any] | None = None


class ChatDialect:
    keep_alive = COMMENT

    def read(self, body: Json, served: Served) -> Call:
        chat = read(ChatBody, body)
        served.check(chat.model)
        if chat.logit_bias:
            raise Refused("logit_bias is not supported; leave it out", field="logit_bias")
        choice = _choice(chat)
        text = chat.response_format.grammar() if chat.response_format else None
        grammar, held_by = held_to(choice, served, text)
        ask = Ask(
            messages=messages_of(chat.messages),
            tools=choice.tools,
            sampling=chat.sampling(served.stop_token_ids, grammar),
            held_by=held_by,
            seeded=chat.seed is not None,
            max_tokens=chat.max_completion_tokens or chat.max_tokens,
            top_logprobs=(chat.top_logprobs or 0) if chat.logprobs else 0,
        )
        return Call(
            asks=ask.times(chat.n or 1),
            streams=bool(chat.stream),
            body=chat,
            id=f"chatcmpl-{uuid4().hex}",
        )

    def reply(self, call: Call, told: Sequence[Told], served: Served) -> Json:
        chat: ChatBody = call.body
        body: Json = {
            "id": call.id,
            "object": "chat.completion",
            "created": served.created,
            "model": served.model,
            "choices": [self._choice(index, one, chat, served) for index, one in enumerate(told)],
            "usage": usage_json(told),
        }
        if chat.return_token_ids:
            body["prompt_token_ids"] = list(told[0].prompt_token_ids)
        return body

    def events(self, call: Call, told: Sequence[Told], served: Served) -> Iterator[bytes]:
        for index, one in enumerate(told):
            yield from ChatStream(call, index, served).choice(one)
        yield from _closing(call, told, served)

    def live(self, call: Call, served: Served) -> Live | None:
        return ChatStream(call, 0, served) if len(call.asks) == 1 else None

    def error(self, error: Refused) -> Json:
        return error_json(error)

    def error_event(self, error: Refused) -> bytes:
        return event(error_json(error))

    def _choice(self, index: int, told: Told, chat: ChatBody, served: Served) -> Json:
        choice: Json = {
            "index": index,
            "message": message_json(told, call_ids(told)),
            "logprobs": _logprobs(told, chat, served),
            "finish_reason": finish_reason(told),
            "stop_reason": told.reply.matched,
        }
        if chat.return_token_ids:
            choice["token_ids"] = told.reply.token_ids
        return choice


class ChatStream:
    """One choice as chunks: text as it is certain, tool calls and the end when the turn is over."""

    def __init__(self, call: Call, index: int, served: Served) -> None:
        self._call = call
        self._index = index
        self._served = served
        ask = call.asks[index]
        self._text = Unfolding(served.renderer, ask.tools, monotonic, stops=ask.sampling.stop_strings)
        self._has_begun = False

    def span(self, span: WireSpan) -> Iterator[bytes]:
        delta = self._text.feed(span.token_ids)
        if delta:
            yield from self._tell(delta)

    def end(self, told: Told) -> Iterator[bytes]:
        yield from self.choice(told)
        yield from _closing(self._call, [told], self._served)

    def choice(self, told: Told) -> Iterator[bytes]:
        """Whatever of the turn was not told, and why it ended."""
        assert told.turn is not None
        yield from self._tell(self._text.end(told.turn))
        tools = zip(told.turn.message.tool_calls, call_ids(told), strict=True)
        for position, (tool, id_) in enumerate(tools):
            begun = call_json(ToolCall(tool.name, ""), id_)
            yield self._event({"tool_calls": [{"index": position, **begun}]})
            arguments = {"index": position, "function": {"arguments": tool.arguments}}
            yield self._event({"tool_calls": [arguments]})
        chat: ChatBody = self._call.body
        last: Json = {
            "index": self._index,
            "delta": {},
            "finish_reason": finish_reason(told),
            "logprobs": _logprobs(told, chat, self._served),
        }
        more: Json = {}
        if chat.return_token_ids:
            last["token_ids"] = told.reply.token_ids
            more["prompt_token_ids"] = list(told.prompt_token_ids)
        yield event(_chunk(self._call, self._served, [last], **more))

    def _tell(self, delta: Delta) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield self._event({"role": "assistant", "content": ""})
        if delta.reasoning:
            yield self._event({"reasoning_content": delta.reasoning})
        if delta.content:
            yield self._event({"content": delta.content})

    def _event(self, delta: Json) -> bytes:
        choice = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
        return event(_chunk(self._call, self._served, [choice]))


def _closing(call: Call, told: Sequence[Told], served: Served) -> Iterator[bytes]:
    chat: ChatBody = call.body
    if chat.stream_options is not None and chat.stream_options.include_usage:
        yield event(_chunk(call, served, [], usage=usage_json(told)))
    yield event("[DONE]")


def _chunk(call: Call, served: Served, choices: list[Json], **more: object) -> Json:
    return {
        "id": call.id,
        "object": "chat.completion.chunk",
        "created": served.created,
        "model": served.model,
        "choices": choices,
        **more,
    }


def _logprobs(told: Told, chat: ChatBody, served: Served) -> Json | None:
    if not chat.logprobs:
        return None
    reply = told.reply
    tokens = served.texts.logprobs(reply.token_ids, reply.logprobs, reply.top_logprobs)
    return logprobs_json([token.by_id() for token in tokens] if chat.return_tokens_as_token_ids else tokens)


def _choice(chat: ChatBody) -> Choice:
    """Refused for a tool that is none, and for a choice of one that is not there."""
    given = chat.tools or ()
    tools = tuple(tool_of(tool.function, f"tools.{i}.function") for i, tool in enumerate(given))
    several = chat.parallel_tool_calls is not False
    choose = partial(
        chosen, tools, strict=strict_of(((t.function.name, t.function.strict) for t in given), ".function")
    )
    match chat.tool_choice:
        case ChosenTool() as one:
            return choose("required", [one.function.name], several=False)
        case AllowedTools(allowed_tools=allowed):
            return choose(allowed.mode, [tool.function.name for tool in allowed.tools], several=several)
        case kind:
            return choose(kind or "auto", several=several)
