"""Many programs at once, for tests of what an event costs and of equal answers to equal events."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from sostenuto.scheduler.actions import Action, Decode
from sostenuto.scheduler.events import (
    EngineJoined,
    EngineLoaded,
    Event,
    Finished,
    Heard,
    Prepared,
    Submitted,
    Tick,
    ToolReturned,
    TurnCost,
    TurnEnded,
)
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.kv import Footprint, Segment
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId, ProgramId, Version

_COST = TurnCost(100, 0.1, 10, 0.2)


def lines_run(do: Callable[[], object]) -> int:
    """Lines of Python executed by it: a measure of work that no machine disturbs."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Callable[[FrameType, str, Any], Any]:
        nonlocal count
        del frame, arg
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(before)
    return count


class Crowd:
    """Programs of which a quarter acts, one in ten decodes, and all others wait."""

    def __init__(self, policy: Frame, programs: int, *, engines: int = 8) -> None:
        self.policy = policy
        self.now_s = 0.0
        acting, decoding = programs // 4, programs // 10
        pool = (acting + decoding) * 100 // engines
        for number in range(engines):
            self.feed(EngineJoined(EngineId(f"e{number}"), Version(0, 0), pool, programs))
        for number in range(programs):
            program_id = ProgramId(f"p{number:05}")
            self.feed(Submitted(program_id, 1e9))
            said = self.feed(Prepared(program_id, Footprint(90), 10))
            if number < acting and any(isinstance(action, Decode) for action in said):
                self.feed(TurnEnded(program_id, 1, Footprint(100), ("bash",)))

    def feed(self, event: Event, after_s: float = 0.001) -> list[Action]:
        self.now_s += after_s
        return self.policy.apply(event, self.now_s)

    def of_phase(self, phase: Phase) -> list[ProgramId]:
        return [id_ for id_, other in self.policy.snapshot().phases.items() if other is phase]

    def a_bit_of_everything(self) -> int:
        """Turns end, results come back, programs come and go, time passes; how many lines that ran."""
        decoding = self.of_phase(Phase.REASONING)[:8]
        return sum(lines_run(lambda e=event: self.feed(e, 0.05)) for event in _everything(decoding))


def _everything(decoding: list[ProgramId]) -> Iterator[Event]:
    for index, program_id in enumerate(decoding):
        if index % 2:
            yield TurnEnded(program_id, 1, Footprint(100), ("bash",))
            yield ToolReturned(program_id, 1, Footprint(100), 0)
        else:
            yield Finished(program_id)
        yield Submitted(ProgramId(f"after {program_id}"), 1e9)
        yield Heard(ProgramId(f"after {program_id}"))
        yield EngineLoaded(EngineId("e0"), 0, used_share=0.5)
        yield Tick()


def replayed() -> str:
    """All that the scheduler says to a run in which everything happens."""
    crowd = Crowd(Scheduler(SchedulerSettings(live_programs=200, prepare_ahead=200)), 120)
    said: list[Action] = []
    turns = dict.fromkeys(crowd.of_phase(Phase.REASONING), 1)
    for index in range(100):
        for program_id in crowd.of_phase(Phase.REASONING)[index % 5 :: 7]:
            footprint = Footprint(80 + index % 40, (Segment(f"g{index % 3}", 20),))
            told = crowd.feed(
                TurnEnded(program_id, turns[program_id], footprint, (f"t{index % 4}",), _COST), 0.3
            )
            if index % 2:
                told += crowd.feed(ToolReturned(program_id, turns[program_id], footprint, 10), 0.3)
            said += told
            turns |= {action.program_id: action.turn for action in told if isinstance(action, Decode)}
        told = crowd.feed(Tick(), 1.0)
        turns |= {action.program_id: action.turn for action in told if isinstance(action, Decode)}
        said += told
    return "\n".join(map(repr, said))
