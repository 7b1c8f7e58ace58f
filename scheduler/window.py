"""The KV budget of an engine that does not say how large its pool is.

Additive increase, multiplicative decrease, and a settle state: after a cut nothing is judged until what was
admitted before it has drained, because the engine's counters still tell of the time before.

    state     leaves when
    GROWING   the engine preempts, or its cache hits collapse        -> cut to 0.7, SETTLING
    SETTLING  as many turns have ended as ran at the cut             -> GROWING
"""

from enum import StrEnum

_START_TOKENS = 16_384
_CUT = 0.7
_GROWTH = 0.05
"""Of the budget, for every turn that ended without a sign of trouble while the budget was in use."""
_USED = 0.8
_COLLAPSED_HITS = 0.5


class WindowState(StrEnum):
    GROWING = "growing"
    SETTLING = "settling"


class Window:
    """Written with the engine's reports and the ends of turns."""

    def __init__(self) -> None:
        self.tokens = _START_TOKENS
        self.state = WindowState.GROWING
        self._preemptions: int | None = None
        self._turns_to_settle = 0

    def ensure(self, tokens: int) -> None:
        """One program alone is never kept out: the budget is at least what it needs."""
        self.tokens = max(self.tokens, tokens)

    def loaded(self, preemptions: int, hit_rate: float | None, running: int) -> None:
        """A report of the engine; `preemptions` counts from its start."""
        new = 0 if self._preemptions is None else preemptions - self._preemptions
        self._preemptions = preemptions
        if self.state is WindowState.SETTLING:
            return
        if new > 0 or (hit_rate is not None and hit_rate < _COLLAPSED_HITS):
            self.tokens = max(1, int(self.tokens * _CUT))
            self.state, self._turns_to_settle = WindowState.SETTLING, running

    def turn_ended(self, used_tokens: int) -> None:
        """A turn ended while `used_tokens` of the budget were in use."""
        if self.state is WindowState.SETTLING:
            self._turns_to_settle -= 1
            if self._turns_to_settle <= 0:
                self.state = WindowState.GROWING
        elif used_tokens >= _USED * self.tokens:
            self.tokens += max(1, int(self.tokens * _GROWTH))
