"""Simulated engines behind the real dispatcher: the same run as without it, and its figures add up.

What happens within one instant may come in another order, so two runs under pressure are near to each other
where a policy decides on several programs at once, and equal where it does not.
"""

import asyncio
from dataclasses import replace
from statistics import fmean

import pytest

from simulated import closed, plan, small_profile
from sostenuto.errors import ConfigError
from sostenuto.runtime.simulation.dispatched.loop import NothingToDo, VirtualLoop
from sostenuto.runtime.simulation.dispatched.run import Publications, simulate_dispatched
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn, Workload
from sostenuto.runtime.simulation.profile import FleetProfile, OnRelease
from sostenuto.runtime.simulation.results import RunResult
from sostenuto.runtime.simulation.workloads import generate
from sostenuto.runtime.simulation.world import Stalled, simulate
from sostenuto.scheduler.actions import Action
from sostenuto.scheduler.baselines.request_level import RequestSticky
from sostenuto.scheduler.events import Event
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.kv import Segment
from sostenuto.scheduler.policies import make_policy
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.scheduler.update_terms import DEFAULT, KEEP_ALL

ONE = FleetProfile(engine=small_profile())
SETTINGS = SchedulerSettings(live_programs=64, prepare_ahead=64)


class Forgetful(RequestSticky):
    """Nothing ever starts."""

    def _decide(self, now_s: float) -> list[Action]:
        return []


class Reserving(Scheduler):
    """Keeps count of how much was reserved at most."""

    most_tokens = 0

    def apply(self, event: Event, now_s: float) -> list[Action]:
        actions = super().apply(event, now_s)
        reserved = sum(tokens for tokens, _ in self.snapshot().engines.values())
        self.most_tokens = max(self.most_tokens, reserved)
        return actions


def alone(one: Plan) -> Plan:
    """With a prefix of its own, and turns for which a program's limit is no looser than each one's own."""
    turns = tuple(replace(turn, output_tokens=129 + turn.output_tokens % 128) for turn in one.turns)
    return replace(one, shared=(), prompt_tokens=one.prompt_tokens + one.shared_tokens, turns=turns)


def crowd(kv_tokens: int, seed: int = 5) -> tuple[Workload, FleetProfile]:
    """Eight programs; two or three of them fill an engine of 65,536 tokens in the end."""
    drawn = generate("rl-groups", programs=8, seed=seed, group_size=1, concurrency=8)
    workload = replace(drawn, programs=tuple(alone(one) for one in drawn.programs))
    profile = small_profile(kv_tokens=kv_tokens, on_release=OnRelease.IGNORE)
    return workload, FleetProfile(engines=2, engine=profile)


def mean_s(result: RunResult) -> float:
    return fmean(one.completion_s for one in result.programs)


def both(name: str, kv_tokens: int, *, grain: int, seed: int = 5) -> tuple[RunResult, RunResult]:
    """Without the dispatcher, and with it."""
    workload, fleet = crowd(kv_tokens, seed)
    plain = simulate(make_policy(name, SETTINGS), workload, fleet)
    return plain, simulate_dispatched(make_policy(name, SETTINGS), workload, fleet, grain=grain)


@pytest.mark.parametrize("grain", [1, 64])
@pytest.mark.parametrize(("name", "kv_tokens"), [("request-sticky", 65_536), ("sostenuto", 1 << 20)])
def test_the_dispatcher_changes_nothing(name: str, kv_tokens: int, grain: int):
    plain, driven = both(name, kv_tokens, grain=grain)
    assert mean_s(driven) == pytest.approx(mean_s(plain), rel=1e-9)
    assert [replace(one, kv_tokens=kv_tokens) for one in driven.engines] == plain.engines


def test_under_pressure_the_dispatcher_keeps_to_the_order_of_things_within_a_tenth():
    pairs = [both("sostenuto", 65_536, grain=16, seed=seed) for seed in (1, 2, 3)]
    assert sum(one.evictions for plain, _ in pairs for one in plain.programs) > 10
    plain_s, driven_s = (fmean(mean_s(run) for run in runs) for runs in zip(*pairs, strict=True))
    assert driven_s == pytest.approx(plain_s, rel=0.1)


def run(policy: Frame, *plans: Plan, **options: object) -> RunResult:
    workload = closed(plans, len(plans))
    return simulate_dispatched(policy, workload, ONE, grain=1, **options)  # pyright: ignore[reportArgumentType]


def test_equal_input_gives_equal_output():
    workload, fleet = crowd(65_536)
    first, second = (simulate_dispatched(Scheduler(SETTINGS), workload, fleet) for _ in range(2))
    assert replace(first, wall_s=0.0) == replace(second, wall_s=0.0)


