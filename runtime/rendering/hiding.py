"""Disguises every text of a message or a tool before a template sees it.

Arguments of calls are taken apart first: a control token written with JSON escapes is one when a template
prints the value.
"""

import json
from collections.abc import Iterator, Sequence
from typing import cast

from pydantic import JsonValue

from sostenuto.runtime.rendering.vocabulary import Disguise
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Message, ToolCall


def texts_of(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Iterator[str]:
    """Every text that a template may print."""
    for message in messages:
        yield from (message.role, message.content, message.reasoning, message.name)
        for call in message.tool_calls:
            yield from (call.name, _unescaped(call.arguments))
    for tool in tools:
        yield json.dumps(tool.as_function(), ensure_ascii=False)


def hide_message(message: Message, disguise: Disguise) -> Message:
    hide = disguise.hide
    calls = tuple(ToolCall(hide(c.name), _hide_arguments(c.arguments, disguise)) for c in message.tool_calls)
    return Message(
        hide(message.role), hide(message.content), calls, hide(message.reasoning), hide(message.name)
    )


def hide_tool(tool: ToolSchema, disguise: Disguise) -> ToolSchema:
    parameters = cast("dict[str, JsonValue]", _hide_value(tool.parameters, disguise))
    return ToolSchema(
        name=disguise.hide(tool.name),
        description=disguise.hide(tool.description),
        parameters=parameters,
        timeout_s=tool.timeout_s,
        serial=tool.serial,
    )


def _hide_arguments(arguments: str, disguise: Disguise) -> str:
    try:
        value = cast("JsonValue", json.loads(arguments))
    except (ValueError, RecursionError):
        return disguise.hide(arguments)
    return disguise.hide(json.dumps(_hide_value(value, disguise), ensure_ascii=False))


def _unescaped(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments


def _hide_value(value: JsonValue, disguise: Disguise) -> JsonValue:
    if isinstance(value, str):
        return disguise.hide(value)
    if isinstance(value, list):
        return [_hide_value(item, disguise) for item in value]
    if isinstance(value, dict):
        return {disguise.hide(key): _hide_value(item, disguise) for key, item in value.items()}
    return value
