"""Arguments that a model spells out one by one: what stands around keys and values.

A text is written as it is, any other value as JSON.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import cast

from sostenuto.types import ToolCall

Write = Callable[[tuple[ToolCall, ...]], str]

_NAME = "quetzal_tool"
_ONE, _OTHER = ("platypus", "Ouagadougou"), ("capybara", "Yamoussoukro")


@dataclass(frozen=True, slots=True)
class Spelling:
    """One argument directly after the other."""

    begin: str
    """Before a key."""
    middle: str
    """Between key and value."""
    end: str
    """After a value."""

    def written(self, arguments: str) -> str:
        """The text of arguments that are given as a JSON object."""
        values = cast("dict[str, object]", json.loads(arguments))
        return "".join(
            f"{self.begin}{key}{self.middle}{plain(value)}{self.end}" for key, value in values.items()
        )


@dataclass(frozen=True, slots=True)
class Around:
    """What stands around the name and the arguments of one call."""

    before: str
    middle: str
    end: str
    spelling: Spelling


def read_spelling(write: Write) -> Around:
    """Read it off from what `write` makes of calls; ValueError where arguments stand otherwise.

    Whether it is read back as it was meant is for the caller to try.
    """
    before, bare = _cut(write((_call(),)), _NAME)
    _, named = _cut(write((_call(_ONE, _OTHER),)), _NAME)
    opened, named = _cut(named, _ONE[0])
    between, named = _cut(named, _ONE[1])
    parted, named = _cut(named, _OTHER[0])
    again, closed = _cut(named, _OTHER[1])
    if between != again:
        raise ValueError("keys and values do not stand alike")
    middle = _whole_marks(_shared(opened, bare))
    end = bare.removeprefix(middle)
    begin = opened.removeprefix(middle)
    if not (begin and between and parted.endswith(begin) and closed.endswith(end)):
        raise ValueError("arguments are not spelled out one by one")
    value_end = closed.removesuffix(end)
    if not value_end.strip() or parted.removesuffix(begin) != value_end:
        raise ValueError("values do not end alike")
    return Around(before, middle, end, Spelling(begin, between, value_end))


def _call(*arguments: tuple[str, str]) -> ToolCall:
    return ToolCall(_NAME, json.dumps(dict(arguments)))


def _cut(text: str, at: str) -> tuple[str, str]:
    before, found, after = text.partition(at)
    if not found:
        raise ValueError(f"no {at!r} in {text!r}")
    return before, after


def _shared(left: str, right: str) -> str:
    """How both begin."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return "".join(character for character, _ in same)


def _whole_marks(text: str) -> str:
    """Without a mark that has only begun."""
    return text[: text.rfind("<")] if text.rfind("<") > text.rfind(">") else text


def plain(value: object) -> str:
    """A value as it is spelled out."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
