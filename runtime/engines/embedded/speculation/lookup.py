"""Prompt lookup: what followed the last tokens when they were in the context before (Saxena 2023)."""

from collections.abc import Sequence

import numpy as np

from sostenuto.runtime.engines.embedded.packing import Plan
from sostenuto.runtime.engines.embedded.turn import Ids, Turn

_SHORTEST = 2
_LONGEST = 12


def continuation(context: Ids, most: int) -> Ids:
    """At most `most` tokens that followed the longest repeated suffix; the latest place when several.

    A suffix repeated so recently that less than `most` follows is taken to repeat on.
    """
    last = len(context) - 1
    places = np.flatnonzero(context[:last] == context[last])
    matched = 1
    while len(places) and matched < min(_LONGEST, last):
        longer = places[places >= matched]
        longer = longer[context[longer - matched] == context[last - matched]]
        if not len(longer):
            break
        places, matched = longer, matched + 1
    if matched < _SHORTEST or not len(places):
        return context[:0]
    start = int(places[-1]) + 1
    return context[start + np.arange(most) % (len(context) - start)]


class PromptLookup:
    """A source of guesses that costs no pass of a model."""

    name = "prompt"
    weights = None

    def ready(self, turn: Turn, most: int) -> int:
        """How many tokens it can draft, at most `most`; they are written behind the context."""
        found = continuation(turn.context, most)
        turn.tokens[turn.length : turn.length + len(found)] = found
        return len(found)

    def token_s(self, rows: int) -> float:
        """What one guess costs when `rows` requests are guessed for."""
        del rows
        return 0.0

    def draft(self, chosen: Sequence[tuple[Turn, int]]) -> None:
        """`ready` has written them."""
        for turn, count in chosen:
            turn.drafted = count

    def observe(self, planned: Plan, drawn: Sequence[int]) -> None:
        """The contexts say everything."""

    def forget(self, program_id: str) -> None:
        """It keeps nothing."""

    def clear(self) -> None:
        """It has no weights."""
