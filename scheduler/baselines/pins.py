"""KV that is kept in the pool while a program's tool runs, until a moment that is fixed when it begins.

A pin is a reservation in the ledger, so that no turn is sent which would need its room.  When it ends
while the tool still runs, the KV may be overwritten; it may as well still be there when the program comes
back.  A program that comes back in time keeps its pin until its turn is sent.

The published systems leave what is not pinned to the engine's least-recently-used order, which passes
over what is pinned.  An engine behind an interface cannot be told to pass over anything.  So it is told
(Evict) what to give up: when a turn that is sent would overwrite something, what is not pinned goes, least
recently used first, and no more of it than needed.

When nothing runs and the first in the queue has no room, the pin that would end last is given up.
"""

import heapq
from abc import abstractmethod

from sostenuto.scheduler.actions import Action, Evict
from sostenuto.scheduler.baselines.engine_queue import EngineQueue
from sostenuto.scheduler.events import EngineJoined, TurnEnded
from sostenuto.scheduler.fleet import EngineSeat
from sostenuto.scheduler.lifecycle import Move, Phase
from sostenuto.scheduler.program import Program
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId, ProgramId


class Unpinned:
    """KV of programs on one engine that is not pinned and, as far as is known, not overwritten."""

    def __init__(self) -> None:
        self._tokens: dict[ProgramId, int] = {}
        """Least recently used first."""
        self.tokens = 0

    def add(self, program: Program) -> None:
        self.discard(program.id)
        self._tokens[program.id] = program.footprint.private_tokens
        self.tokens += program.footprint.private_tokens

    def discard(self, program_id: ProgramId) -> None:
        self.tokens -= self._tokens.pop(program_id, 0)

    def overwritten(self, room_tokens: int) -> list[ProgramId]:
        """Who has to go so that the rest fits there; they are forgotten."""
        gone: list[ProgramId] = []
        while self.tokens > room_tokens:
            gone.append(next(iter(self._tokens)))
            self.discard(gone[-1])
        return gone


class PinnedQueue(EngineQueue):
    """How long KV is kept is what a subclass says."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        super().__init__(settings)
        self._pins: dict[EngineId, dict[ProgramId, float]] = {}
        """When each pin ends, of programs that act or are ready."""
        self._ends: list[tuple[float, ProgramId, int]] = []
        """An entry is stale once the program does not act in that turn any more."""
        self._unpinned: dict[EngineId, Unpinned] = {}
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
        self._unpinned[event.engine_id] = Unpinned()
        self._declared_tokens_s = event.prefill_tokens_s or self._declared_tokens_s
        return super()._new_seat(event)

    def _turn_is_known(self, program: Program, event: TurnEnded, now_s: float) -> None:
        if event.cost is not None:
            self._prefilled_tokens += event.cost.prefilled_tokens
            self._prefill_s += event.cost.prefill_s

    def _began_acting(self, program: Program, now_s: float) -> None:
        seat = program.engine
        assert seat is not None
        self._stirred[seat.id] = None
        keep_s = self._keep_s(program, seat, now_s)
        if keep_s > 0 and seat.kv.reserve(program.id, program.footprint):
            self._pins[seat.id][program.id] = now_s + keep_s
            heapq.heappush(self._ends, (now_s + keep_s, program.id, program.turn))
        else:
            self._unpin(program, seat, now_s)

    def _leaves(self, program: Program, now_s: float) -> None:
        if program.engine is not None:
            self._pins[program.engine.id].pop(program.id, None)
        super()._leaves(program, now_s)

    def _will_start(self, program: Program, seat: EngineSeat, now_s: float) -> None:
        super()._will_start(program, seat, now_s)
        self._pins[seat.id].pop(program.id, None)
        unpinned = self._unpinned[seat.id]
        unpinned.discard(program.id)
        self._said += [Evict(id_, seat.id) for id_ in unpinned.overwritten(seat.kv.free_tokens)]

    def _decide(self, now_s: float) -> list[Action]:
        while (due_s := self._look_again_s()) is not None and due_s <= now_s:
            program = self._programs[heapq.heappop(self._ends)[1]]
            assert program.engine is not None
            self._unpin(program, program.engine, now_s)
        return super()._decide(now_s)

    def _line_up(self, program: Program, seat: EngineSeat, now_s: float) -> None:
        """A program that has to leave its home gives up what it keeps there."""
        if program.engine is not None and program.engine is not seat:
            self._said.append(Evict(program.id, program.engine.id))
            self._give_up_kv(program, Move.EVICT, now_s)
        super()._line_up(program, seat, now_s)

    def _make_room(self, program: Program, seat: EngineSeat, now_s: float) -> bool:
        if seat.decoding:
            return False
        pins = {id_: end_s for id_, end_s in self._pins[seat.id].items() if id_ != program.id}
        if not pins:
            return False
        self._unpin(self._programs[max(pins, key=lambda id_: pins[id_])], seat, now_s)
        self._take_in(now_s)
        return True

    # ---- pins ----

    def _unpin(self, program: Program, seat: EngineSeat, now_s: float) -> None:
        self._give_up_kv(program, Move.EVICT, now_s)
        self._unpinned[seat.id].add(program)

    def _forget_home(self, program_id: ProgramId) -> None:
        home = self._homes.get(program_id)
        if home is not None:
            self._unpinned[home].discard(program_id)
        super()._forget_home(program_id)

    def _is_pinned(self, program_id: ProgramId, turn: int) -> bool:
        program = self._programs.get(program_id)
        return program is not None and program.turn == turn and program.phase is Phase.ACTING

    def _reload_s(self, tokens: int) -> float:
        """To prefill so much again: as measured, else as the engine declares, else 0."""
        if self._prefill_s > 0:
            return tokens * self._prefill_s / max(1, self._prefilled_tokens)
        return tokens / self._declared_tokens_s if self._declared_tokens_s else 0.0
