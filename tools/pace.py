"""How often something may start, and how much memory it took before.

Pure: time is an argument, in seconds of one clock that never goes back.
"""

from collections import deque
from dataclasses import dataclass, field
from math import ceil

SAMPLES = 64
"""Of the last calls; older ones are forgotten, so that a tool that became frugal is believed."""
QUANTILE = 0.95


@dataclass(slots=True)
class Pace:
    """A token bucket of `burst` tokens: in any `w` seconds at most `burst + w / interval_s` starts.

    It holds one number, the time at which the bucket would be full again, so that the moment it names for
    the next start is, compared with itself, exactly that moment.
    """

    interval_s: float = 0.0
    """0: as often as wanted."""
    burst: int = 1
    _full_s: float = 0.0

    @property
    def opens_s(self) -> float:
        """From when on one may start."""
        return self._full_s - (self.burst - 1) * self.interval_s

    def take(self, now_s: float) -> None:
        """Count one start."""
        self._full_s = max(self._full_s, now_s) + self.interval_s


@dataclass(slots=True)
class Peaks:
    """The memory of a tool's last calls."""

    claim_bytes: int = 0
    """What nearly all of them kept within; 0 before the first."""
    _samples: deque[int] = field(default_factory=lambda: deque[int](maxlen=SAMPLES))

    def add(self, peak_bytes: int) -> None:
        self._samples.append(peak_bytes)
        ranked = sorted(self._samples)
        self.claim_bytes = ranked[ceil(QUANTILE * len(ranked)) - 1]
