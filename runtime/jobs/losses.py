"""Programs that fail one after the other: from when on there is no use in waiting."""

from collections import deque

from sostenuto.errors import SostenutoError
from sostenuto.types import Outcome, OutcomeKind

_GROUPS = 24
"""So many in a row that came to nothing end the job."""


class NothingComes(SostenutoError):  # noqa: N818 - reads as the fact it states
    """Programs fail one after the other: there is nothing to learn from."""


class Losses:
    """Since the last program that something came of."""

    def __init__(self, group_size: int) -> None:
        self._most = _GROUPS * group_size
        self.clear()

    def clear(self) -> None:
        """Something came."""
        self._programs = 0
        self._reasons = deque[str](maxlen=3)

    def add(self, outcome: Outcome) -> None:
        """A program has come to nothing; one that came too late does not count: nothing was wrong with it."""
        if outcome.kind is not OutcomeKind.DROPPED:
            self._programs += 1
            self._reasons.append(str(outcome))

    def refuse_too_many(self) -> None:
        """NothingComes, with the last reasons."""
        if self._programs >= self._most:
            last = "; ".join(self._reasons)
            raise NothingComes(f"{self._programs} programs in a row failed, the last ones as: {last}")
