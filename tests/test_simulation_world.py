"""A whole simulated run: every program ends, every figure adds up, and equal input gives equal output."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from simulated import closed, plan, small_profile
from sostenuto.errors import ConfigError
from sostenuto.runtime.simulation.faults import ClientDies, EngineDies
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn, Workload
from sostenuto.runtime.simulation.profile import FleetProfile, OnRelease, ToolServerProfile
from sostenuto.runtime.simulation.program import turn_limit_tokens
from sostenuto.runtime.simulation.results import RunResult
from sostenuto.runtime.simulation.workloads import generate
from sostenuto.runtime.simulation.world import Stalled, simulate
from sostenuto.scheduler.actions import Action, Evict, MoveSandbox
from sostenuto.scheduler.events import SandboxClaim
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.kv import Segment
from sostenuto.scheduler.lifecycle import Move
from sostenuto.scheduler.program import Program
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId, ProgramId, SandboxRung

ONE = FleetProfile(engine=small_profile())
TWO = FleetProfile(engines=2, engine=small_profile())


class Eager(Frame):
    """Everything starts at once, on the first engine that it knows; what acts is given up when told to."""

    def __init__(self, *, gives_up: bool = False, pauses: bool = False, live: int = 64) -> None:
        super().__init__(SchedulerSettings(live_programs=live, prepare_ahead=live))
        self._runnable: list[Program] = []
        self._acting: list[Program] = []
        self._gives_up, self._pauses = gives_up, pauses

    def _became_runnable(self, program: Program, now_s: float) -> None:
        self._runnable.append(program)

    def _began_acting(self, program: Program, now_s: float) -> None:
        self._acting.append(program)

    def _leaves(self, program: Program, now_s: float) -> None:
        if program in self._runnable:
            self._runnable.remove(program)

    def _decide(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for program in self._acting:
            if self._gives_up and program.engine is not None:
                actions.append(Evict(program.id, program.engine.id))
                self._give_up_kv(program, Move.EVICT, now_s)
            if self._pauses:
                actions.append(MoveSandbox(program.id, SandboxRung.SNAPSHOTTED))
        self._acting.clear()
        seat = next(iter(self._engines.values()), None)
        if seat is not None:
            actions += [self._start(program, seat, now_s) for program in self._runnable]
            self._runnable.clear()
        return actions


class Forgetful(Eager):
    """Nothing ever starts."""

    def _decide(self, now_s: float) -> list[Action]:
        return []


class Restless(Forgetful):
    """Nothing ever starts, and it wants to be woken for it."""

    def _look_again_s(self) -> float | None:
        return 0.0


def scheduler() -> Scheduler:
    return Scheduler(SchedulerSettings(live_programs=64, prepare_ahead=64))


def several(count: int) -> list[Plan]:
    return [plan(f"p{n}", prompt=100 + 10 * n, shared=[Segment("system", 200)]) for n in range(count)]


def run(policy: Frame, plans: Sequence[Plan], fleet: FleetProfile = ONE, **options: object) -> RunResult:
    return simulate(policy, closed(plans, len(plans)), fleet, **options)  # pyright: ignore[reportArgumentType]


def test_equal_input_gives_equal_output():
    workload = generate("swe-light", programs=16, seed=3, concurrency=8)
    fleet = FleetProfile(engines=2, engine=small_profile(kv_tokens=262_144))
    runs = [simulate(scheduler(), workload, fleet, timeline=True, series=True) for _ in range(2)]
    assert replace(runs[0], wall_s=0.0) == replace(runs[1], wall_s=0.0)


def test_every_figure_adds_up():
    workload = generate("swe-light", programs=16, seed=3, concurrency=8)
    fleet = FleetProfile(engines=2, engine=small_profile(kv_tokens=262_144))
    result = simulate(scheduler(), workload, fleet)
    plans = {one.id: one for one in workload.programs}
    assert sorted(one.id for one in result.programs) == sorted(plans)
    for one in result.programs:
        turns = plans[one.id].turns
        assert (one.failed, one.turns) == ("", len(turns))
        assert one.generated_tokens == sum(turn.output_tokens for turn in turns)
        assert one.cached_tokens + one.prefilled_tokens == one.context_tokens
        assert one.prefilled_tokens >= one.needed_tokens - plans[one.id].shared_tokens
        assert one.tool_s == pytest.approx(sum(turn.tool_s for turn in turns))
        parts_s = one.prepare_s + sum(one.turn_waits_s) + one.prefill_s + one.decode_s + one.tool_s
        assert one.completion_s == pytest.approx(parts_s)
    for name in ("prefilled_tokens", "generated_tokens", "cached_tokens"):
        of_programs = sum(getattr(one, name) for one in result.programs)
        assert of_programs == sum(getattr(engine, name) for engine in result.engines)


def test_one_program_takes_what_its_plan_says():
    result = run(scheduler(), [plan("a", prepare_s=3.0)]).programs[0]
    assert (result.prepare_s, result.environment_wait_s) == (3.0, 3.0)
    assert result.tool_s == 1.0
    assert result.completion_s == pytest.approx(4.0 + result.prefill_s + result.decode_s)
    assert result.sandbox_s == result.completion_s
    assert result.needed_tokens == 150
    assert result.waits_by_reason_s["tool"] == pytest.approx(1.0)


def test_a_common_prefix_is_needed_once():
    result = run(scheduler(), several(3))
    assert sum(one.needed_tokens for one in result.programs) == 200 + 100 + 110 + 120 + 3 * 50


def test_a_closed_workload_brings_the_next_program_when_one_is_over():
    result = simulate(scheduler(), closed(several(3), 1), ONE)
    ended = [one.finished_s for one in result.programs]
    assert [one.submitted_s for one in result.programs] == [0.0, *ended[:2]]


def test_an_open_workload_brings_programs_at_their_time():
    plans = [plan("late", arrival_s=5.0), plan("early", arrival_s=1.0)]
    result = simulate(scheduler(), Workload("open", tuple(plans)), ONE)
    assert [(one.id, one.submitted_s) for one in result.programs] == [("early", 1.0), ("late", 5.0)]


def test_kv_that_is_given_up_is_prefilled_again_where_the_engine_frees_it():
    fleet = FleetProfile(engine=small_profile(on_release=OnRelease.FREE))
    held, dropped = (
        run(Eager(gives_up=gives_up), [plan("a")], fleet).programs[0] for gives_up in (False, True)
    )
    assert (held.evictions, dropped.evictions) == (0, 1)
    assert dropped.prefilled_tokens == held.prefilled_tokens + held.cached_tokens


def test_programs_wait_in_the_engine_when_the_policy_holds_nobody_back():
    fleet = FleetProfile(engine=small_profile(concurrency=1))
    waits = [max(one.turn_waits_s) for one in run(Eager(), several(3), fleet).programs]
    admissions = [max(one.admission_waits_s) for one in run(Eager(), several(3), fleet).programs]
    assert admissions == [0.0, 0.0, 0.0]
    assert max(waits) > 0.1


def test_time_in_the_environment_queue_with_engines_idle_is_counted():
    fleet = FleetProfile(engine=small_profile(), tools=ToolServerProfile(prepare_concurrency=1))
    plans = [plan(name, prepare_s=10.0) for name in "ab"]
    result = {one.id: one for one in run(scheduler(), plans, fleet).programs}
    assert result[ProgramId("b")].prepare_s == 20.0
    assert result[ProgramId("b")].environment_wait_s == 20.0


def test_a_program_that_no_engine_can_hold_is_refused_and_the_others_go_on():
    large = plan("large", prompt=9_000)
    result = {one.id: one for one in run(scheduler(), [large, plan("a")]).programs}
    assert "needs 9032 tokens of KV, engines have 8192" in result[ProgramId("large")].failed
    assert result[ProgramId("a")].failed == ""


def test_a_program_that_an_engine_cannot_hold_fails_when_the_policy_lets_it_through():
    result = run(Eager(), [plan("large", prompt=9_000), plan("a")])
    assert {one.id: bool(one.failed) for one in result.programs} == {"large": True, "a": False}


def test_a_policy_that_forgets_a_program_is_told_which():
    with pytest.raises(Stalled, match=r"Forgetful has nothing in motion.* a waiting"):
        run(Forgetful(), [plan("a")])


def test_a_policy_that_wakes_for_nothing_is_found_out():
    with pytest.raises(Stalled, match=r"Restless has nothing in motion"):
        run(Restless(), [plan("a")])


LONG = [PlannedTurn(400, "bash", 1.0, 50), PlannedTurn(400)]


def test_programs_of_a_dead_engine_go_on_elsewhere_with_their_tokens():
    plans = [plan(f"p{n}", turns=LONG) for n in range(4)]
    result = run(scheduler(), plans, TWO, faults=[EngineDies(at_s=2.0, engine=0)])
    assert [one.failed for one in result.programs] == [""] * 4
    assert [one.generated_tokens for one in result.programs] == [800] * 4
    assert result.engines[0].generated_tokens > 0
    assert sum(one.prefilled_tokens for one in result.programs) > 4 * 150


def test_the_only_engine_comes_back_empty():
    fault = EngineDies(at_s=2.0, engine=0, back_after_s=30.0)
    result = run(scheduler(), [plan("a", turns=LONG)], faults=[fault])
    assert result.programs[0].generated_tokens == 800
    assert result.makespan_s > 32.0
    assert [engine.id for engine in result.engines] == ["engine-0", "engine-0"]


def test_a_program_whose_client_died_is_given_up_after_its_lease():
    fault = ClientDies(at_s=1.0, program_id=ProgramId("a"), lease_s=60.0)
    result = {one.id: one for one in run(scheduler(), [*several(2), plan("a")], faults=[fault]).programs}
    assert result[ProgramId("a")].failed == "nothing was heard of it for its lease"
    assert 60.0 <= result[ProgramId("a")].finished_s < 62.0
    assert result[ProgramId("p0")].failed == ""


def test_a_fault_of_an_engine_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="engine 3 is to die, the fleet has 1; count from 0"):
        run(scheduler(), [plan("a")], faults=[EngineDies(at_s=1.0, engine=3)])


@pytest.mark.parametrize("keep_kv", [True, False])
def test_new_weights_are_published_while_programs_run(keep_kv: bool):
    policy = scheduler()
    plans = [plan(f"p{n}", turns=LONG) for n in range(3)]
    result = run(policy, plans, TWO, publish_every_s=4.0, keep_kv=keep_kv)
    assert [one.generated_tokens for one in result.programs] == [800] * 3
    assert policy.gate.deployed is not None
    assert policy.gate.deployed.number >= 1
    recomputed = sum(one.prefilled_tokens for one in result.programs) > 3 * 170
    assert recomputed is not keep_kv


def test_a_sandbox_that_was_put_away_comes_back_before_its_next_tool():
    tools = ToolServerProfile(snapshot_s=3.0, restore_s=5.0)
    turns = [PlannedTurn(20, "bash", 1.0, 50), PlannedTurn(20, "bash", 1.0, 50), PlannedTurn(20)]
    one = plan("a", turns=turns, sandbox=SandboxClaim(memory_bytes=10))
    result = run(Eager(pauses=True), [one], FleetProfile(engine=small_profile(), tools=tools))
    assert result.programs[0].tool_queue_s >= 5.0
    assert result.peak_sandbox_bytes == 10


def test_programs_that_are_turned_away_come_again():
    policy = Scheduler(SchedulerSettings(live_programs=1, prepare_ahead=1, queue_limit=1))
    result = run(policy, several(4))
    assert [one.failed for one in result.programs] == [""] * 4


def test_the_timeline_covers_the_whole_life_of_a_program():
    stretches = run(scheduler(), [plan("a", prepare_s=2.0)], timeline=True).programs[0].stretches
    names = ["queued", "preparing", "waiting", "reasoning", "acting", "ready", "reasoning"]
    assert [stretch.what for stretch in stretches] == names
    assert all(a.end_s == b.start_s for a, b in pairwise(stretches))
    assert {stretch.engine for stretch in stretches[3:]} == {EngineId("engine-0")}


def test_curves_stay_short_however_long_the_run():
    slow = plan("a", turns=[PlannedTurn(20, "bash", 20_000.0, 50), PlannedTurn(20)])
    result = run(scheduler(), [slow], series=True)
    assert 500 < len(result.waiting) <= 2_048
    assert len(result.engines[0].decoding) == len(result.engines[0].used_tokens) == len(result.waiting)


@pytest.mark.parametrize(("output", "limit"), [(1, 1), (5, 8), (256, 256), (3_000, 4_096), (5_000, 5_000)])
def test_the_limit_of_a_turn_is_known_before_its_length(output: int, limit: int):
    assert turn_limit_tokens(output) == limit
