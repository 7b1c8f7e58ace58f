"""Which tools a call may or must ask for, and the grammar that holds the model to it.

The grammar is of the form in which the model writes calls: whatever follows it is read as calls of the
tools that are allowed, with arguments that are valid for their schemas.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sostenuto.runtime.engines.wire import Feature, Grammar
from sostenuto.runtime.gateway.dialects.dialect import Served
from sostenuto.runtime.gateway.spelled_arguments import SpellingError, spelled_arguments
from sostenuto.runtime.gateway.turn import Refused
from sostenuto.runtime.rendering.calls import CallForm, FormsCalls
from sostenuto.tools.wire import ToolSchema

Json = dict[str, Any]

CHOICE = "tool_choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The tools of a call, and what the client wants of them."""

    tools: tuple[ToolSchema, ...] = ()
    """What the model is told of."""
    forced: frozenset[str] = frozenset()
    """Names; the turn is a call of one of them.  None: it may be text."""
    several: bool = True
    """Whether a turn may have more calls than one."""
    strict: Mapping[str, str] = field(default_factory=dict[str, str])
    """The keys of the body that ask for valid arguments, by the names of their tools."""


def chosen(
    tools: Sequence[ToolSchema],
    kind: Literal["none", "auto", "required"],
    names: Collection[str] | None = None,
    *,
    several: bool = True,
    strict: Mapping[str, str],
) -> Choice:
    """`names`: the tools that may be called; None: all.  Refused for one that is not there, and for none."""
    if kind == "none":
        return Choice()
    known = {tool.name for tool in tools}
    allowed = known if names is None else frozenset(names)
    if unknown := sorted(allowed - known):
        raise Refused(f"{CHOICE}: {unknown[0]!r} is not among the tools", field=CHOICE)
    if kind == "required":
        if not allowed:
            raise Refused(f"{CHOICE}: there are no tools to choose from", field=CHOICE)
        return Choice(tools=tuple(tools), forced=frozenset(allowed), several=several)
    told = tuple(tool for tool in tools if tool.name in allowed)
    held = {name: key for name, key in strict.items() if name in allowed}
    return Choice(tools=told, several=several, strict=held)


def strict_of(tools: Iterable[tuple[str | None, bool | None]], within: str = "") -> dict[str, str]:
    """The keys that ask for it, of tools with their names and `strict`; `within`: a key of each tool."""
    keys = ((name, is_strict, f"tools.{i}{within}.strict") for i, (name, is_strict) in enumerate(tools))
    return {name: key for name, is_strict, key in keys if name and is_strict}


def held_to(
    choice: Choice, served: Served, text: Grammar | None = None, text_key: str = "response_format"
) -> tuple[Grammar | None, str]:
    """The grammar of a turn, and the key of the body that asks for it.

    `text`: what a text has to be; a call that is allowed may come in its place.
    Refused where it cannot be held to.
    """
    strict = iter(choice.strict.values() if served.strict_tools else ())
    key = CHOICE if choice.forced else next(strict, "")
    form = _form(served)
    if not key:
        with_calls = text is not None and text.json_schema is not None and form and choice.tools
        return (_either(text, form, choice) if with_calls else text), text_key
    if Feature.GRAMMAR not in served.features():
        raise _cannot(key, "not every engine here samples under a grammar; an embedded one needs llguidance")
    if form is None or not (choice.forced or form.trigger):
        raise _cannot(key, "the form in which this model writes calls cannot be put into a grammar")
    if choice.forced:
        return _tag(_opened(form, _calls(form, choice))), key
    if text is not None and text.json_schema is not None:
        return _either(text, form, choice), key
    return _tag(_opened(form, _among_text(form, choice))), key


def _form(served: Served) -> CallForm | None:
    renderer = served.renderer
    return renderer.call_form if isinstance(renderer, FormsCalls) else None


def _cannot(key: str, why: str) -> Refused:
    remedy = "leave it out and check the calls that come"
    if key != CHOICE:
        remedy += ", or set gateway.strict_tools = false"
    return Refused(f"{key}: {why}; {remedy}", field=key, code="unsupported")


def _tag(format_: Json) -> Grammar:
    return Grammar(structural_tag=json.dumps({"type": "structural_tag", "format": format_}))


def _opened(form: CallForm, turn: Json) -> Json:
    """A turn after its reasoning, or after what stands for none."""
    ways: list[Json] = []
    if form.thinking is not None:
        before, after = form.thinking
        thought = {"type": "tag", "begin": before, "content": {"type": "any_text"}, "end": after}
        ways.append(_sequence(thought, turn))
    if form.lead is not None:
        ways.append(_sequence(_const(form.lead), turn))
    return ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}


def _calls(form: CallForm, choice: Choice) -> Json:
    """One call, or several."""
    tags = [_call(form, tool, choice) for tool in choice.tools if _may(tool, choice)]
    return _sequence(_const(form.open), _row(form, tags, choice), _const(form.close))


def _row(form: CallForm, tags: Sequence[Json], choice: Choice) -> Json:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.separator or "",
        "at_least_one": True,
        "stop_after_first": _is_single(form, choice),
    }


def _among_text(form: CallForm, choice: Choice) -> Json:
    """Text, and calls wherever they are."""
    tags = [_call(form, tool, choice) for tool in choice.tools]
    if form.open:
        row = _row(form, tags, choice)
        tags: list[Json] = [{"type": "tag", "begin": form.open, "content": row, "end": form.close}]
    return {
        "type": "triggered_tags",
        "triggers": [form.trigger],
        # What is blank before a trigger is text.
        "tags": [{**tag, "begin": str(tag["begin"]).lstrip()} for tag in tags],
        "at_least_one": False,
        "stop_after_first": _is_single(form, choice),
    }


def _is_single(form: CallForm, choice: Choice) -> bool:
    return form.separator is None or not choice.several


def _either(text: Grammar | None, form: CallForm | None, choice: Choice) -> Grammar:
    """Calls, or a text as it has to be."""
    assert text is not None
    assert text.json_schema is not None
    assert form is not None
    answer = {"type": "json_schema", "json_schema": json.loads(text.json_schema)}
    return _tag(_opened(form, {"type": "or", "elements": [_calls(form, choice), answer]}))


def _call(form: CallForm, tool: ToolSchema, choice: Choice) -> Json:
    is_checked = choice.forced or tool.name in choice.strict
    schema = {"type": "object", **(tool.parameters if is_checked else {})}
    return {
        "type": "tag",
        "begin": f"{form.begin}{tool.name}{form.middle}",
        "content": _arguments(form, tool.name, schema, choice),
        "end": form.end,
    }


def _arguments(form: CallForm, name: str, schema: Json, choice: Choice) -> Json:
    if form.spelling is None:
        return {"type": "json_schema", "json_schema": schema}
    try:
        return spelled_arguments(form.spelling, schema)
    except SpellingError as error:
        raise _cannot(choice.strict.get(name, CHOICE), f"{name}: {error}") from error


def _may(tool: ToolSchema, choice: Choice) -> bool:
    return not choice.forced or tool.name in choice.forced


def _const(text: str) -> Json:
    return {"type": "const_string", "value": text}


def _sequence(*elements: Json) -> Json:
    kept = [one for one in elements if one != _const("")]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept}
