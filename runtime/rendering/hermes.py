"""The Hermes form of a turn: `<think>...</think>` text `<tool_call>{"name", "arguments"}</tool_call>`.

Reading never raises: what is malformed becomes a sentence for the policy, and then no call of the turn
counts, so that a half-understood turn has no effects.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from sostenuto.tools.wire import ToolSchema
from sostenuto.types import ToolCall

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_FORM = f'{CALL_OPEN}{{"name": "...", "arguments": {{...}}}}{CALL_CLOSE}'


@dataclass(frozen=True, slots=True)
class HermesTurn:
    """What a text came to.  With a problem, `content` is the whole text and `calls` is empty."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    problem: str | None = None


def read(text: str, *, thinking: bool = False) -> HermesTurn:
    """Take a turn apart; `thinking` when the prompt has already opened the reasoning."""
    reasoning, body, closed = _split_reasoning(text, thinking=thinking)
    if not closed:
        problem = f"The turn ended inside its reasoning: close it with {THINK_CLOSE} before the answer."
        return HermesTurn("", reasoning, problem=problem)
    found = _Calls()
    rest = _take_calls(body, found)
    if found.problem:
        return HermesTurn(body.strip(), reasoning, problem=found.problem)
    return HermesTurn(rest.strip(), reasoning, tuple(found.calls))


def write_call(call: ToolCall) -> str:
    """One call as the policy would write it."""
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{CALL_OPEN}\n{{"name": {name}, "arguments": {call.arguments}}}\n{CALL_CLOSE}'


def write(content: str, calls: Sequence[ToolCall]) -> str:
    """Text and calls of a turn, without its reasoning."""
    return "\n".join([content] * bool(content) + [write_call(call) for call in calls])


def write_reasoning(reasoning: str) -> str:
    return f"{THINK_OPEN}\n{reasoning}\n{THINK_CLOSE}\n\n"


def describe(tools: Sequence[ToolSchema]) -> str:
    """Tools and the form of a call, for the system message of a template that does not know tools."""
    lines = [json.dumps(tool.as_function()["function"], ensure_ascii=False) for tool in tools]
    return "\n".join(("You can call these tools:", *lines, f"To call one, write {_FORM}"))


@dataclass(slots=True)
class _Calls:
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    problem: str | None = None


def _split_reasoning(text: str, *, thinking: bool) -> tuple[str, str, bool]:
    """Reasoning, the rest, and whether the reasoning was closed."""
    inside = text
    if text.lstrip().startswith(THINK_OPEN):
        inside = text.lstrip()[len(THINK_OPEN) :]
    elif not thinking:
        return "", text, True
    reasoning, close, body = inside.partition(THINK_CLOSE)
    return reasoning.strip(), body, bool(close)


def _take_calls(body: str, found: _Calls) -> str:
    """Move the calls of `body` into `found`; return the text around them."""
    around: list[str] = []
    position = 0
    while (start := body.find(CALL_OPEN, position)) >= 0:
        around.append(body[position:start].strip())
        position = _take_call(body, start + len(CALL_OPEN), found)
        if found.problem:
            return body
    around.append(body[position:])
    if CALL_CLOSE in around[-1]:
        found.problem = f"{CALL_CLOSE} without {CALL_OPEN} before it: write {_FORM}"
    return "\n".join(part for part in around if part)


def _take_call(body: str, start: int, found: _Calls) -> int:
    """Read the call whose JSON begins at `start`; return where the text goes on."""
    which = f"Tool call {len(found.calls) + 1}"
    while start < len(body) and body[start].isspace():
        start += 1
    try:
        value, end = _DECODER.raw_decode(body, start)
    except (ValueError, RecursionError) as exc:
        reason = getattr(exc, "msg", None) or str(exc)
        found.problem = f"{which} is not valid JSON ({reason}): write {_FORM}"
        return start
    after = body[end:].lstrip()
    if not after.startswith(CALL_CLOSE):
        found.problem = f"{which} is not closed with {CALL_CLOSE} right after its JSON object: write {_FORM}"
        return end
    call = _as_call(value, body[start:end])
    if isinstance(call, str):
        found.problem = f"{which} {call}: write {_FORM}"
    else:
        found.calls.append(call)
    return len(body) - len(after) + len(CALL_CLOSE)


def _as_call(value: object, text: str) -> ToolCall | str:
    """The call that `text` says, or what is wrong with it."""
    if not isinstance(value, dict):
        return "is not a JSON object"
    fields = cast("dict[str, Any]", value)
    name, arguments = fields.get("name"), fields.get("arguments", {})
    if not isinstance(name, str) or not name:
        return 'has no "name"'
    if isinstance(arguments, str):
        return ToolCall(name, arguments)
    if not isinstance(arguments, dict):
        return 'has "arguments" that are not an object'
    return ToolCall(name, written(cast("Any", arguments), text))


def written(arguments: object, text: str) -> str:
    """Arguments as JSON; as they stand in the call `text` where a number is larger than Python's."""
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return _member(text, arguments) or "{}"


def _member(text: str, wanted: object) -> str | None:
    """Of an object's text the part whose value is `wanted`."""
    position = text.find("{") + 1
    while position < len(text):
        try:
            _, end = _DECODER.raw_decode(text, _after(text, position, ","))
            begin = _after(text, end, ":")
            value, position = _DECODER.raw_decode(text, begin)
        except ValueError:
            return None
        if value == wanted:
            return text[begin:position]
    return None


def _after(text: str, position: int, sign: str) -> int:
    """Where the next value begins."""
    rest = text[position:].lstrip().removeprefix(sign).lstrip()
    return len(text) - len(rest)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
