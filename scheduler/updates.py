"""What a change of version, and the coming and going of engines, does to the KV that programs hold."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from sostenuto.scheduler.actions import Action, Evict
from sostenuto.scheduler.events import (
    EngineDraining,
    PublicationBegun,
    UpdateCommitted,
    UpdateFailed,
    UpdateStaged,
)
from sostenuto.scheduler.fleet import EngineSeat
from sostenuto.scheduler.gate import Gate
from sostenuto.scheduler.lifecycle import Move, Phase
from sostenuto.scheduler.program import Program
from sostenuto.types import EngineId


class Updates(ABC):
    """The part of a frame that has the gate."""

    def __init__(self) -> None:
        self._engines: dict[EngineId, EngineSeat] = {}
        self.gate = Gate()

    @abstractmethod
    def _held_on(self, seat: EngineSeat) -> list[Program]:
        """Programs whose KV is there."""

    @abstractmethod
    def _give_up_kv(self, program: Program, move: Move, now_s: float) -> None:
        """EVICT or LOSE_ENGINE: the program goes on without its KV."""

    def _swap_engines(self, now_s: float) -> list[Action]:
        """What the gate does when what runs has ended, or time has passed."""
        return self.gate.advance(now_s, self._decoding_on)

    def _decoding_on(self, engine_id: EngineId) -> int:
        seat = self._engines.get(engine_id)
        return len(seat.decoding) if seat is not None else 0

    def _on_begun(self, event: PublicationBegun, now_s: float) -> list[Action]:
        return self.gate.begin(event.version, event.terms, now_s)

    def _on_staged(self, event: UpdateStaged, now_s: float) -> list[Action]:
        del now_s
        return self.gate.staged(event.engine_id, event.version)

    def _on_committed(self, event: UpdateCommitted, now_s: float) -> list[Action]:
        if self.gate.expects_commit(event.engine_id, event.version):
            if event.dropped_kv:
                self._empty(event.engine_id, Move.EVICT, now_s)
            elif event.dropped and (seat := self._engines.get(event.engine_id)) is not None:
                dropped = frozenset(event.dropped)
                self._take_from((p for p in self._held_on(seat) if p.id in dropped), Move.EVICT, now_s)
        return self.gate.committed(event.engine_id, event.version, dropped_kv=event.dropped_kv)

    def _on_update_failed(self, event: UpdateFailed, now_s: float) -> list[Action]:
        del now_s
        return self.gate.failed(event.engine_id, event.version, event.reason)

    def _on_draining(self, event: EngineDraining, now_s: float) -> list[Action]:
        self.gate.close(event.engine_id, event.reason)
        idle = [p.id for p in self._held_on(self._engines[event.engine_id]) if p.phase is not Phase.REASONING]
        self._empty(event.engine_id, Move.EVICT, now_s)
        return [Evict(program_id, event.engine_id) for program_id in idle]

    def _empty(self, engine_id: EngineId, move: Move, now_s: float) -> None:
        """The engine has lost KV: of every program, or (EVICT) of those between turns."""
        seat = self._engines.get(engine_id)
        self._take_from(self._held_on(seat) if seat else (), move, now_s)

    def _take_from(self, programs: Iterable[Program], move: Move, now_s: float) -> None:
        for program in list(programs):
            decoding = program.phase is Phase.REASONING
            if not (decoding and move is Move.EVICT):
                self._give_up_kv(program, move, now_s)
