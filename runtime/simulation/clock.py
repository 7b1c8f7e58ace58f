"""Virtual time: what is due happens in order, and time jumps from one thing to the next."""

import heapq
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None:
        """It will not happen.  Safe to call twice, and after it has happened."""
        ...


class Clock(Protocol):
    def now_s(self) -> float: ...

    def call_at(self, when_s: float, do: Callable[[], None]) -> Timer: ...


class _Due:
    __slots__ = ("clock", "do")

    def __init__(self, clock: "EventClock", do: Callable[[], None]) -> None:
        self.clock = clock
        self.do: Callable[[], None] | None = do

    def cancel(self) -> None:
        if self.do is not None:
            self.do = None
            self.clock.pending -= 1


class EventClock:
    """First in, first out among what is due at the same time."""

    __slots__ = ("_heap", "_now_s", "_order", "pending")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _Due]] = []
        self._now_s = 0.0
        self._order = 0
        self.pending = 0
        """Calls that are neither made nor cancelled."""

    def __repr__(self) -> str:
        return f"<EventClock {self._now_s:.3f} s, {self.pending} pending>"

    def now_s(self) -> float:
        return self._now_s

    def call_at(self, when_s: float, do: Callable[[], None]) -> Timer:
        """Call `do` at that time; at once, after what is due already, when the time has passed."""
        due = _Due(self, do)
        self._order += 1
        self.pending += 1
        when_s = max(when_s, self._now_s)
        heapq.heappush(self._heap, (when_s, self._order, due))
        return due

    def step(self) -> bool:
        """Make the next call; False when there is none."""
        while self._heap:
            when_s, _, due = heapq.heappop(self._heap)
            do = due.do
            if do is not None:
                due.do = None
                self.pending -= 1
                self._now_s = when_s
                do()
                return True
        return False

    def run(self) -> None:
        while self.step():
            pass
