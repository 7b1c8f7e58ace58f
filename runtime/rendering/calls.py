"""How a model writes tool calls, in so far as a grammar can say it.

A form is read off from what a renderer writes and kept only where its parser reads it back as what was
meant, so that whatever follows the form is a call.  Arguments are written as one JSON object or are spelled
out one by one.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol, runtime_checkable

from sostenuto.errors import ConfigError
from sostenuto.runtime.rendering import hermes
from sostenuto.runtime.rendering.renderer import Turn
from sostenuto.runtime.rendering.spelling import Spelling, read_spelling
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Message, ToolCall


@dataclass(frozen=True, slots=True)
class CallForm:
    """A turn of calls as text: `lead`, `open`, one call after the other with `separator` between, `close`.

    Control tokens are in the texts by their names.
    """

    begin: str
    """Of a call, before the name."""
    middle: str
    """Between name and arguments."""
    end: str
    separator: str | None = "\n"
    """None: a turn has one call."""
    open: str = ""
    close: str = ""
    lead: str | None = ""
    """Before everything, where nothing is thought; None: it is always thought first."""
    thinking: tuple[str, str] | None = None
    """Before and after reasoning; None: nothing is thought."""

    trigger: str = ""
    """What calls alone begin with, and text never; empty: a text might, too."""
    spelling: Spelling | None = None
    """None: arguments are one JSON object."""

    def arguments(self, call: ToolCall) -> str:
        """As they stand in a turn."""
        return self.spelling.written(call.arguments) if self.spelling else call.arguments

    def written(self, calls: list[ToolCall], reasoning: str = "") -> str:
        """A turn of these calls, without what ends it."""
        texts = [f"{self.begin}{call.name}{self.middle}{self.arguments(call)}{self.end}" for call in calls]
        lead = self.lead or ""
        if self.thinking and (reasoning or self.lead is None):
            lead = f"{self.thinking[0]}{reasoning}{self.thinking[1]}"
        return f"{lead}{self.open}{(self.separator or '').join(texts)}{self.close}"


@runtime_checkable
class FormsCalls(Protocol):
    """A renderer that knows the form of calls."""

    @property
    def call_form(self) -> CallForm | None:
        """None: it cannot be put into a grammar."""
        ...


_BEFORE = (Message("user", "Hello"),)
_TEXT, _THOUGHT = "Zanzibar", "Xylophones"
_CALLS = [
    ToolCall("quetzal_tool", '{"city": "Ouagadougou"}'),
    ToolCall("narwhal_tool", '{"town": "Yaoundé", "at": [{"x": 1}]}'),
]
TRIED_TOOLS = (
    ToolSchema(
        name="quetzal_tool",
        description="",
        parameters={"type": "object", "properties": {"city": {"type": "string"}}},
        timeout_s=1.0,
    ),
    ToolSchema(
        name="narwhal_tool",
        description="",
        parameters={
            "type": "object",
            "properties": {"town": {"type": "string"}, "at": {"type": "array", "items": {"type": "object"}}},
        },
        timeout_s=1.0,
    ),
)
"""What a form is tried with; some parsers go by the types of parameters."""


def hermes_form(*, opens_reasoning: bool, marks_reasoning: bool) -> CallForm | None:
    """As `hermes` reads it.

    `opens_reasoning`: the prompt does.  `marks_reasoning`: its marks are tokens, which no text holds.
    """
    if opens_reasoning and not marks_reasoning:
        return None
    before = "" if opens_reasoning else f"{hermes.THINK_OPEN}\n"
    return CallForm(
        f'{hermes.CALL_OPEN}\n{{"name": "',
        '", "arguments": ',
        f"}}\n{hermes.CALL_CLOSE}",
        lead=None if opens_reasoning else "",
        thinking=(before, f"{hermes.THINK_CLOSE}\n\n") if marks_reasoning else None,
        trigger=hermes.CALL_OPEN,
    )


def read_form(
    write: Callable[[tuple[Message, ...], Message], str],
    parse: Callable[[str], Turn],
    units: Callable[[str], list[str]],
) -> CallForm | None:
    """The form of what `write` writes and `parse` reads, both without the token that ends a turn.

    `parse` knows `TRIED_TOOLS`.  `units` cuts a text into control tokens and single characters.
    """
    for read in (_form, _thought_form):
        try:
            form = read(lambda turn: write(_BEFORE, turn), units)
        except (ConfigError, ValueError):
            continue
        return _proven(form, parse, units)
    return None


def _form(write: Callable[[Message], str], units: Callable[[str], list[str]]) -> CallForm:
    """ValueError where arguments stand neither as JSON nor one by one."""
    first = _CALLS[0]
    lead = write(Message("assistant", _TEXT)).partition(_TEXT)[0]
    form = _of_one(lambda calls: write(Message("assistant", "", calls)).removeprefix(lead), lead)
    thought = write(Message("assistant", "", (first,), _THOUGHT))
    opened, found, rest = thought.partition(_THOUGHT)
    begun = form.begin + first.name
    closed = rest[: rest.find(begun)] if found and begun in rest else ""
    # Blanks before the mark that ends it belong to the reasoning.
    form = replace(form, thinking=(opened, closed.lstrip()) if closed.strip() else None)
    try:
        both = write(Message("assistant", "", tuple(_CALLS)))
    except ConfigError:
        # Some templates know one call a turn.
        return form
    return _split(form, both.removeprefix(lead), units)


def _thought_form(write: Callable[[Message], str], units: Callable[[str], list[str]]) -> CallForm:
    """Where a turn can be written only with what was thought before it."""

    def thought(turn: Message) -> str:
        return write(replace(turn, reasoning=_THOUGHT))

    opened, found, rest = thought(Message("assistant", _TEXT)).partition(_THOUGHT)
    closed = rest.partition(_TEXT)[0]
    if not (found and closed):
        raise ValueError("nothing parts what is thought from what is said")
    lead = f"{opened}{_THOUGHT}{closed}"
    form = _form(lambda turn: thought(turn).removeprefix(lead), units)
    return replace(form, lead=None, thinking=(opened, closed.lstrip()))


def _of_one(write: Callable[[tuple[ToolCall, ...]], str], lead: str) -> CallForm:
    """Of a turn with one call."""
    first = _CALLS[0]
    text = write((first,))
    if first.arguments in text:
        before, middle, end = _around(text, first)
        return CallForm(before, middle, end, separator=None, lead=lead)
    around = read_spelling(write)
    return CallForm(
        around.before, around.middle, around.end, separator=None, lead=lead, spelling=around.spelling
    )


def _around(text: str, call: ToolCall) -> tuple[str, str, str]:
    before, named, rest = text.partition(call.name)
    middle, found, end = rest.partition(call.arguments)
    if not (named and found):
        raise ValueError(f"no arguments in {text!r}")
    return before, middle, end


def _split(form: CallForm, both: str, units: Callable[[str], list[str]]) -> CallForm:
    """Tell what stands around all calls from what stands around each."""
    first, second = _CALLS
    head, _, rest = both.partition(form.arguments(first))
    between, _, tail = rest.partition(second.name)
    after = f"{form.middle}{form.arguments(second)}{form.end}"
    if head != form.begin + first.name + form.middle or tail != after:
        return form
    begin = "".join(_common(units(form.begin)[::-1], units(between)[::-1])[::-1])
    between = between[: len(between) - len(begin)]
    end = "".join(_common(units(form.end), units(between)))
    return replace(
        form,
        open=form.begin[: len(form.begin) - len(begin)],
        begin=begin,
        end=end,
        close=form.end[len(end) :],
        separator=between[len(end) :],
    )


def _common(left: list[str], right: list[str]) -> list[str]:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return [unit for unit, _ in same]


def _proven(
    form: CallForm, parse: Callable[[str], Turn], units: Callable[[str], list[str]]
) -> CallForm | None:
    """The form in so far as it is read as it is meant."""
    if form.separator is not None and not _reads(form, parse, _CALLS):
        form = replace(form, separator=None)
    if form.thinking and not (
        len(units(form.thinking[1])[0]) > 1 and _reads(form, parse, _CALLS[:1], _THOUGHT)
    ):
        form = replace(form, thinking=None)
    # What stands for no reasoning need not be written where it is read without it.
    leads = [lead for lead in ("", form.lead) if _reads(replace(form, lead=lead), parse, _CALLS[:1])]
    form = replace(form, lead=leads[0] if leads else None)
    begun = "".join(units((form.open + form.begin).lstrip())[:1])
    form = replace(form, trigger=begun if len(begun) > 1 else "")
    return form if form.lead is not None or form.thinking else None


def _reads(form: CallForm, parse: Callable[[str], Turn], calls: list[ToolCall], reasoning: str = "") -> bool:
    turn = parse(form.written(calls, reasoning))
    message = turn.message
    try:
        read = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    except ValueError:
        return False
    meant = [(call.name, json.loads(call.arguments)) for call in calls]
    return turn.problem is None and (read, message.content, message.reasoning) == (meant, "", reasoning)
