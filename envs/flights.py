"""Requests that a worker is working on, each with its deadline, and who is to blame when one passes.

- A request leaves only when the worker answers or dies: one whose caller went away is still watched.
- Calls of serial tools of one program wait for each other; the clock of each starts with its turn.
- When the loop is stuck, only a suspect is blamed: whoever has the loop, else whoever runs in a thread.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Flight:
    """One request under way."""

    id: int
    program_id: str
    doing: str
    limit_s: float
    blocking: bool
    """Its code runs in a thread."""
    serial: bool = False
    stalled: bool = False
    """The loop was found stuck by another while this one waited."""
    timer: asyncio.TimerHandle | None = None

    def __str__(self) -> str:
        return f"program {self.program_id}: {self.doing}" if self.program_id else self.doing


class Flights:
    """Written by one host, in its loop."""

    def __init__(self, grace_s: float, on_overdue: Callable[[Flight], object]) -> None:
        self._grace_s = grace_s
        self._on_overdue = on_overdue
        self._flights: dict[int, Flight] = {}

    def __contains__(self, flight: Flight) -> bool:
        return flight.id in self._flights

    def describe(self, flight_id: int) -> str:
        flight = self._flights.get(flight_id)
        return str(flight) if flight else "a request"

    def add(self, flight: Flight) -> None:
        """Watch a request that is about to be sent."""
        waits = flight.serial and self._serial_of(flight.program_id)
        self._flights[flight.id] = flight
        if not waits:
            self.arm(flight)

    def arm(self, flight: Flight) -> None:
        """Start its clock, or start it again."""
        loop = asyncio.get_running_loop()
        flight.timer = loop.call_later(flight.limit_s + self._grace_s, self._on_overdue, flight)

    def settle(self, flight_id: int) -> None:
        """It was answered; the next serial call of its program has its turn."""
        flight = self._flights.pop(flight_id, None)
        if flight is None:
            return
        if flight.timer:
            flight.timer.cancel()
        waiting = self._serial_of(flight.program_id) if flight.serial else []
        if waiting and waiting[0].timer is None:
            self.arm(waiting[0])

    def is_suspect(self, flight: Flight, *, running: int, begun: int) -> bool:
        """Whether this one can be what keeps the loop from turning."""
        if running in self._flights:
            return flight.id == running
        begun_flights = [other for other in self._flights.values() if other.id <= begun]
        in_threads = [other for other in begun_flights if other.blocking]
        return flight in (in_threads or begun_flights or self._flights.values())

    def _serial_of(self, program_id: str) -> list[Flight]:
        return [f for f in self._flights.values() if f.serial and f.program_id == program_id]
