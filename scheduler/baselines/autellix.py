"""Autellix (2502.13965), PLAS: the program that has been served least goes first.

Within an engine, calls stand in levels by what their whole program has attained so far, first come first
served in each.  A program that has waited beta times as long as it was served goes to the first level.
There is no official code; levels and beta are those of its reimplementation in MARS (2604.26963): tokens
prefilled and generated, thresholds 2,048 / 8,192 / 32,768, beta 2.  Waits and service that count for beta
begin anew when a starved program is sent.

The frame cannot interrupt a turn, so the quanta within one have no part: a program falls at the end of
its turn.  Programs stay at the engine of their first turn; Autellix moves short calls freely, too.
"""

import heapq
from bisect import bisect_right
from dataclasses import dataclass

from sostenuto.scheduler.actions import Action
from sostenuto.scheduler.baselines.engine_queue import EngineQueue, Key
from sostenuto.scheduler.events import TurnEnded
from sostenuto.scheduler.program import Program
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import ProgramId

THRESHOLDS_TOKENS = (2048, 8192, 32768)
BETA = 2.0


@dataclass(slots=True)
class _Service:
    """What a program has attained."""

    tokens: int = 0
    served_s: float = 0.0
    waited_s: float = 0.0
    is_starved: bool = False


class Las(EngineQueue):
    """Least attained service."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        super().__init__(settings)
        self._services: dict[ProgramId, _Service] = {}
        self._starving: list[tuple[float, ProgramId, int]] = []
        """When a program in a queue will have starved, and the turn before."""
        self._arrived = 0

    def _look_again_s(self) -> float | None:
        while self._starving and not self._still_waits(*self._starving[0][1:]):
            heapq.heappop(self._starving)
        return self._starving[0][0] if self._starving else None

    def _key(self, program: Program, now_s: float) -> Key:
        service = self._services.setdefault(program.id, _Service())
        self._arrived += 1
        level = bisect_right(THRESHOLDS_TOKENS, service.tokens)
        if level:
            starved_s = self._asked_s[program.id] + max(0.0, BETA * service.served_s - service.waited_s)
            heapq.heappush(self._starving, (starved_s, program.id, program.turn))
        return level, self._arrived

    def _decide(self, now_s: float) -> list[Action]:
        self._take_in(now_s)
        while (due_s := self._look_again_s()) is not None and due_s <= now_s:
            _, program_id, _ = heapq.heappop(self._starving)
            self._promote(program_id)
        return super()._decide(now_s)

    def _promote(self, program_id: ProgramId) -> None:
        self._services[program_id].is_starved = True
        self._arrived += 1
        home = self._homes[program_id]
        self._queues[home].add((0, self._arrived), program_id)
        self._stirred[home] = None

    def _still_waits(self, program_id: ProgramId, turn: int) -> bool:
        program = self._programs.get(program_id)
        if program is None or program.turn != turn:
            return False
        queue = self._queue_of(program_id)
        return queue is not None and program_id in queue

    def _has_waited(self, program: Program, waited_s: float) -> None:
        service = self._services[program.id]
        service.waited_s += waited_s
        if service.is_starved:
            service.served_s, service.waited_s, service.is_starved = 0.0, 0.0, False

    def _turn_is_known(self, program: Program, event: TurnEnded, now_s: float) -> None:
        service, cost = self._services[program.id], event.cost
        if cost is None:
            service.tokens += max(0, event.footprint.tokens - program.footprint.tokens)
            service.served_s += now_s - program.decoding_since_s
            return
        service.tokens += cost.prefilled_tokens + cost.generated_tokens
        service.served_s += cost.prefill_s + cost.decode_s

    def _has_finished(self, program: Program, now_s: float) -> None:
        self._services.pop(program.id, None)
