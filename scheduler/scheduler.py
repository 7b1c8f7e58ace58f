"""Which program decodes next, where, and who gives up its KV for it.

The first policy: age.  No program is overtaken by a younger one; KV that is held by acting programs is
given up only when somebody waits for it, longest acting first, and only as much as is needed.
"""

from dataclasses import dataclass, field

from sostenuto.scheduler.actions import Action, Evict, Refuse
from sostenuto.scheduler.fleet import AgeQueue, EngineSeat
from sostenuto.scheduler.frame import Frame, SchedulerSettings
from sostenuto.scheduler.lifecycle import Move, Phase
from sostenuto.scheduler.program import Program
from sostenuto.types import EngineId

__all__ = ["Scheduler", "SchedulerSettings"]


@dataclass(slots=True)
class _Blocked:
    """What this round of admission has already found to be full."""

    engines: set[EngineId] = field(default_factory=set[EngineId])
    waiting: bool = False


class Scheduler(Frame):
    """Owner of all programs' phases.  One event at a time; never re-entered."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        super().__init__(settings)
        self._waiting = AgeQueue()

    # ---- hooks ----

    def _waiting_count(self) -> int:
        return len(self._waiting)

    def _became_runnable(self, program: Program, now_s: float) -> None:
        if program.phase is Phase.WAITING:
            self._waiting.add(program.rank, program.id)
            return
        assert program.engine is not None
        program.engine.acting.pop(program.id, None)
        program.engine.ready.add(program.rank, program.id)

    def _began_acting(self, program: Program, now_s: float) -> None:
        seat = program.engine
        assert seat is not None
        seat.acting[program.id] = None
        seat.kv.reserve(program.id, program.footprint)

    def _leaves(self, program: Program, now_s: float) -> None:
        self._waiting.discard(program.id)
        if program.engine is not None:
            program.engine.forget(program.id)

    def _decide(self, now_s: float) -> list[Action]:
        return self._admit(now_s)

    def _admit(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        blocked = _Blocked({seat.id for seat in self._engines.values() if not self._open(seat)})
        while (program := self._next_runnable(blocked)) is not None:
            seat = program.engine or self._place(program, blocked)
            if seat is None:
                actions += self._refuse(program)
                blocked.waiting = program.id in self._waiting
            else:
                actions += self._run_on(program, seat, blocked, now_s)
        return actions

    def _open(self, seat: EngineSeat) -> bool:
        return seat.free_slots > 0 and self.gate.may_start(seat.id)

    def _next_runnable(self, blocked: _Blocked) -> Program | None:
        """The oldest program that an engine with a free slot could run."""
        open_seats = [seat for seat in self._engines.values() if seat.id not in blocked.engines]
        if not open_seats:
            return None
        heads = [seat.ready.oldest() for seat in open_seats]
        if not blocked.waiting:
            heads.append(self._waiting.oldest())
        oldest = min((head for head in heads if head is not None), default=None)
        return self._programs[oldest[1]] if oldest else None

    def _place(self, program: Program, blocked: _Blocked) -> EngineSeat | None:
        """The open engine with the most room, among those that could ever hold the program."""
        able = [
            seat
            for seat in self._engines.values()
            if seat.id not in blocked.engines and seat.kv.could_ever_hold(program.wanted)
        ]
        return max(able, key=lambda seat: (seat.kv.free_tokens, seat.free_slots), default=None)

    def _refuse(self, program: Program) -> list[Action]:
        """Refuse what no engine of the fleet can hold; otherwise it waits for one that is busy.

        A refused program is in no queue any more; its shell answers with Answered or Finished.
        """
        if any(seat.kv.could_ever_hold(program.wanted) for seat in self._engines.values()):
            return []
        largest = max(seat.kv.capacity_tokens for seat in self._engines.values())
        self._waiting.discard(program.id)
        return [Refuse(program.id, program.wanted.tokens, largest)]

    def _run_on(self, program: Program, seat: EngineSeat, blocked: _Blocked, now_s: float) -> list[Action]:
        if not seat.kv.could_ever_hold(program.wanted):
            return self._refuse_or_requeue(program, seat, now_s)
        actions: list[Action] = self._make_room(program, seat, now_s)
        if not seat.kv.reserve(program.id, program.wanted):
            blocked.engines.add(seat.id)
            return actions
        seat.ready.discard(program.id)
        self._waiting.discard(program.id)
        decode = self._start(program, seat, now_s)
        if seat.free_slots == 0:
            blocked.engines.add(seat.id)
        return [*actions, decode]

    def _refuse_or_requeue(self, program: Program, seat: EngineSeat, now_s: float) -> list[Action]:
        """The program outgrew the engine that keeps its KV."""
        self._give_up_kv(program, Move.EVICT, now_s)
        return [Evict(program.id, seat.id), *self._refuse(program)]

    def _make_room(self, program: Program, seat: EngineSeat, now_s: float) -> list[Action]:
        """Evict until `program` fits; when nothing that may be evicted is enough, evict nothing."""
        if not seat.kv.missing_tokens(program.id, program.wanted):
            return []
        victims = self._victims(program, seat)
        freeable = sum(victim.footprint.private_tokens for victim in victims)
        if freeable < seat.kv.missing_tokens(program.id, program.wanted):
            return []
        actions: list[Action] = []
        for victim in victims:
            if not seat.kv.missing_tokens(program.id, program.wanted):
                break
            self._give_up_kv(victim, Move.EVICT, now_s)
            actions.append(Evict(victim.id, seat.id))
        return actions

    def _victims(self, program: Program, seat: EngineSeat) -> list[Program]:
        acting = [self._programs[id_] for id_ in seat.acting]
        ready = [self._programs[id_] for id_ in seat.ready.members() if id_ != program.id]
        younger = sorted((p for p in ready if p.rank > program.rank), key=lambda p: -p.rank)
        return acting + younger
