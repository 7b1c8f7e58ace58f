"""Faults that published schedulers have shown, none of which may show here.

Where ThunderAgent shows one in the same frame, it does so in the tests of that baseline.
"""

import subprocess
import sys

import numpy as np
import pytest

from baseline_world import Hand, decoded
from scheduler_crowd import Crowd, lines_run, replayed
from simulated import closed, plan, small_profile
from sostenuto.errors import InvalidTransition
from sostenuto.runtime.simulation.plan import PlannedTurn
from sostenuto.runtime.simulation.profile import FleetProfile
from sostenuto.runtime.simulation.workloads import generate, working_set_tokens
from sostenuto.runtime.simulation.world import simulate
from sostenuto.scheduler.actions import Action, Evict, Expire, Prepare, Refuse
from sostenuto.scheduler.baselines.thunderagent import ThunderAgent
from sostenuto.scheduler.events import (
    EngineLoaded,
    EngineLost,
    Event,
    Finished,
    Heard,
    Prepared,
    Submitted,
    Tick,
    ToolReturned,
    TurnEnded,
)
from sostenuto.scheduler.kv import Footprint, Segment
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.scheduler.program import Reason
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId, ProgramId

E0 = EngineId("e0")


def ours(*pools: int | None, slots: int = 256, patience_s: float = 300.0) -> Hand:
    return Hand(Scheduler(SchedulerSettings(patience_s=patience_s)), *pools, concurrency=slots)


def evicted(actions: list[Action]) -> list[str]:
    return [action.program_id for action in actions if isinstance(action, Evict)]


def phase(hand: Hand, name: str) -> Phase:
    return hand.policy.snapshot().phases[ProgramId(name)]


def reserved(hand: Hand) -> int:
    return sum(tokens for tokens, _ in hand.policy.snapshot().engines.values())


def crowd(hand: Hand, sizes: dict[str, int]) -> None:
    for name, tokens in sizes.items():
        hand.come(name, tokens)
        hand.acts(name, tokens)


# ---- who gives up its KV ----


def test_one_token_too_many_costs_one_program_its_kv_and_not_all_of_them():
    hand = ours(10_000)
    crowd(hand, {f"p{index}": 1000 for index in range(10)})
    assert len(evicted(hand.come("one", 1, at_s=60))) == 1


def test_the_long_idle_program_pays_and_not_the_fresh_small_one():
    hand = ours(101_000)
    crowd(hand, {"idle": 70_000})
    hand.come("fresh", 30_000)
    hand.acts("fresh", 30_000, at_s=300)
    said = hand.come("next", 30_000)
    assert evicted(said) == ["idle"]
    assert decoded(said) == ["next"]


@pytest.mark.parametrize("order", [("sixty", "ten", "nine"), ("nine", "ten", "sixty")])
def test_no_more_is_given_up_than_is_needed(order: tuple[str, ...]):
    sizes = {"sixty": 60_000, "ten": 10_000, "nine": 9_000}
    hand = ours(79_000)
    crowd(hand, {name: sizes[name] for name in order})
    assert evicted(hand.come("next", 10_000, at_s=120)) == ["ten"]


def test_an_idle_program_that_nobody_releases_does_not_keep_its_room_from_the_others():
    hand = ours(1000)
    crowd(hand, {"silent": 900})
    assert decoded(hand.come("next", 800, at_s=600)) == ["next"]


def test_the_engine_is_told_of_kv_that_is_given_up():
    hand = ours(1000)
    crowd(hand, {"a": 900})
    assert Evict(ProgramId("a"), E0) in hand.come("next", 800, at_s=600)


# ---- what is counted ----


def test_a_prefix_that_programs_share_is_counted_once():
    hand = ours(26_000)
    prefix = (Segment("system", 10_000),)
    for index in range(8):
        hand.come(f"p{index}", 12_000, shared=prefix)
    assert len(hand.where) == 8
    assert reserved(hand) == 26_000


def test_a_program_that_no_engine_can_hold_is_refused_at_once_with_the_numbers():
    hand = ours(1000, 800)
    assert Refuse(ProgramId("large"), 5000, 1000) in hand.come("large", 5000)


def test_a_program_as_large_as_the_pool_is_admitted_alone():
    hand = ours(1000, patience_s=10)
    hand.come("a", 100)
    assert decoded(hand.come("all", 1000)) == []
    assert decoded(hand.come("late", 100, at_s=20)) == []
    assert decoded(hand.answers("a")) == ["all"]
    assert hand.policy.snapshot().engines[E0] == (1000, 1)


def test_one_report_of_an_engine_that_says_how_large_it_is_changes_nothing():
    quiet, noisy = ours(1000), ours(1000)
    noisy.feed(EngineLoaded(E0, 50, used_share=1.0, hit_rate=0.0, preemptions=9))
    for hand in (quiet, noisy):
        crowd(hand, {"a": 400})
        hand.come("b", 400)
    assert quiet.where == noisy.where
    assert quiet.policy.snapshot() == noisy.policy.snapshot()


