"""The queue inside each engine, for published systems that change it.

They live in the engine's own scheduler, which the frame cannot reach.  What it does can be decided here
all the same: a turn is sent only when the engine can start it at once, a decode slot and room in its pool
being free, so the engine's own queue stays empty and the order is this one.  The pool is a ledger of what
runs (context and the most that the turn can add) and of what a subclass keeps between turns.

The first in a queue blocks those behind it, as in the engines.  A turn is never interrupted.
"""

import heapq
from abc import abstractmethod
from collections.abc import Iterable

from sostenuto.scheduler.actions import Action
from sostenuto.scheduler.baselines.baseline import Baseline, is_over
from sostenuto.scheduler.events import EngineJoined, EngineLost
from sostenuto.scheduler.fleet import EngineSeat
from sostenuto.scheduler.program import Program, Reason
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId, ProgramId

Key = tuple[float, float]
"""The smallest goes first."""


class KeyedQueue:
    """Programs by key.  Leaving, or another key, costs nothing until the old entry comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, ProgramId]] = []
        self._keys: dict[ProgramId, Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, program_id: ProgramId) -> bool:
        return program_id in self._keys

    def add(self, key: Key, program_id: ProgramId) -> None:
        self._keys[program_id] = key
        heapq.heappush(self._heap, (key, program_id))

    def discard(self, program_id: ProgramId) -> None:
        self._keys.pop(program_id, None)

    def clear(self) -> None:
        self._keys.clear()
        self._heap.clear()

    def first(self) -> ProgramId | None:
        while self._heap and self._keys.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def members(self) -> Iterable[ProgramId]:
        return self._keys.keys()


class EngineQueue(Baseline):
    """Programs have homes; at home they wait in the order of `_key`."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        super().__init__(settings)
        self._queues: dict[EngineId, KeyedQueue] = {}
        self._arrivals: dict[ProgramId, None] = {}
        """In no engine's queue yet; empty after an event while an engine takes requests."""
        self._asked_s: dict[ProgramId, float] = {}
        """Since when its turn lacks nothing but an engine."""
        self._stirred: dict[EngineId, None] = {}
        """Engines where a turn might be sent that could not be before."""
        self._said: list[Action] = []
        """What follows from the event that is taken in."""

    @abstractmethod
    def _key(self, program: Program, now_s: float) -> Key:
        """Its place in the queue of its home."""

    def _make_room(self, program: Program, seat: EngineSeat, now_s: float) -> bool:
        """Whether something was given up for the first in the queue; otherwise it waits."""
        del program, seat, now_s
        return False

    def _will_start(self, program: Program, seat: EngineSeat, now_s: float) -> None:
        """Its turn is about to be sent there."""
        del seat
        self._has_waited(program, now_s - self._asked_s.pop(program.id))

    def _has_waited(self, program: Program, waited_s: float) -> None:
        """For an engine, before the turn that is about to be sent."""
        del program, waited_s

    # ---- hooks ----

    def _waiting_count(self) -> int:
        return len(self._arrivals) + sum(len(queue) for queue in self._queues.values())

    def _load(self, seat: EngineSeat) -> tuple[int, int]:
        decoding, assigned = super()._load(seat)
        return decoding + len(self._queues[seat.id]), assigned

    def _new_seat(self, event: EngineJoined) -> EngineSeat:
        self._queues[event.engine_id] = KeyedQueue()
        return super()._new_seat(event)

    def _on_engine_lost(self, event: EngineLost, now_s: float) -> list[Action]:
        actions = super()._on_engine_lost(event, now_s)
        queue = self._queues.pop(event.engine_id, None)
        self._arrivals.update(dict.fromkeys(queue.members() if queue else ()))
        return actions

    def _became_runnable(self, program: Program, now_s: float) -> None:
        self._arrivals[program.id] = None
        self._asked_s.setdefault(program.id, now_s)
        self._note(program, Reason.VERSION, now_s)

    def _began_acting(self, program: Program, now_s: float) -> None:
        """KV is left to the engine's own order."""
        del now_s
        assert program.engine is not None
        program.engine.kv.release(program.id)
        self._stirred[program.engine.id] = None

    def _leaves(self, program: Program, now_s: float) -> None:
        if program.engine is not None:
            program.engine.kv.release(program.id)
            self._stirred[program.engine.id] = None
        self._arrivals.pop(program.id, None)
        if (queue := self._queue_of(program.id)) is not None and program.id in queue:
            queue.discard(program.id)
            self._stirred[self._homes[program.id]] = None
        if is_over(program):
            self._asked_s.pop(program.id, None)
        super()._leaves(program, now_s)

    def _decide(self, now_s: float) -> list[Action]:
        self._abandon_closed()
        self._take_in(now_s)
        stirred, self._stirred = self._stirred, {}
        for engine_id in stirred:
            if engine_id in self._engines:
                self._drain(self._engines[engine_id], now_s)
        said, self._said = self._said, []
        return said

    def _abandon_closed(self) -> None:
        """Those in the queue of an engine that takes no requests look for another."""
        for engine_id, queue in self._queues.items():
            if len(queue) and not self.gate.may_start(engine_id):
                self._arrivals.update(dict.fromkeys(queue.members()))
                queue.clear()

    # ---- queues ----

    def _queue_of(self, program_id: ProgramId) -> KeyedQueue | None:
        home = self._homes.get(program_id)
        return None if home is None else self._queues.get(home)

    def _take_in(self, now_s: float) -> None:
        for program_id in list(self._arrivals):
            program = self._programs[program_id]
            able = self._able(program)
            refused = [] if able else self._refused(program)
            if able:
                self._line_up(program, self._choose(program, able), now_s)
            if able or refused:
                self._arrivals.pop(program_id, None)
            self._said += refused

    def _line_up(self, program: Program, seat: EngineSeat, now_s: float) -> None:
        self._queues[seat.id].add(self._key(program, now_s), program.id)
        self._stirred[seat.id] = None
        self._note(program, Reason.KV, now_s)

    def _drain(self, seat: EngineSeat, now_s: float) -> None:
        queue = self._queues[seat.id]
        while seat.free_slots > 0 and (first := queue.first()) is not None:
            program = self._programs[first]
            if seat.kv.reserve(first, program.wanted):
                queue.discard(first)
                self._will_start(program, seat, now_s)
                self._said.append(self._start(program, seat, now_s))
            elif not self._make_room(program, seat, now_s):
                return
