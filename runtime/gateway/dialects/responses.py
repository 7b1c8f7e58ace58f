"""`/v1/responses`, as OpenAI's clients speak it.

What one reply ends with may be named by the next call (`previous_response_id`), as long as its program is
there.  Reasoning is an item of its own, in plain text.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from uuid import uuid4

from pydantic_core import to_json

from sostenuto.runtime.engines.wire import FinishReason
from sostenuto.runtime.gateway.bodies import read
from sostenuto.runtime.gateway.dialects.dialect import COMMENT, Call, Chain, Json, Served
from sostenuto.runtime.gateway.dialects.openai import error_json, logprobs_json
from sostenuto.runtime.gateway.dialects.responses_body import ResponsesBody
from sostenuto.runtime.gateway.replies import Past
from sostenuto.runtime.gateway.turn import Ask, Refused, Told
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
        is_cut = one.reply.finish_reason is FinishReason.LENGTH
        return _response(call, served) | {
            "status": _status(one),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _output(call, one, served),
            "usage": _usage(one),
        }

    def events(self, call: Call, told: Sequence[Told], served: Served) -> Iterator[bytes]:
        numbers = count()
        for name, data in self._events(call, told, served):
            yield _event(name, {"type": name, "sequence_number": next(numbers), **data})

    def _events(self, call: Call, told: Sequence[Told], served: Served) -> Iterator[tuple[str, Json]]:
        begun = _response(call, served)
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        whole = self.reply(call, told, served)
        for index, item in enumerate(whole["output"]):
            yield "response.output_item.added", {"output_index": index, "item": _empty(item)}
            for name, data in _parts(item):
                yield name, {"output_index": index, "item_id": item["id"], **data}
            yield "response.output_item.done", {"output_index": index, "item": item}
        yield f"response.{whole['status']}", {"response": whole}

    def error(self, error: Refused) -> Json:
        return error_json(error)

    def error_event(self, error: Refused) -> bytes:
        """With the keys of the event, and with that by which clients tell errors in streams."""
        told = error_json(error)
        return _event("error", {**told["error"], **told, "type": "error"})


def _ask(body: ResponsesBody, served: Served, past: Past) -> tuple[Ask, Past]:
    """The instructions hold for one call: they are no part of what is kept."""
    known = body.gone_on(past)
    instructions = (Message("system", body.instructions),) if body.instructions else ()
    ask = Ask(
        messages=instructions + known.messages,
        tools=body.schemas(),
        sampling=body.sampling(served.stop_token_ids, body.grammar()),
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


def _output(call: Call, told: Told, served: Served) -> list[Json]:
    """The reply in items; there is always one of the message or a call."""
    assert told.turn is not None
    message, key = told.turn.message, call.id.removeprefix("resp_")
    items: list[Json] = []
    if message.reasoning:
        said = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append({"id": f"rs_{key}", "type": "reasoning", "summary": [], "content": said})
    if message.content or not message.tool_calls:
        content: Json = {"type": "output_text", "text": message.content, "annotations": []}
        content["logprobs"] = _logprobs(call.body, told, served)
        own: Json = {"id": f"msg_{key}", "type": "message", "status": _status(told), "role": "assistant"}
        items.append({**own, "content": [content]})
    for index, (id_, made) in enumerate(
        zip(_call_ids(call.id, message.tool_calls), message.tool_calls, strict=True)
    ):
        own = {"id": f"fc_{key}_{index}", "type": "function_call", "status": "completed", "call_id": id_}
        items.append({**own, "name": made.name, "arguments": made.arguments})
    return items


def _logprobs(body: ResponsesBody, told: Told, served: Served) -> list[Json]:
    if not body.wants_logprobs:
        return []
    reply = told.reply
    return logprobs_json(served.texts.logprobs(reply.token_ids, reply.logprobs, reply.top_logprobs))[
        "content"
    ]


def _empty(item: Json) -> Json:
    """An item as it begins in a stream."""
    if item["type"] == "function_call":
        return {**item, "arguments": "", "status": "in_progress"}
    if item["type"] == "message":
        return {**item, "content": [], "status": "in_progress"}
    return {**item, "content": []}


def _parts(item: Json) -> Iterator[tuple[str, Json]]:
    """What comes between the beginning and the end of an item."""
    if item["type"] == "function_call":
        arguments = item["arguments"]
        yield "response.function_call_arguments.delta", {"delta": arguments}
        yield "response.function_call_arguments.done", {"arguments": arguments, "name": item["name"]}
        return
    part = item["content"][0]
    kind, more = part["type"], {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield "response.content_part.added", {"content_index": 0, "part": {**part, "text": ""}}
    yield f"response.{kind}.delta", {"content_index": 0, "delta": part["text"], **more}
    yield f"response.{kind}.done", {"content_index": 0, "text": part["text"], **more}
    yield "response.content_part.done", {"content_index": 0, "part": part}


def _usage(told: Told) -> Json:
    prompt, completion = len(told.prompt_token_ids), len(told.reply.token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": told.reply.cached_tokens},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def _event(name: str, data: Json) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + to_json(data) + b"\n\n"
