"""What the published systems have in common, as far as the frame is concerned.

They know no gate for environments: one is made as soon as the program comes.  They send a program's
turns to one engine, its home, unless they say otherwise.  What no engine can ever hold is refused, as
an engine itself would refuse it.
"""

from sostenuto.scheduler.actions import Action, Refuse
from sostenuto.scheduler.fleet import EngineSeat
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.scheduler.program import Program
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId, ProgramId

_OVER = frozenset({Phase.SCORING, Phase.DONE})


def is_over(program: Program) -> bool:
    """Whether no turn will follow: it leaves for good, not for a while."""
    return program.phase in _OVER


class Baseline(Frame):
    """A frame whose programs have homes."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        super().__init__(settings)
        self._homes: dict[ProgramId, EngineId] = {}
        self._assigned: dict[EngineId, int] = {}

    def _began_acting(self, program: Program, now_s: float) -> None:
        """KV is left to the engine."""
        del program, now_s

    def _leaves(self, program: Program, now_s: float) -> None:
        del now_s
        if is_over(program):
            self._forget_home(program.id)

    # ---- where ----

    def _dispatch(self, program: Program, now_s: float) -> list[Action]:
        """Its Decode; its Refuse when no engine can ever hold it; nothing when none takes requests now."""
        able = self._able(program)
        if not able:
            return self._refused(program)
        return [self._start(program, self._choose(program, able), now_s)]

    def _able(self, program: Program) -> list[EngineSeat]:
        """Engines that take requests now and could hold the program's next turn."""
        wanted, gate = program.wanted, self.gate
        return [s for s in self._engines.values() if gate.may_start(s.id) and s.kv.could_ever_hold(wanted)]

    def _choose(self, program: Program, able: list[EngineSeat]) -> EngineSeat:
        """Its home; the least loaded engine when it has none or its home is gone, closed or too small."""
        home = self._homes.get(program.id)
        for seat in able:
            if seat.id == home:
                return seat
        return self._settle(program, min(able, key=self._load))

    def _load(self, seat: EngineSeat) -> tuple[int, int]:
        """Requests in flight, then programs that have it as their home."""
        return len(seat.decoding), self._assigned.get(seat.id, 0)

    def _settle(self, program: Program, seat: EngineSeat) -> EngineSeat:
        self._forget_home(program.id)
        self._homes[program.id] = seat.id
        self._assigned[seat.id] = self._assigned.get(seat.id, 0) + 1
        return seat

    def _forget_home(self, program_id: ProgramId) -> None:
        home = self._homes.pop(program_id, None)
        if home is not None:
            self._assigned[home] -= 1

    def _refused(self, program: Program) -> list[Action]:
        seats = self._engines.values()
        if not seats or any(seat.kv.could_ever_hold(program.wanted) for seat in seats):
            return []
        largest = max(seat.kv.capacity_tokens for seat in seats)
        return [Refuse(program.id, program.wanted.tokens, largest)]
