"""Structural tags in llguidance's Lark: the part of xgrammar's format that tool calls need.

    const_string, json_schema, regex, any_text, sequence, or, optional, tag, tags_with_separator,
    triggered_tags

A control token that a text names is that one token, and nothing that is free or JSON has one in it.
Text that excludes something, and a regex, go on in a tag to the first place where its end can stand.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

Json = dict[str, Any]

THOUGHT_TOKENS = 1024
"""Any text that something follows ends by then."""
_ANYTHING = "/(?s:.*)/"
_JSON = {"whitespace_pattern": " ?", "key_separator": ": ", "item_separator": ", "}
_DEPTH = 32


def lark_of(text: str, controls: Mapping[str, int]) -> str:
    """The grammar; ValueError names what of the tag is wrong or not served."""
    try:
        tag: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(tag, dict) or cast("Json", tag).get("type") != "structural_tag":
        raise ValueError('type: a structural tag has "structural_tag" there')
    return _Writer(controls).grammar(cast("Json", tag).get("format"))


class _Writer:
    def __init__(self, controls: Mapping[str, int]) -> None:
        self._controls = controls
        longest_first = sorted(controls, key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if controls else None
        self._rules: dict[str, str] = {}
        """Names of the rules by what they say; a name begins with a capital where it says one lexeme."""
        self._depth = 0
        self._of: dict[str, Callable[[Json, str], str]] = {
            "const_string": lambda format_, where: self._literal(_text(format_, "value", where)),
            "json_schema": self._json,
            "regex": lambda format_, where: _pattern(_text(format_, "pattern", where)),
            "any_text": lambda _format, _where: self._rule(_ANYTHING, f"[max_tokens={THOUGHT_TOKENS}]"),
            "sequence": lambda format_, where: " ".join(self._each(format_, "elements", where)),
            "or": lambda format_, where: f"({' | '.join(self._each(format_, 'elements', where))})",
            "optional": lambda format_, where: f"({self._one(format_.get('content'), f'{where}.content')})?",
            "tag": self._tag,
            "tags_with_separator": self._separated,
            "triggered_tags": self._triggered,
        }

    def grammar(self, format_: object) -> str:
        start = self._one(format_, "format")
        rules = (f"{name}{body}" for body, name in self._rules.items())
        return "\n".join((f"start: {start}", *rules))

    def _one(self, format_: object, where: str) -> str:
        kind = cast("Json", format_).get("type") if isinstance(format_, dict) else None
        write = self._of.get(kind) if isinstance(kind, str) else None
        if write is None:
            raise ValueError(f"{where}.type: {kind!r} is not served; use {', '.join(sorted(self._of))}")
        if self._depth >= _DEPTH:
            raise ValueError(f"{where}: it nests more than {_DEPTH} deep")
        self._depth += 1
        written = write(cast("Json", format_), where)
        self._depth -= 1
        return written

    def _each(self, format_: Json, key: str, where: str) -> list[str]:
        found = format_.get(key)
        if not isinstance(found, list) or not found:
            raise ValueError(f"{where}.{key}: give a list that is not empty")
        return [self._one(part, f"{where}.{key}.{i}") for i, part in enumerate(cast("list[object]", found))]

    def _json(self, format_: Json, where: str) -> str:
        schema: object = format_.get("json_schema")
        if not isinstance(schema, dict):
            raise _wrong(f"{where}.json_schema: give a schema that is an object")
        return f"%json {json.dumps({'x-guidance': _JSON, **cast('Json', schema)}, ensure_ascii=False)}"

    def _tag(self, format_: Json, where: str, begin: str | None = None) -> str:
        """`begin` stands for what is left of it where its trigger has been written."""
        begun = _text(format_, "begin", where) if begin is None else begin
        end = _text(format_, "end", where)
        free = _free(format_.get("content"), f"{where}.content")
        if free is None:
            content = f"{self._one(format_.get('content'), f'{where}.content')} {self._literal(end)}"
        else:
            content = self._up_to(free, end)
        return self._rule(f"{self._literal(begun)} {content}")

    def _up_to(self, pattern: str, end: str) -> str:
        """What matches, and the first end of it."""
        plain, *rest = self._control.split(end, maxsplit=1) if self._control else [end]
        text = self._rule(_pattern(f"{pattern}{_escaped(plain)}"), "[lazy]" if plain else "")
        return f"{text} {self._literal(''.join(rest))}" if rest else text

    def _separated(self, format_: Json, where: str) -> str:
        one = f"({' | '.join(self._each(format_, 'tags', where))})"
        if not format_.get("stop_after_first"):
            one = f"({one} ({self._literal(_text(format_, 'separator', where))} {one})*)"
        return one if format_.get("at_least_one") else f"{one}?"

    def _triggered(self, format_: Json, where: str) -> str:
        """Text and tags; a trigger is always the beginning of a tag."""
        triggers, tags = format_.get("triggers"), format_.get("tags")
        if not isinstance(triggers, list) or not isinstance(tags, list) or not triggers or not tags:
            raise ValueError(f"{where}: give triggers and tags")
        (trigger, *more) = cast("list[object]", triggers)
        if more or not isinstance(trigger, str) or not trigger or format_.get("at_least_one"):
            raise ValueError(f"{where}.triggers: one trigger is served, without at_least_one")
        begun = [_begun(tag, trigger, f"{where}.tags.{i}") for i, tag in enumerate(cast("list[Json]", tags))]
        parts = zip(cast("list[Json]", tags), begun, strict=True)
        rest = [self._tag(tag, f"{where}.tags.{i}", left) for i, (tag, left) in enumerate(parts)]
        text = self._rule(f"{_ANYTHING} & ~{_pattern(f'(?s:.*){_escaped(trigger)}(?s:.*)')}", terminal=True)
        called = f"{self._until(trigger, text)} ({' | '.join(rest)})"
        return f"({called})? {text}?" if format_.get("stop_after_first") else f"({called})* {text}?"

    def _until(self, trigger: str, text: str) -> str:
        """Text, and then the trigger.  Text could not end before characters that it may go on with."""
        if self._control and self._control.match(trigger):
            return f"{text}? {self._literal(trigger)}"
        return self._rule(_pattern(f"(?s:.*){_escaped(trigger)}"), "[lazy]")

    def _literal(self, text: str) -> str:
        parts = self._control.split(text) if self._control else [text]
        written = [
            f"<[{self._controls[part]}]>" if part in self._controls else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        ]
        return " ".join(written) or '""'

    def _rule(self, body: str, options: str = "", *, terminal: bool = False) -> str:
        name = f"{'T' if terminal else 't'}_{len(self._rules)}"
        return self._rules.setdefault(f"{options}: {body}", name)


def _free(format_: object, where: str) -> str | None:
    """The pattern of a content that is text of its tag's; None: it is another."""
    if not isinstance(format_, dict):
        return None
    one = cast("Json", format_)
    if one.get("type") == "regex":
        return f"({_text(one, 'pattern', where)})"
    return "(?s:.*)" if one.get("type") == "any_text" and one.get("excludes") else None


def _text(format_: Json, key: str, where: str) -> str:
    found = format_.get(key)
    if not isinstance(found, str):
        raise _wrong(f"{where}.{key}: give a text")
    return found


def _wrong(problem: str) -> ValueError:
    return ValueError(problem)


def _begun(tag: object, trigger: str, where: str) -> str:
    """What is left of a tag's beginning after its trigger."""
    begin = _text(cast("Json", tag), "begin", where) if isinstance(tag, dict) else ""
    if not begin.startswith(trigger):
        raise ValueError(f"{where}.begin: it has to begin with the trigger {trigger!r}")
    return begin.removeprefix(trigger)


def _escaped(text: str) -> str:
    """As a pattern, on one line."""
    return "".join({"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(c, re.escape(c)) for c in text)


def _pattern(pattern: str) -> str:
    return f"/{pattern.replace('/', chr(92) + '/')}/"
