"""An asyncio event loop whose time is virtual: it never waits, it goes on to what is due next.

What simulated engines and tool servers have to do is on the loop's `clock`: in order among equals, which
timers of asyncio are not, and without a handle and a context for each.  A call of the clock is made when no
coroutine can go on; asyncio's own timers come after it at the same instant.  Nothing arrives from outside,
so a loop with nothing to do is an error at once and not a wait for ever.
"""

import asyncio
import heapq
import selectors
from collections.abc import Callable

from sostenuto.errors import SostenutoError
from sostenuto.runtime.simulation.clock import EventClock


class NothingToDo(SostenutoError):  # noqa: N818 - reads as the fact it states
    """Every coroutine waits, and nothing is due."""


class VirtualClock(EventClock):
    __slots__ = ()

    def next_s(self) -> float:
        """When the next call is due; infinity when there is none."""
        while self._heap and self._heap[0][2].do is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else float("inf")

    def pass_until(self, when_s: float) -> None:
        """Nothing is due before."""
        self._now_s = when_s


class _NoWaiting(selectors.SelectSelector):
    """Where a loop would wait for its next timer, time goes on to it, or to the clock's next call."""

    def __init__(self, clock: VirtualClock, watch: Callable[[], None]) -> None:
        super().__init__()
        self._clock = clock
        self._watch = watch

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._watch()
        if timeout == 0:
            return []
        clock = self._clock
        timer_s = float("inf") if timeout is None else clock.now_s() + timeout
        due_s = clock.next_s()
        if due_s <= timer_s and due_s < float("inf"):
            clock.step()
        elif timeout is None:
            raise NothingToDo("every coroutine waits, and nothing is due")
        else:
            clock.pass_until(timer_s)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`watch` is called before every step of the loop; what it raises ends the run."""

    def __init__(self, watch: Callable[[], None] = lambda: None) -> None:
        self.clock = VirtualClock()
        super().__init__(_NoWaiting(self.clock, watch))

    def time(self) -> float:
        return self.clock.now_s()
