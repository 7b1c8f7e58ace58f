"""KV that is kept in the pool while a program's tool runs, until a moment that is fixed when it begins.

A pin is a reservation in the ledger, so that no turn is sent which would need its room.  When it ends
while the tool still runs, the KV is given up.  A program that comes back in time keeps its KV until its
turn is sent.  The published systems then leave what is not pinned to the engine's least-recently-used
order; here the engine is told to give it up first (Evict), without which its own order would take pinned
KV, of which it knows nothing.

When nothing runs and the first in the queue has no room, the pin that would end last is given up.
"""

import heapq
from abc import abstractmethod

from sostenuto.scheduler.actions import Action, EngineJoined, Evict, TurnEnded
from sostenuto.scheduler.baselines.engine_queue import EngineQueue
from sostenuto.scheduler.fleet import EngineSeat
from sostenuto.scheduler.frame import SchedulerSettings
from sostenuto.scheduler.lifecycle import Move, Phase
from sostenuto.scheduler.program import Program
from sostenuto.types import EngineId, ProgramId


class PinnedQueue(EngineQueue):
    """How long KV is kept is what a subclass says."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        super().__init__(settings)
        self._pins: dict[EngineId, dict[ProgramId, float]] = {}
        """When each pin ends, of programs that act or are ready."""
        self._ends: list[tuple[float, ProgramId, int]] = []
        """An entry is stale once the program does not act in that turn any more."""
        self._said: list[Action] = []
        """Given up while an event was taken in."""
        self._prefilled_tokens = 0
        self._prefill_s = 0.0
        self._declared_tokens_s: float | None = None

    @abstractmethod
    def _keep_s(self, program: Program, seat: EngineSeat, now_s: float) -> float:
        """How long its KV is kept from now on; 0: not at all."""

    # ---- hooks ----

    def _look_again_s(self) -> float | None:
        while self._ends and not self._is_pinned(*self._ends[0][1:]):
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def _new_seat(self, event: EngineJoined) -> EngineSeat:
        self._pins[event.engine_id] = {}
        self._declared_tokens_s = event.prefill_tokens_s or self._declared_tokens_s
        return super()._new_seat(event)

    def _turn_is_known(self, program: Program, event: TurnEnded, now_s: float) -> None:
        if event.cost is not None:
            self._prefilled_tokens += event.cost.prefilled_tokens
            self._prefill_s += event.cost.prefill_s

    def _began_acting(self, program: Program, now_s: float) -> None:
        seat = program.engine
        assert seat is not None
        keep_s = self._keep_s(program, seat, now_s)
        if keep_s > 0 and seat.kv.reserve(program.id, program.footprint):
            self._pins[seat.id][program.id] = now_s + keep_s
            heapq.heappush(self._ends, (now_s + keep_s, program.id, program.turn))
        else:
            self._give_up(program, seat, now_s)

    def _leaves(self, program: Program, now_s: float) -> None:
        if program.engine is not None:
            self._pins[program.engine.id].pop(program.id, None)
        super()._leaves(program, now_s)

    def _will_start(self, program: Program, waited_s: float, now_s: float) -> None:
        if program.engine is not None:
            self._pins[program.engine.id].pop(program.id, None)

    def _decide(self, now_s: float) -> list[Action]:
        while (due_s := self._look_again_s()) is not None and due_s <= now_s:
            program = self._programs[heapq.heappop(self._ends)[1]]
            assert program.engine is not None
            self._give_up(program, program.engine, now_s)
        said, self._said = self._said, []
        return said + super()._decide(now_s)

    def _line_up(self, program: Program, seat: EngineSeat, now_s: float) -> list[Action]:
        """A program that has to leave its home gives up what it holds there."""
        elsewhere = program.engine if program.engine is not seat else None
        if elsewhere is not None:
            self._give_up_kv(program, Move.EVICT, now_s)
        return [
            *([Evict(program.id, elsewhere.id)] if elsewhere else []),
            *super()._line_up(program, seat, now_s),
        ]

    def _make_room(self, program: Program, seat: EngineSeat, now_s: float) -> list[Action]:
        pins = {id_: end_s for id_, end_s in self._pins[seat.id].items() if id_ != program.id}
        if seat.decoding or not pins:
            return []
        victim = self._programs[max(pins, key=lambda id_: pins[id_])]
        self._give_up_kv(victim, Move.EVICT, now_s)
        return [Evict(victim.id, seat.id), *self._take_in(now_s)]

    # ---- pins ----

    def _give_up(self, program: Program, seat: EngineSeat, now_s: float) -> None:
        self._said.append(Evict(program.id, seat.id))
        self._give_up_kv(program, Move.EVICT, now_s)

    def _is_pinned(self, program_id: ProgramId, turn: int) -> bool:
        program = self._programs.get(program_id)
        return program is not None and program.turn == turn and program.phase is Phase.ACTING

    def _reload_s(self, tokens: int) -> float:
        """To prefill so much again: as measured, else as the engine declares, else 0."""
        if self._prefill_s > 0:
            return tokens * self._prefill_s / max(1, self._prefilled_tokens)
        return tokens / self._declared_tokens_s if self._declared_tokens_s else 0.0
