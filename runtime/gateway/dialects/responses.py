"""`/v1/responses`, as OpenAI's clients speak it.

What one reply ends with may be named by the next call (`previous_response_id`), as long as its program is
there.  Reasoning is an item of its own, in plain text.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from time import monotonic
from uuid import uuid4

from pydantic_core import to_json

from sostenuto.runtime.engines.wire import FinishReason, WireSpan
from sostenuto.runtime.gateway.bodies import read
from sostenuto.runtime.gateway.choosing import held_to
from sostenuto.runtime.gateway.dialects.dialect import COMMENT, Call, Chain, Json, Live, Served
from sostenuto.runtime.gateway.dialects.openai import error_json, logprobs_json
from sostenuto.runtime.gateway.dialects.responses_body import ResponsesBody
from sostenuto.runtime.gateway.replies import Past
from sostenuto.runtime.gateway.turn import Ask, Refused, Told
from sostenuto.runtime.gateway.unfolding import Delta, Unfolding
from sostenuto.types import Message, ToolCall


class ResponsesDialect:
    keep_alive = COMMENT

    def read(self, body: Json, served: Served) -> Call:
        wanted = read(ResponsesBody, body)
        served.check(wanted.model)
        wanted.check()
        id_ = f"resp_{uuid4().hex}"
        chain = Chain(
            previous=wanted.previous_response_id or "",
            ask=partial(_ask, wanted, served),
            past=None if wanted.store is False else partial(_with_reply, id_),
        )
        return Call(asks=(), streams=bool(wanted.stream), body=wanted, id=id_, chain=chain)

    def reply(self, call: Call, told: Sequence[Told], served: Served) -> Json:
        (one,) = told
        return _whole(call, one, served)

    def events(self, call: Call, told: Sequence[Told], served: Served) -> Iterator[bytes]:
        (one,) = told
        return ResponseStream(call, served).end(one)

    def live(self, call: Call, served: Served) -> Live:
        return ResponseStream(call, served)

    def error(self, error: Refused) -> Json:
        return error_json(error)

    def error_event(self, error: Refused) -> bytes:
        """With the keys of the event, and with that by which clients tell errors in streams."""
        told = error_json(error)
        return _event("error", {**told["error"], **told, "type": "error"})


class ResponseStream:
    """One response in events: text as it is certain, calls and the end when the turn is over."""

    def __init__(self, call: Call, served: Served) -> None:
        self._call = call
        self._served = served
        (ask,) = call.asks
        self._text = Unfolding(served.renderer, ask.tools, monotonic, stops=ask.sampling.stop_strings)
        self._numbers = count()
        self._items: dict[str, int] = {}
        """By id, those that have been told, and their place."""
        self._open: Json | None = None
        """The item that is being told, with its text so far."""
        self._has_begun = False

    def span(self, span: WireSpan) -> Iterator[bytes]:
        delta = self._text.feed(span.token_ids)
        if delta:
            yield from self._tell(delta)

    def end(self, told: Told) -> Iterator[bytes]:
        assert told.turn is not None
        whole = _whole(self._call, told, self._served)
        yield from self._tell(self._text.end(told.turn))
        for item in whole["output"]:
            if item["id"] not in self._items:
                yield from self._close()
                yield from self._start(item)
                yield self._delta(item, item.get("arguments") or _said(item))
            if self._open is not None and self._open["id"] == item["id"]:
                self._open = item
        yield from self._close()
        yield self._event(f"response.{whole['status']}", response=whole)

    def _tell(self, delta: Delta) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            begun = _response(self._call, self._served)
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
        if delta.reasoning:
            yield from self._say(_reasoning(self._call, ""), delta.reasoning)
        if delta.content:
            yield from self._say(_message(self._call, "", "in_progress"), delta.content)

    def _say(self, empty: Json, text: str) -> Iterator[bytes]:
        if self._open is None or self._open["id"] != empty["id"]:
            yield from self._close()
            yield from self._start(empty)
        part = empty["content"][0]
        self._open = {**empty, "content": [{**part, "text": _said(self._open) + text}]}
        yield self._delta(empty, text)

    def _start(self, item: Json) -> Iterator[bytes]:
        """An item as it begins, without its text."""
        self._items[item["id"]] = len(self._items)
        emptied: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        in_progress = {"status": "in_progress"} if "status" in item else {}
        self._open = item
        yield self._of_item("response.output_item.added", item={**item, **emptied, **in_progress})
        if "content" in item:
            part = {**item["content"][0], "text": ""}
            yield self._of_item("response.content_part.added", content_index=0, part=part)

    def _delta(self, item: Json, text: str) -> bytes:
        if item["type"] == "function_call":
            return self._of_item("response.function_call_arguments.delta", delta=text)
        part = item["content"][0]
        return self._of_item(f"response.{part['type']}.delta", content_index=0, delta=text, **_logs(part))

    def _close(self) -> Iterator[bytes]:
        item = self._open
        if item is None:
            return
        if item["type"] == "function_call":
            more = {"arguments": item["arguments"], "name": item["name"]}
            yield self._of_item("response.function_call_arguments.done", **more)
        else:
            part = item["content"][0]
            name = f"response.{part['type']}.done"
            yield self._of_item(name, content_index=0, text=part["text"], **_logs(part))
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._of_item("response.output_item.done", item=item)
        self._open = None

    def _of_item(self, event: str, /, **data: object) -> bytes:
        assert self._open is not None
        id_ = self._open["id"]
        return self._event(event, output_index=self._items[id_], item_id=id_, **data)

    def _event(self, name: str, /, **data: object) -> bytes:
        return _event(name, {"type": name, "sequence_number": next(self._numbers), **data})


def _ask(body: ResponsesBody, served: Served, past: Past) -> tuple[Ask, Past]:
    """The instructions hold for one call: they are no part of what is kept."""
    known = body.gone_on(past)
    instructions = (Message("system", body.instructions),) if body.instructions else ()
    choice = body.choice()
    grammar, held_by = held_to(choice, served, body.grammar(), "text.format")
    ask = Ask(
        messages=instructions + known.messages,
        tools=choice.tools,
        sampling=body.sampling(served.stop_token_ids, grammar),
        held_by=held_by,
        seeded=body.seed is not None,
        max_tokens=body.max_output_tokens,
        top_logprobs=(body.top_logprobs or 0) if body.wants_logprobs else 0,
    )
    return ask, known


def _with_reply(id_: str, known: Past, told: Told) -> Past:
    assert told.turn is not None
    message = told.turn.message
    calls = tuple(zip(_call_ids(id_, message.tool_calls), message.tool_calls, strict=True))
    return Past((*known.messages, message), known.calls + calls)


def _call_ids(id_: str, calls: Sequence[ToolCall]) -> list[str]:
    return [f"call_{id_.removeprefix('resp_')}_{index}" for index in range(len(calls))]


def _response(call: Call, served: Served) -> Json:
    """Before anything was said."""
    body: ResponsesBody = call.body
    choice = body.tool_choice or "auto"
    return {
        "id": call.id,
        "object": "response",
        "created_at": served.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": served.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _status(told: Told) -> str:
    return "incomplete" if told.reply.finish_reason is FinishReason.LENGTH else "completed"


def _whole(call: Call, told: Told, served: Served) -> Json:
    is_cut = told.reply.finish_reason is FinishReason.LENGTH
    return _response(call, served) | {
        "status": _status(told),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _output(call, told, served),
        "usage": _usage(told, served),
    }


def _output(call: Call, told: Told, served: Served) -> list[Json]:
    """The reply in items; there is always one of the message or a call."""
    assert told.turn is not None
    message, key = told.turn.message, call.id.removeprefix("resp_")
    items: list[Json] = [_reasoning(call, message.reasoning)] if message.reasoning else []
    if message.content or not message.tool_calls:
        logprobs = _logprobs(call.body, told, served)
        items.append(_message(call, message.content, _status(told), logprobs))
    ids = _call_ids(call.id, message.tool_calls)
    for index, (id_, made) in enumerate(zip(ids, message.tool_calls, strict=True)):
        own: Json = {
            "id": f"fc_{key}_{index}",
            "type": "function_call",
            "status": "completed",
            "call_id": id_,
        }
        items.append({**own, "name": made.name, "arguments": made.arguments})
    return items


def _reasoning(call: Call, text: str) -> Json:
    said = {"type": "reasoning_text", "text": text}
    return {
        "id": f"rs_{call.id.removeprefix('resp_')}",
        "type": "reasoning",
        "summary": [],
        "content": [said],
    }


def _message(call: Call, text: str, status: str, logprobs: Sequence[Json] = ()) -> Json:
    said = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    id_ = f"msg_{call.id.removeprefix('resp_')}"
    return {"id": id_, "type": "message", "status": status, "role": "assistant", "content": [said]}


def _said(item: Json | None) -> str:
    return item["content"][0]["text"] if item is not None and "content" in item else ""


def _logs(part: Json) -> Json:
    return {"logprobs": part["logprobs"]} if "logprobs" in part else {}


def _logprobs(body: ResponsesBody, told: Told, served: Served) -> list[Json]:
    if not body.wants_logprobs:
        return []
    reply = told.reply
    return logprobs_json(served.texts.logprobs(reply.token_ids, reply.logprobs, reply.top_logprobs))[
        "content"
    ]


def _usage(told: Told, served: Served) -> Json:
    reasoning = told.turn.message.reasoning if told.turn else ""
    prompt, completion = len(told.prompt_token_ids), len(told.reply.token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": told.reply.cached_tokens},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": len(served.texts.encode(reasoning))},
        "total_tokens": prompt + completion,
    }


def _event(name: str, data: Json) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + to_json(data) + b"\n\n"
