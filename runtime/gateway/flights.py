"""Calls that run or have just been answered: the same one, sent again, joins instead of running twice."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from sostenuto.errors import SostenutoError

T = TypeVar("T")

_KEPT = 64
_KEPT_S = 600.0


@dataclass(slots=True, eq=False)
class _Flight(Generic[T]):
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    over: anyio.Event = field(default_factory=anyio.Event)
    value: T | None = None
    error: BaseException | None = None
    waiters: int = 0
    ended_s: float = 0.0

    @property
    def failed(self) -> bool:
        return self.over.is_set() and self.value is None


class Flights(Generic[T]):
    """Of one program.  A call ends when the last who waits for it has gone."""

    def __init__(self, running: TaskGroup) -> None:
        self._running = running
        self._flights: OrderedDict[str, _Flight[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._flights)

    async def fly(self, key: str, work: Callable[[], Awaitable[T]], *, join: bool) -> tuple[T, bool]:
        """What `work` returns, and whether it was another's.

        `join`: the same call may have come before; without it a call of the same key takes its place.
        """
        self._forget()
        flight = self._flights.get(key) if join else None
        joined = flight is not None and not flight.failed
        if flight is None or flight.failed:
            flight = self._flights[key] = _Flight[T]()
            self._running.start_soon(self._run, flight, work)
        return await self._wait(flight), joined

    async def _wait(self, flight: _Flight[T]) -> T:
        flight.waiters += 1
        try:
            await flight.over.wait()
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.over.is_set():
                flight.scope.cancel()
        if flight.value is None:
            assert flight.error is not None
            raise flight.error
        return flight.value

    async def _run(self, flight: _Flight[T], work: Callable[[], Awaitable[T]]) -> None:
        try:
            with flight.scope:
                flight.value = await work()
        except SostenutoError as error:
            flight.error = error
        finally:
            if flight.value is None and flight.error is None:
                flight.error = anyio.get_cancelled_exc_class()()
            flight.ended_s = anyio.current_time()
            flight.over.set()

    def _forget(self) -> None:
        """Failed ones, old ones, and the oldest of too many."""
        now_s = anyio.current_time()
        for key, flight in list(self._flights.items()):
            is_over = flight.over.is_set()
            if is_over and (flight.failed or flight.ended_s + _KEPT_S < now_s or len(self._flights) > _KEPT):
                del self._flights[key]
