"""Whether a list of messages goes on with a conversation.

Clients send the whole history each time, as they keep it: reasoning left out, blanks stripped, arguments
written anew.  That is the same history.  What differs in more than that has been rewritten.
"""

import json
from collections.abc import Sequence
from enum import Enum, auto

from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Message, ToolCall


class Match(Enum):
    SAME = auto()
    """Nothing is new: what was asked before is asked again, and has not been answered."""
    CONTINUES = auto()
    """All that was said, and something new."""
    DIFFERS = auto()


def match(
    known: Sequence[Message],
    known_tools: Sequence[ToolSchema],
    asked: Sequence[Message],
    tools: Sequence[ToolSchema],
    *,
    answered: bool,
) -> Match:
    """`answered`: whether the last of `known` is a turn of the policy."""
    if not same_tools(known_tools, tools) or common(known, asked) < len(known):
        return Match.DIFFERS
    if len(asked) == len(known):
        return Match.DIFFERS if answered else Match.SAME
    return Match.CONTINUES if answered else Match.DIFFERS


def common(known: Sequence[Message], asked: Sequence[Message]) -> int:
    """How many messages both begin with."""
    for index, (one, other) in enumerate(zip(known, asked, strict=False)):
        if not same(one, other):
            return index
    return min(len(known), len(asked))


def same(known: Message, asked: Message) -> bool:
    """Whether a client means the message that we know."""
    if known == asked:
        return True
    if known.role != asked.role or known.content.strip() != asked.content.strip():
        return False
    if asked.reasoning and known.reasoning.strip() != asked.reasoning.strip():
        return False
    if known.role != "assistant":
        return known.name == asked.name or not asked.name or not known.name
    return _same_calls(known.tool_calls, asked.tool_calls)


def same_tools(one: Sequence[ToolSchema], other: Sequence[ToolSchema]) -> bool:
    return one == other or [t.as_function() for t in one] == [t.as_function() for t in other]


def _same_calls(known: Sequence[ToolCall], asked: Sequence[ToolCall]) -> bool:
    return len(known) == len(asked) and all(
        one.name == other.name and _value(one.arguments) == _value(other.arguments)
        for one, other in zip(known, asked, strict=True)
    )


def _value(arguments: str) -> object:
    """Arguments without the way in which they are written; the text where it is no JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
