"""What OpenAI's surfaces have in common: messages, usage, finish reasons, errors."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field
from pydantic_core import to_json

from sostenuto.runtime.engines.wire import FinishReason
from sostenuto.runtime.gateway.bodies import (
    Body,
    CallFunction,
    Part,
    Text,
    arguments_of,
    text_of,
    tool_message,
)
from sostenuto.runtime.gateway.texts import TokenText
from sostenuto.runtime.gateway.turn import Refused, Told
from sostenuto.types import Message, ToolCall

Json = dict[str, Any]

_ROLES = {"developer": "system", "function": "tool"}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class CallBody(Body):
    id: Text | None = None
    function: CallFunction


class MessageBody(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[Part] | None = None
    name: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: Annotated[list[CallBody], Field(max_length=1024)] | None = None
    tool_call_id: Text | None = None


def messages_of(bodies: Sequence[MessageBody]) -> tuple[Message, ...]:
    """A chat as we know it; results take the names of the tools that their calls are of."""
    calls: list[tuple[str, ToolCall]] = []
    messages: list[Message] = []
    for index, body in enumerate(bodies):
        content = text_of(body.content, f"messages.{index}.content")
        role = _ROLES.get(body.role, body.role)
        if role == "tool":
            messages.append(tool_message(content, body.tool_call_id, calls, body.name or ""))
            continue
        made = [
            (call.id or "", ToolCall(call.function.name, arguments_of(call.function.arguments)))
            for call in body.tool_calls or ()
        ]
        calls += made
        reasoning = body.reasoning_content or body.reasoning or ""
        messages.append(Message(role, content, tuple(call for _, call in made), reasoning))
    if not messages or messages[-1].role == "assistant":
        raise Refused(
            "messages: the last one must be of a user or a tool, for the model to answer it",
            field="messages",
        )
    return tuple(messages)


def message_json(told: Told, call_ids: Sequence[str]) -> Json:
    """The reply as an assistant's message, in the form that strict clients want."""
    assert told.turn is not None
    message = told.turn.message
    body: Json = {
        "role": "assistant",
        "content": message.content or (None if message.tool_calls else ""),
        "refusal": None,
        "annotations": [],
    }
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            call_json(call, id_) for call, id_ in zip(message.tool_calls, call_ids, strict=True)
        ]
    return body


def call_json(call: ToolCall, id_: str) -> Json:
    return {"id": id_, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def call_ids(told: Told) -> list[str]:
    """New ids for the calls of a reply."""
    return [f"call_{uuid4().hex[:24]}" for _ in (told.turn.message.tool_calls if told.turn else ())]


def finish_reason(told: Told) -> str:
    if told.reply.finish_reason is FinishReason.LENGTH:
        return "length"
    if told.turn is not None and told.turn.problem is None and told.turn.message.tool_calls:
        return "tool_calls"
    return "stop"


def usage_json(told: Sequence[Told], *, choices: int | None = None) -> Json:
    """`choices` of each prompt; None: all are of one."""
    firsts = told[:: choices or len(told)]
    prompt = sum(len(one.prompt_token_ids) for one in firsts)
    completion = sum(len(one.reply.token_ids) for one in told)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.reply.cached_tokens for one in firsts)},
    }


def logprobs_json(tokens: Sequence[TokenText]) -> Json:
    return {
        "content": [
            {
                **_token_json(token.text, token.logprob),
                "top_logprobs": [_token_json(text, value) for _, text, value in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _token_json(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode(errors="replace"))}


def error_json(error: Refused) -> Json:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": error.code}}


def event(value: Json | str) -> bytes:
    """One server-sent event without a name."""
    data = value.encode() if isinstance(value, str) else to_json(value)
    return b"data: " + data + b"\n\n"
