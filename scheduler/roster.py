"""The engines of the fleet, and which of them are worth a look.

An event changes one or two engines.  What a decision costs must not grow with the others, so:

- only engines on which something has changed are looked at;
- a program without KV is tried on those with the most free tokens, and no more than a few of them.
"""

from collections.abc import Iterable

from sortedcontainers import SortedList

from sostenuto.scheduler.kv import Footprint
from sostenuto.scheduler.seat import Marks, Seat
from sostenuto.types import EngineId

_TRIED = 8
"""Engines on which a program is tried."""


class Roster:
    """Written when engines join or leave, and with every decision."""

    def __init__(self) -> None:
        self.seats: dict[EngineId, Seat] = {}
        self.marks = Marks()
        self._counted: dict[EngineId, int] = {}
        """Free tokens of each, as in the indexes."""
        self._by_free = SortedList[tuple[int, EngineId]]()
        self._free_tokens = 0
        self._smallest_tokens = self._largest_block = 0
        """Of the pools of all engines, and of their blocks; a pool that is found grows at need."""

    def join(self, seat: Seat) -> None:
        self.seats[seat.id] = seat
        self._recount()

    def leave(self, engine_id: EngineId) -> Seat | None:
        seat = self.seats.pop(engine_id, None)
        if seat is not None:
            seat.unclaim()
            self._recount()
        return seat

    def stir_all(self) -> None:
        """Which engines may start requests has changed, and with it what is left to the others."""
        self.marks.stirred.update(self.seats)

    def take_stirred(self) -> list[Seat]:
        """Those on which something has changed since they were last taken."""
        self._count()
        stirred = list(self.marks.stirred.values())
        self.marks.stirred.clear()
        return stirred

    def claimed_and_stirred(self) -> list[Seat]:
        """Those that are kept clear for a program, and on which something has changed."""
        claimed = self.marks.claimed
        return [seat for engine_id, seat in self.marks.stirred.items() if engine_id in claimed]

    @property
    def has_unclaimed(self) -> bool:
        return len(self.marks.claimed) < len(self.seats)

    def free_tokens(self) -> int:
        """Of all engines together."""
        self._count()
        return self._free_tokens

    def roomiest(self) -> list[Seat]:
        """The few with the most free tokens, in the order in which they joined."""
        if len(self.seats) <= _TRIED:
            return list(self.seats.values())
        self._count()
        return [self.seats[engine_id] for _, engine_id in self._by_free[-_TRIED:]]

    def fits_all(self, wanted: Footprint) -> bool:
        """Whether every engine could hold it, each if it were empty.  False: look."""
        return wanted.tokens + self._largest_block * (1 + len(wanted.shared)) <= self._smallest_tokens

    def able(self, wanted: Footprint) -> int:
        """How many could hold it, each if it were empty."""
        if self.fits_all(wanted):
            return len(self.seats)
        return sum(seat.could_ever_hold(wanted) for seat in self.seats.values())

    def _count(self) -> None:
        for seat in self.marks.stirred.values():
            free, before = seat.kv.free_tokens, self._counted[seat.id]
            if free != before:
                self._free_tokens += free - before
                self._by_free.remove((before, seat.id))
                self._enter(seat, free)

    def _enter(self, seat: Seat, free: int) -> None:
        self._counted[seat.id] = free
        self._by_free.add((free, seat.id))

    def _recount(self) -> None:
        self._counted.clear()
        self._by_free.clear()
        for seat in self.seats.values():
            self._enter(seat, seat.kv.free_tokens)
        self._free_tokens = sum(self._counted.values())
        self._smallest_tokens = min((seat.kv.capacity_tokens for seat in self.seats.values()), default=0)
        self._largest_block = max((seat.kv.block_tokens for seat in self.seats.values()), default=0)
        self.marks.stirred.clear()
        self.stir_all()


def loosest(seats: Iterable[Seat]) -> Seat | None:
    """The one on which the most could be free once nothing acts there any more."""
    return max(seats, key=lambda seat: seat.kv.free_tokens + seat.acting_tokens, default=None)