def test_room_is_kept_for_those_who_act_to_go_on_in():
    hand = ours(1000)
    hand.come("veteran", 100)
    for _ in range(60):
        hand.acts("veteran", 100)
        hand.returns("veteran", 200)
    hand.acts("veteran", 200)
    hand.come("busy", 100)
    assert decoded(hand.come("greedy", 690)) == []
    assert decoded(hand.come("modest", 500)) == ["modest"]


# ---- who waits, and for what ----


def test_a_large_program_that_waits_does_not_make_a_tiny_one_wait():
    hand = ours(1000)
    hand.come("a", 900)
    assert decoded(hand.come("large", 500)) == []
    assert decoded(hand.come("tiny", 10)) == ["tiny"]


def test_room_that_becomes_free_is_used_in_the_same_event():
    hand = ours(1000)
    hand.come("a", 800)
    hand.come("b", 800)
    assert decoded(hand.answers("a", at_s=10.1)) == ["b"]


def test_a_waiting_program_that_is_released_is_never_let_through():
    hand = ours(1000)
    hand.come("a", 800)
    hand.come("b", 800)
    assert hand.feed(Finished(ProgramId("b"))) == []
    assert decoded(hand.answers("a")) == []
    assert reserved(hand) == 0


def test_a_waiting_program_whose_client_has_gone_is_expired_and_never_decodes():
    hand = ours(1000)
    hand.come("a", 800)
    hand.feed(Submitted(ProgramId("gone"), lease_s=30.0))
    hand.feed(Prepared(ProgramId("gone"), Footprint(800), 0))
    assert Expire(ProgramId("gone")) in hand.wakes(31)
    hand.feed(Finished(ProgramId("gone")))
    assert decoded(hand.answers("a")) == []


@pytest.mark.parametrize("acting", [False, True])
def test_kv_of_a_program_whose_agent_crashed_is_free_after_its_lease(acting: bool):
    hand = ours(1000)
    hand.feed(Submitted(ProgramId("crashed"), lease_s=60.0))
    hand.feed(Prepared(ProgramId("crashed"), Footprint(900), 0))
    if acting:
        hand.acts("crashed", 900)
    hand.feed(Heard(ProgramId("crashed")), at_s=50)
    assert hand.wakes(109) == []
    assert hand.wakes(111) == [Expire(ProgramId("crashed"))]
    hand.feed(Finished(ProgramId("crashed")))
    assert reserved(hand) == 0


def test_every_wait_has_a_reason():
    hand = ours(1000, slots=2)
    hand.come("a", 500)
    hand.come("large", 900)
    hand.come("b", 10)
    hand.come("c", 10)
    waits = {str(name): reason for name, reason in hand.policy.snapshot().waits_for.items()}
    assert waits == {"large": Reason.KV, "c": Reason.SLOTS}


# ---- where ----


def test_all_turns_of_a_program_are_on_one_engine_below_saturation():
    plans = [
        plan(f"p{n}", turns=[*[PlannedTurn(20, "bash", 1.0, 50)] * 5, PlannedTurn(20)]) for n in range(8)
    ]
    fleet = FleetProfile(engines=2, engine=small_profile())
    result = simulate(Scheduler(), closed(plans, 8), fleet)
    assert [program.moves for program in result.programs] == [0] * 8
    assert sum(program.evictions for program in result.programs) == 0


def test_only_a_program_that_lost_its_kv_goes_on_elsewhere():
    workload = generate("rl-groups", programs=32, seed=7, concurrency=16)
    pool = int(working_set_tokens(workload) / 1.2 / 4)
    fleet = FleetProfile(engines=4, engine=small_profile(kv_tokens=pool))
    result = simulate(Scheduler(), workload, fleet)
    evictions = sum(program.evictions for program in result.programs)
    turns = sum(program.turns for program in result.programs)
    assert all(program.moves <= program.evictions for program in result.programs)
    assert 0 < evictions < 0.2 * turns


def test_a_prefix_that_all_share_does_not_draw_them_all_to_one_engine():
    hand = ours(*[1_000_000] * 4)
    for index in range(100):
        hand.come(f"p{index}", 1200, shared=(Segment("system", 1000),))
    counts = [list(hand.where.values()).count(f"e{number}") for number in range(4)]
    assert max(counts) - min(counts) <= 2


def test_programs_of_a_lost_engine_go_on_elsewhere_in_the_same_event():
    hand = ours(1000, 1000)
    hand.come("a", 300)
    hand.acts("a", 300)
    hand.returns("a", 310)
    lost = hand.where["a"]
    hand.feed(EngineLost(EngineId(lost)))
    assert hand.where["a"] != lost


# ---- late, double and racing events ----


