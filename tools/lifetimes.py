"""How long a program may live, whatever its owner's lease says.

- Idle: so long after the last request; while one is under way nothing is idle.
- Maximum: so long after its admission, but never before a reward that has begun has had its own time and
  a margin for its answer to be fetched.
- Pure: time is an argument, in seconds of the event loop's clock.
"""

from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class Lifetime:
    """Of one program.  Written by the program table alone."""

    started_s: float
    used_s: float
    """When the last request came or ended."""
    idle_s: float
    max_s: float
    scoring_s: float
    """Margin after the deadline of a reward."""
    scored_s: float = -inf
    """Until when a reward and its margin last."""

    def score(self, timeout_s: float, *, now_s: float) -> None:
        """A reward begins that may take `timeout_s`."""
        self.scored_s = max(self.scored_s, now_s + timeout_s + self.scoring_s)

    def ends_s(self, *, busy: bool) -> float:
        """When it has lived too long, as things stand; `busy` while a request is under way."""
        oldest_s = max(self.started_s + self.max_s, self.scored_s)
        return oldest_s if busy else min(oldest_s, max(self.used_s + self.idle_s, self.scored_s))