def test_every_figure_adds_up():
    workload, fleet = crowd(65_536)
    result = simulate_dispatched(Scheduler(SETTINGS), workload, fleet)
    plans = {one.id: one for one in workload.programs}
    assert sorted(one.id for one in result.programs) == sorted(plans)
    for one in result.programs:
        turns = plans[one.id].turns
        assert (one.failed, one.turns) == ("", len(turns))
        assert one.generated_tokens == sum(turn.output_tokens for turn in turns)
        assert one.cached_tokens + one.prefilled_tokens == one.context_tokens
        assert one.prefilled_tokens >= one.needed_tokens
        parts_s = one.prepare_s + sum(one.turn_waits_s) + one.prefill_s + one.decode_s + one.tool_s
        assert one.completion_s == pytest.approx(parts_s)
        assert one.waits_by_reason_s["tool"] == pytest.approx(one.tool_s)
    for name in ("prefilled_tokens", "generated_tokens", "cached_tokens"):
        of_programs = sum(getattr(one, name) for one in result.programs)
        assert of_programs == sum(getattr(engine, name) for engine in result.engines)


def test_one_program_takes_what_its_plan_says():
    result = run(Scheduler(SETTINGS), plan("a", prepare_s=3.0)).programs[0]
    assert (result.prepare_s, result.environment_wait_s, result.tool_s) == (3.0, 3.0, 1.0)
    assert result.completion_s == pytest.approx(4.0 + result.prefill_s + result.decode_s)
    assert result.sandbox_s == result.completion_s
    assert result.needed_tokens == 150


def test_a_common_prefix_is_computed_once():
    shared = [Segment("system", 160)]
    plans = [plan("a", shared=shared, prompt=108), plan("b", shared=shared, prompt=108, prepare_s=9.0)]
    result = run(RequestSticky(SETTINGS), *plans)
    assert sum(one.prefilled_tokens for one in result.programs) == 160 + 2 * (108 + 50)


@pytest.mark.parametrize("grain", [1, 64])
@pytest.mark.parametrize("shared", [100, 1_630])
def test_a_common_prefix_is_reserved_once_and_no_more_than_is_common(grain: int, shared: int):
    policy = Reserving(SETTINGS)
    segments = [Segment("system", shared)]
    plans = [plan(f"p{n}", shared=segments, prompt=92, turns=[PlannedTurn(250)]) for n in range(8)]
    simulate_dispatched(policy, closed(plans, 8), ONE, grain=grain)
    # The first one was alone when it began, and holds its prompt for itself.
    assert shared + 8 * (92 + 250) <= policy.most_tokens * grain < 2 * shared + 8 * (92 + 256 + 100)


def test_an_open_workload_brings_programs_at_their_time():
    plans = (plan("late", arrival_s=5.0), plan("early", arrival_s=1.0))
    result = simulate_dispatched(Scheduler(SETTINGS), Workload("open", plans), ONE)
    assert [(one.id, one.submitted_s) for one in result.programs] == [("early", 1.0), ("late", 5.0)]


def test_a_closed_workload_brings_the_next_program_when_one_is_over():
    result = simulate_dispatched(Scheduler(SETTINGS), closed([plan(name) for name in "abc"], 1), ONE)
    ended = [one.finished_s for one in result.programs]
    assert [one.submitted_s for one in result.programs] == [0.0, *ended[:2]]


def test_a_program_that_no_engine_can_hold_is_refused_and_the_others_go_on():
    result = run(Scheduler(SETTINGS), plan("large", prompt=9_000), plan("a"))
    failed = {str(one.id): one.failed for one in result.programs}
    assert "its first turn needs KV of 9032, not 8192" in failed["large"]
    assert failed["a"] == ""


@pytest.mark.parametrize("keep_kv", [True, False])
def test_new_weights_are_published_while_programs_run(keep_kv: bool):
    policy = Scheduler(SETTINGS)
    turns = [PlannedTurn(400, "bash", 1.0, 50), PlannedTurn(400)]
    plans = [plan(f"p{n}", turns=turns) for n in range(3)]
    publications = Publications(4.0, KEEP_ALL if keep_kv else DEFAULT)
    result = run(policy, *plans, publications=publications)
    assert [one.generated_tokens for one in result.programs] == [800] * 3
    assert policy.gate.deployed is not None
    assert policy.gate.deployed.number >= 1
    recomputed = sum(one.prefilled_tokens for one in result.programs) > 3 * 170
    assert recomputed is not keep_kv


def test_a_policy_that_forgets_a_program_is_told_which():
    with pytest.raises(Stalled, match=r"Forgetful has nothing in motion.*Script a turn=0 of 2"):
        run(Forgetful(SETTINGS), plan("a"))


def test_a_grain_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="grain is 0; give at least 1"):
        simulate_dispatched(Scheduler(SETTINGS), closed([plan("a")], 1), ONE, grain=0)


def test_time_goes_on_to_what_is_due_and_the_clock_comes_before_timers():
    loop, seen = VirtualLoop(), list[tuple[float, str]]()

    async def both_at_two() -> None:
        loop.clock.call_at(2.0, lambda: seen.append((loop.time(), "clock")))
        await asyncio.sleep(2.0)
        seen.append((loop.time(), "timer"))

    loop.run_until_complete(both_at_two())
    loop.close()
    assert seen == [(2.0, "clock"), (2.0, "timer")]


def test_a_loop_with_nothing_to_do_says_so():
    loop = VirtualLoop()
    waiting = loop.create_future()
    with pytest.raises(NothingToDo, match="every coroutine waits"):
        loop.run_until_complete(waiting)
    loop.close()
