"""Engines that are slow are taken out of use, and back in once they have recovered.

A slow engine starts nothing new; programs that hold KV there go elsewhere when their result is back.  The
last engine that takes requests is never taken out, nor the only one with the largest pool: programs may
fit nowhere else.
"""

from sostenuto.scheduler.acting import Foresight
from sostenuto.scheduler.actions import Action, Probe, Recovered, Slowed
from sostenuto.scheduler.events import EngineJoined, EngineLost, Probed, TurnEnded
from sostenuto.scheduler.program import Program
from sostenuto.scheduler.seat import Seat
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.scheduler.slowness import Slowness
from sostenuto.scheduler.versioned import Versioned
from sostenuto.types import EngineId


class Paced(Versioned):
    """Books that keep the pace of engines, too."""

    def __init__(
        self, settings: SchedulerSettings | None = None, *, foresight: Foresight | None = None
    ) -> None:
        super().__init__(settings, foresight=foresight)
        self._slowness = Slowness()
        self._found_slow: dict[EngineId, str] = {}
        """With the reason; since it was last decided."""
        self._handlers[Probed] = self._on_probed

    def _new_seat(self, event: EngineJoined) -> Seat:
        self._slowness.joined(event.engine_id, event.peers)
        return super()._new_seat(event)

    def _on_engine_lost(self, event: EngineLost, now_s: float) -> list[Action]:
        self._slowness.left(event.engine_id)
        return super()._on_engine_lost(event, now_s)

    def _turn_is_known(self, program: Program, event: TurnEnded, now_s: float) -> None:
        seat, took_s = self.seat_of(program), now_s - program.decoding_since_s
        super()._turn_is_known(program, event, now_s)
        if seat is None or event.cost is None or took_s <= 0:
            return
        together = (seat.program_seconds(now_s) - program.decoding_from) / took_s
        if reason := self._slowness.turned(seat.id, event.cost, together, now_s):
            self._found_slow[seat.id] = reason

    def _on_probed(self, event: Probed, now_s: float) -> list[Action]:
        if self._slowness.probed(event.engine_id, event.cost, now_s):
            return [self._take_in(event.engine_id)]
        return []

    def _look_again_s(self) -> float | None:
        return self._slowness.probe_at_s()

    def _keep_pace(self, now_s: float) -> list[Action]:
        """Take out who was found slow, take in whom nobody can spare any more, and probe who is out."""
        actions: list[Action] = []
        while self._found_slow:
            engine_id, reason = self._found_slow.popitem()
            if self._can_be_spared(engine_id):
                self._slowness.take_out(engine_id, now_s)
                self.gate.close(engine_id, reason)
                # Whoever is ready there goes elsewhere, also where there was no room.
                self._seats[engine_id].changes()
                self._roster.stir_all()
                actions.append(Slowed(engine_id, reason))
        needed = [engine_id for engine_id in self._slowness.out if not self._can_be_spared(engine_id)]
        actions += [self._take_in(engine_id) for engine_id in needed]
        actions += [Probe(engine_id) for engine_id in self._slowness.take_due(now_s)]
        return actions

    def _take_in(self, engine_id: EngineId) -> Action:
        self._slowness.take_in(engine_id)
        self.gate.open(engine_id)
        self._roster.stir_all()
        return Recovered(engine_id)

    def _can_be_spared(self, engine_id: EngineId) -> bool:
        """Whether another engine takes requests and could hold whatever this one could."""
        pool = self._seats[engine_id].kv.capacity_tokens
        return any(
            seat.id != engine_id and self.gate.serves(seat.id) and seat.kv.capacity_tokens >= pool
            for seat in self._seats.values()
        )
