"""`/v1/messages` and `/v1/messages/count_tokens`, as Anthropic's clients speak them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, cast
from uuid import uuid4

from pydantic_core import to_json

from sostenuto.runtime.engines.wire import FinishReason, WireSpan
from sostenuto.runtime.gateway.bodies import read
from sostenuto.runtime.gateway.choosing import held_to
from sostenuto.runtime.gateway.dialects.anthropic_body import MessagesBody, PromptBody
from sostenuto.runtime.gateway.dialects.dialect import Call, Json, Live, Served
from sostenuto.runtime.gateway.turn import Ask, Refused, Told
from sostenuto.runtime.gateway.unfolding import Delta, Unfolding
from sostenuto.types import ToolCall

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_TOO_LONG = "prompt is too long: "
"""Clients that shorten a conversation by themselves look for it."""
_UNKNOWN: Json = {
    "input_tokens": 0,
    "cache_read_input_tokens": 0,
    "cache_creation_input_tokens": 0,
    "output_tokens": 0,
}
"""Usage while the turn is sampled."""


class AnthropicDialect:
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def read(self, body: Json, served: Served) -> Call:
        wanted = read(MessagesBody, body)
        served.check(wanted.model)
        choice = wanted.choice()
        grammar, held_by = held_to(choice, served)
        ask = Ask(
            messages=wanted.conversation(),
            tools=choice.tools,
            sampling=wanted.sampling(served.stop_token_ids, grammar),
            held_by=held_by,
            max_tokens=wanted.max_tokens,
        )
        return Call(asks=(ask,), streams=bool(wanted.stream), body=wanted, id=f"msg_{uuid4().hex[:24]}")

    def reply(self, call: Call, told: Sequence[Told], served: Served) -> Json:
        (one,) = told
        body: MessagesBody = call.body
        return _message(call, served) | {
            "content": _content(one, body),
            **_stop(one),
            "usage": _usage(one),
        }

    def events(self, call: Call, told: Sequence[Told], served: Served) -> Iterator[bytes]:
        (one,) = told
        return MessageStream(call, served).end(one)

    def live(self, call: Call, served: Served) -> Live:
        return MessageStream(call, served)

    def error(self, error: Refused) -> Json:
        """With the key that is wrong in `param`, which Anthropic's own errors lack."""
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        too_long = _TOO_LONG if error.code == "context_length_exceeded" else ""
        told = {"type": kind, "message": f"{too_long}{error}", "param": error.field}
        return {"type": "error", "error": told}

    def error_event(self, error: Refused) -> bytes:
        return _event("error", error=self.error(error)["error"])


class MessageStream:
    """One message in events: text as it is certain, tools and the end when the turn is over.

    How long the prompt was is known at its end; the usage there counts, as in Anthropic's own streams.
    """

    def __init__(self, call: Call, served: Served) -> None:
        self._call = call
        self._served = served
        self._body: MessagesBody = call.body
        (ask,) = call.asks
        self._text = Unfolding(served.renderer, ask.tools, monotonic, stops=ask.sampling.stop_strings)
        self._has_begun = False
        self._index = -1
        self._open = ""
        """The type of the block that is being told."""

    def span(self, span: WireSpan) -> Iterator[bytes]:
        delta = self._text.feed(span.token_ids)
        if delta:
            yield from self._begin(_UNKNOWN)
            yield from self._tell(delta)

    def end(self, told: Told) -> Iterator[bytes]:
        assert told.turn is not None
        usage, message = _usage(told), told.turn.message
        yield from self._begin({**usage, "output_tokens": 0})
        yield from self._tell(self._text.end(told.turn))
        if not message.content and not message.tool_calls:
            yield from self._say("text", "")
        yield from self._close()
        for call in message.tool_calls:
            yield from self._use(_tool_use(call))
        yield _event("message_delta", delta=_stop(told), usage=usage)
        yield _event("message_stop")

    def _begin(self, usage: Json) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield _event("message_start", message={**_message(self._call, self._served), "usage": usage})

    def _tell(self, delta: Delta) -> Iterator[bytes]:
        if delta.reasoning and self._body.shows_thinking:
            yield from self._say("thinking", delta.reasoning)
        if delta.content:
            yield from self._say("text", delta.content)

    def _say(self, kind: str, text: str) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._close()
            self._open = kind
            signature = {"signature": ""} if kind == "thinking" else {}
            yield self._start({"type": kind, kind: "", **signature})
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._open:
            yield _event("content_block_stop", index=self._index)
        self._open = ""

    def _use(self, block: Json) -> Iterator[bytes]:
        yield self._start({**block, "input": {}})
        written = json.dumps(block["input"], ensure_ascii=False)
        yield self._delta({"type": "input_json_delta", "partial_json": written})
        yield _event("content_block_stop", index=self._index)

    def _start(self, block: Json) -> bytes:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def counted(body: Json, served: Served) -> Json:
    """The reply to a request for the number of tokens of a prompt; Refused as a call of it would be."""
    wanted = read(PromptBody, body)
    served.check(wanted.model)
    pieces = served.renderer.start(wanted.conversation(), wanted.choice().tools)
    return {"input_tokens": sum(len(piece.token_ids) for piece in pieces)}


def _message(call: Call, served: Served) -> Json:
    """The reply before anything was said."""
    return {
        "id": call.id,
        "type": "message",
        "role": "assistant",
        "model": served.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _content(told: Told, body: MessagesBody) -> list[Json]:
    """The reply in blocks; there is always one, as clients read the first."""
    assert told.turn is not None
    message = told.turn.message
    blocks: list[Json] = []
    if message.reasoning and body.shows_thinking:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    return blocks + [_tool_use(call) for call in message.tool_calls]


def _tool_use(call: ToolCall) -> Json:
    return {
        "type": "tool_use",
        "id": f"toolu_{uuid4().hex[:24]}",
        "name": call.name,
        "input": _object(call.arguments),
    }


def _object(arguments: str) -> Mapping[str, Any]:
    """What clients run needs an object; of anything else the policy is told by the tool's own checks."""
    try:
        value: object = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _stop(told: Told) -> Json:
    matched = told.reply.matched
    if told.reply.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    calls = told.turn is not None and told.turn.problem is None and told.turn.message.tool_calls
    return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}


def _usage(told: Told) -> Json:
    """What is read anew, and what was there already; here one has to be added to the other."""
    cached = min(told.reply.cached_tokens, len(told.prompt_token_ids))
    return {
        "input_tokens": len(told.prompt_token_ids) - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(told.reply.token_ids),
    }


def _event(name: str, /, **more: object) -> bytes:
    data = to_json({"type": name, **more})
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