def test_a_reply_of_an_earlier_turn_changes_nothing():
    hand = ours(1000)
    hand.come("a", 100)
    hand.acts("a", 110)
    hand.returns("a", 120)
    before = hand.policy.snapshot()
    assert hand.feed(TurnEnded(ProgramId("a"), 1, Footprint(999))) == []
    assert hand.feed(ToolReturned(ProgramId("a"), 1, Footprint(999), 0)) == []
    after = hand.policy.snapshot()
    assert (after.phases, after.engines) == (before.phases, before.engines)
    assert after.late_events == before.late_events + 2


def test_a_result_that_races_with_giving_up_its_kv_is_accounted_for_before_it_decodes():
    hand = ours(1000)
    crowd(hand, {"a": 900})
    assert evicted(hand.come("b", 800, at_s=600)) == ["a"]
    assert hand.returns("a", 910) == []
    assert phase(hand, "a") is Phase.WAITING
    assert decoded(hand.answers("b")) == ["a"]
    assert reserved(hand) == 910


def test_a_program_that_is_submitted_twice_runs_once():
    hand = ours(1000)
    hand.come("a", 100)
    assert hand.feed(Submitted(ProgramId("a"), 1e9)) == []
    assert hand.policy.snapshot().late_events == 1
    assert decoded(hand.told) == ["a"]


@pytest.mark.parametrize("acting", [False, True])
def test_a_second_request_for_the_same_turn_is_an_error_and_changes_nothing(acting: bool):
    hand = ours(1000)
    hand.come("hog", 950)
    crowd(hand, {"a": 50})
    if not acting:
        hand.returns("a", 100)
        assert phase(hand, "a") is Phase.READY
    twice: Event = TurnEnded(ProgramId("a"), 1, Footprint(60))
    if not acting:
        twice = ToolReturned(ProgramId("a"), 1, Footprint(60), 0)
    before = hand.policy.snapshot()
    with pytest.raises(InvalidTransition):
        hand.feed(twice)
    assert hand.policy.snapshot() == before


# ---- fairness ----


def test_large_prompts_wait_no_longer_than_small_ones():
    sizes = np.random.default_rng(11).permutation(np.linspace(500, 12_000, 64).astype(int))
    turns = [*[PlannedTurn(100, "bash", 1.0, 50)] * 3, PlannedTurn(100)]
    burst = [plan(f"p{index}", prompt=int(size), turns=turns) for index, size in enumerate(sizes)]
    fleet = FleetProfile(engine=small_profile(kv_tokens=50_000))
    result = simulate(Scheduler(), closed(burst, len(burst)), fleet)
    waits = [(program.prompt_tokens, program.admission_waits_s[0]) for program in result.programs]
    correlation = float(np.corrcoef(np.array(waits).T)[0, 1])
    assert max(wait for _, wait in waits) > 10
    assert abs(correlation) < 0.2


# ---- what an event costs ----


def test_an_event_costs_the_same_with_a_hundred_programs_and_with_ten_thousand():
    costs: list[tuple[int, int]] = []
    for programs in (100, 10_000):
        settings = SchedulerSettings(live_programs=programs, prepare_ahead=programs)
        crowded = Crowd(Scheduler(settings), programs)
        soon = crowded.a_bit_of_everything()
        crowded.feed(Tick(), 400)
        late = crowded.a_bit_of_everything()
        costs.append((soon, late))
    (few_soon, few_late), (many_soon, many_late) = costs
    assert many_soon < 1.5 * few_soon
    assert many_late < 1.5 * few_late


def test_an_event_costs_at_most_three_times_as_much_with_eight_times_the_engines():
    costs: list[tuple[int, int]] = []
    for engines in (8, 64):
        settings = SchedulerSettings(live_programs=1600, prepare_ahead=1600)
        crowded = Crowd(Scheduler(settings), 1600, engines=engines)
        soon = crowded.a_bit_of_everything()
        crowded.feed(Tick(), 400)
        costs.append((soon, crowded.a_bit_of_everything()))
    (few_soon, few_late), (many_soon, many_late) = costs
    assert many_soon < 3 * few_soon
    assert many_late < 3 * few_late


def test_a_tick_of_thunderagent_costs_more_the_more_programs_there_are():
    settings = SchedulerSettings(live_programs=1000)
    crowds = [Crowd(ThunderAgent(settings), programs) for programs in (100, 1000)]
    costs = [lines_run(lambda one=one: one.feed(Tick(), 5)) for one in crowds]
    assert costs[1] > 5 * costs[0]


# ---- equal events, equal actions ----


def test_what_is_said_does_not_depend_on_the_hash_seed():
    elsewhere = subprocess.run(
        [sys.executable, "-c", "from scheduler_crowd import replayed; print(replayed(), end='')"],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert elsewhere.stdout == replayed()
    assert elsewhere.stdout.count("Decode") > 100


def test_an_environment_is_prepared_for_everybody_in_the_order_of_submission():
    hand = ours(100_000)
    names = [f"p{index}" for index in range(20)]
    for name in names:
        hand.feed(Submitted(ProgramId(name), 1e9))
    assert [action.program_id for action in hand.told if isinstance(action, Prepare)] == names
