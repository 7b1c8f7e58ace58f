"""Calls whose arguments are spelled out one by one, read again from their text.

    <function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n...</function>       Qwen3.5, Nemotron
    NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...                     GLM
    <invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n...</invoke>   MiniMax, several in a block

The library strips values, and of code that is edited the blanks count; it leaves out a parameter that was
not closed, and half a call must not run.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sostenuto.runtime.rendering import hermes
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import ToolCall

PYTHON_TAG = "<|python_tag|>"
"""Of Llama, before calls of tools that it was trained with."""
_UNREADABLE = object()


@dataclass(frozen=True, slots=True)
class _Form:
    mark: str
    begin: re.Pattern[str]
    """Group 1 is the name of the tool."""
    key: re.Pattern[str]
    """Group 1 is that of an argument."""
    close: re.Pattern[str]
    """Ends a value, and what follows can follow a value."""
    end: re.Pattern[str]
    late: re.Pattern[str] | None = None
    """Ends the last value where models forget to close it."""


_FORMS = (
    _Form(
        "<function=",
        re.compile(r"\s*<function=([^>\n]+)>\n?"),
        re.compile(r"\s*<parameter=([^>\n]+)>\n?"),
        re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>\s*$)"),
        re.compile(r"\s*</function>\s*$"),
        re.compile(r"\n?(?=</function>\s*$)"),
    ),
    _Form(
        "<arg_key>",
        re.compile(r"\s*([^\s<>]+)\s*(?=<arg_key>|$)"),
        re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>"),
        re.compile(r"</arg_value>\s*(?=<arg_key>|$)"),
        re.compile(r"\s*$"),
    ),
    _Form(
        '<invoke name="',
        re.compile(r'\s*<invoke name="([^"\n]+)">\n?'),
        re.compile(r'\s*<parameter name="([^"\n]+)">'),
        re.compile(r"</parameter>\s*(?=<parameter name=|</invoke>\s*(?:<invoke name=|$))"),
        re.compile(r"\s*</invoke>\s*(?=<invoke name=|$)"),
    ),
)


def is_spelled(text: str) -> bool:
    """Whether a call is of one of these forms."""
    return any(form.mark in text for form in _FORMS)


def reread(text: str, tools: Sequence[ToolSchema], known: Sequence[object]) -> list[ToolCall] | None:
    """The calls of a text; None where one is not whole.

    `known`: their arguments as the library has read them; what it made of values that are no texts stays.
    """
    form = next(form for form in _FORMS if form.mark in text)
    calls: list[ToolCall] = []
    position = 0
    while begun := form.begin.match(text, position):
        found = _values(text, begun.end(), form)
        if found is None:
            return None
        values, position = found
        before = known[len(calls)] if len(calls) < len(known) else None
        arguments = _arguments(begun[1].strip(), values, tools, before)
        if arguments is None:
            return None
        calls.append(ToolCall(begun[1].strip(), hermes.written(arguments, text)))
        if position == len(text):
            break
    return calls if calls and position == len(text) else None


def _arguments(
    name: str, values: Mapping[str, str], tools: Sequence[ToolSchema], known: object
) -> dict[str, object] | None:
    kinds = _kinds(name, tools)
    before = cast("Mapping[str, object]", known if isinstance(known, Mapping) else {})
    typed: dict[str, object] = {
        key: before[key]
        if key in before and not isinstance(before[key], str)
        else _typed(value, kinds.get(key, frozenset()))
        for key, value in values.items()
    }
    return None if any(value is _UNREADABLE for value in typed.values()) else typed


def _values(text: str, position: int, form: _Form) -> tuple[dict[str, str], int] | None:
    """Of one call, and where it ends."""
    found: dict[str, str] = {}
    while key := form.key.match(text, position):
        close = form.close.search(text, key.end())
        if close is None and form.late is not None:
            close = form.late.search(text, key.end())
        if close is None:
            return None
        found[key[1].strip()] = text[key.end() : close.start()]
        position = close.end()
    end = form.end.match(text, position)
    return (found, end.end()) if end else None


def _kinds(name: str, tools: Sequence[ToolSchema]) -> dict[str, frozenset[str]]:
    """The JSON types of a tool's parameters, where they are said."""
    schemas = (tool.parameters for tool in tools if tool.name == name)
    properties: object = next(schemas, dict[str, Any]()).get("properties")
    if not isinstance(properties, dict):
        return {}
    return {
        key: _types_of(cast("Mapping[str, Any]", value))
        for key, value in cast("dict[str, object]", properties).items()
        if isinstance(value, dict)
    }


def _types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    given: object = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    return frozenset(map(str, cast("list[object]", given))) if isinstance(given, list) else frozenset()


def _typed(value: str, kinds: frozenset[str]) -> object:
    """A text as it is where a text may stand; else JSON, or as Python writes it."""
    if kinds <= {"string"}:
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            found: object = read(value.strip())
            json.dumps(found, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return found
    return value if not kinds or "string" in kinds else _UNREADABLE


def python_tagged(text: str) -> tuple[str, ToolCall] | None:
    """What Llama says before its mark for calls of tools that it was trained with, and the call after it."""
    before, mark, after = text.partition(PYTHON_TAG)
    try:
        found: object = json.loads(after) if mark else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    fields = cast("Mapping[str, object]", found)
    name, arguments = fields.get("name"), fields.get("parameters", fields.get("arguments", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return before.strip(), ToolCall(name, hermes.written(cast("object", arguments), after))
