"""Nobody waits for longer than the bound says, and an adversary comes near it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from simulated import closed, plan, small_profile
from sostenuto.runtime.simulation.plan import PlannedTurn, Workload
from sostenuto.runtime.simulation.profile import FleetProfile
from sostenuto.runtime.simulation.workloads import generate, working_set_tokens
from sostenuto.runtime.simulation.world import simulate
from sostenuto.scheduler.events import Event, Tick
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.scheduler.patience import Patience
from sostenuto.scheduler.program import Program
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings
from test_scheduler_machine import TURN, Engine, Shell

TURN_S = 40.0
"""No turn takes longer."""


class Watched(Patience):
    """Keeps how much of its bound each wait took."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: list[float] = []

    def served(self, program: Program, now_s: float, patience_s: float, engines: int) -> None:
        waited_s = now_s - program.runnable_since_s
        self.shares.append(waited_s / self.bound_s(program, patience_s, engines))
        super().served(program, now_s, patience_s, engines)


def worst_share(workload: Workload, fleet: FleetProfile, patience_s: float) -> float:
    """Of its bound, that a wait took."""
    policy = Scheduler(SchedulerSettings(patience_s=patience_s))
    policy.patience = watched = Watched()
    simulate(policy, workload, fleet)
    return max(watched.shares)


@pytest.mark.parametrize(("engines", "turns"), [(1, 6), (2, 6), (1, 2)])
def test_programs_that_each_need_nearly_the_whole_pool_come_near_the_bound(engines: int, turns: int):
    acting = PlannedTurn(1500, "bash", 2.0, 20)
    plans = [plan(f"p{n}", prompt=6000, turns=[*[acting] * turns, PlannedTurn(1500)]) for n in range(16)]
    fleet = FleetProfile(engines=engines, engine=small_profile(kv_tokens=20_000))
    share = worst_share(closed(plans, 16), fleet, patience_s=30.0)
    assert 0.2 <= share <= 1.0


@pytest.mark.parametrize("name", ["swe-light", "rl-groups"])
def test_usual_programs_stay_below_the_bound(name: str):
    workload = generate(name, programs=24, seed=5, concurrency=12)
    pool = int(working_set_tokens(workload) / 2 / 2)
    fleet = FleetProfile(engines=2, engine=small_profile(kv_tokens=pool))
    assert worst_share(workload, fleet, patience_s=60.0) < 1.0


def test_programs_of_one_turn_each_are_bounded_as_well():
    plans = [plan(f"p{n}", prompt=6000, turns=[PlannedTurn(3000)]) for n in range(12)]
    fleet = FleetProfile(engine=small_profile(kv_tokens=12_000))
    assert worst_share(closed(plans, 12), fleet, patience_s=30.0) <= 1.0


SLACK = 1.02
"""Engines are looked at again once a second."""


class Prompt(Shell):
    """Equal engines that live and stay open, and turns that end in time: every wait ends in time."""

    engine_dies = engine_comes = publish = None  # pyright: ignore[reportAssignmentType]

    def __init__(self) -> None:
        super().__init__()
        self.watched = Watched()
        self.scheduler.patience, self.twin.patience = self.watched, Watched()
        for scheduler in (self.scheduler, self.twin):
            scheduler.patience.turn_took(TURN_S)

    @initialize(kv_tokens=st.sampled_from([160, 240]), slots=st.integers(1, 3), count=st.integers(1, 3))
    def opens(self, kv_tokens: int, slots: int, count: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().opens([Engine(kv_tokens, slots, 16, 0) for _ in range(count)], None)

    def feed(self, event: Event, after_s: float = 0.0) -> None:
        until_s = self.now_s + after_s
        while (wake_s := self.scheduler.wake_at_s()) is not None and wake_s <= until_s:
            self.now_s = max(self.now_s, wake_s)
            self.end_late_turns()
            super().feed(Tick())
        self.now_s = until_s
        self.end_late_turns()
        super().feed(event)

    def end_late_turns(self) -> None:
        for program_id, agent in list(self.agents.items()):
            if agent.phase is Phase.REASONING and self.now_s - agent.since_s >= TURN_S - 2:
                self.end_turn(program_id, TURN, "bash")

    @invariant()
    def nobody_waited_for_longer_than_its_bound(self) -> None:
        assert max(self.watched.shares, default=0.0) <= SLACK


TestPrompt = Prompt.TestCase
TestPrompt.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
