"""What is measured of a run, and how sure a mean over seeds is."""

import math

import pytest

from bench_runs import program, run_of
from sostenuto.runtime.bench.alone import alone_s
from sostenuto.runtime.bench.intervals import mean_interval, paired_ratio, t_quantile
from sostenuto.runtime.bench.summary import correlation, jain, summarize
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn, Workload
from sostenuto.runtime.simulation.profile import EngineProfile, FleetProfile
from sostenuto.runtime.simulation.world import simulate
from sostenuto.scheduler.baselines.request_level import RequestSticky
from sostenuto.scheduler.kv import Segment
from sostenuto.types import GroupId, ProgramId


def plan(name: str, *, output: int = 10) -> Plan:
    """100 shared and 100 own tokens; one tool call that returns 50 tokens; environment ready in 2 s."""
    turns = (PlannedTurn(output, "bash", 5.0, 50), PlannedTurn(output))
    shared = (Segment("all", 100),)
    return Plan(ProgramId(name), GroupId(name), 1, shared, 100, turns, prepare_s=2.0)


def profile(*, request_s: float = 0.0) -> EngineProfile:
    return EngineProfile(
        name="small",
        kv_tokens=1000,
        concurrency=4,
        prefill_tokens_s=100,
        itl_s=((1, 0.1), (4, 0.2)),
        request_s=request_s,
    )


def test_times_of_completion_are_over_the_programs_that_went_to_their_end():
    run = run_of(
        program("a", end_s=10), program("b", end_s=30), program("c", start_s=20, end_s=40, failed="engine")
    )
    summary = summarize(run)
    assert (summary.programs, summary.failed) == (3, 1)
    assert summary.completion_mean_s == 20
    assert summary.completion_p50_s == 20
    assert summary.completion_p90_s == pytest.approx(28)
    assert summary.tasks_per_hour == pytest.approx(2 * 3600 / 100)


def test_a_program_that_never_finished_is_counted_as_failed():
    summary = summarize(run_of(program("a"), program("b", end_s=float("nan"))))
    assert summary.failed == 1
    assert summary.completion_mean_s == 10


def test_a_group_lasts_from_its_first_submission_to_its_last_finish():
    run = run_of(
        program("a", start_s=5, end_s=20, group="g"),
        program("b", start_s=0, end_s=10, group="g"),
        program("c", start_s=30, end_s=40, group="h"),
        program("d", start_s=30, end_s=99, group="h", failed="refused"),
    )
    assert summarize(run).group_completion_mean_s == 20


def test_what_the_engines_did_is_summed_over_them():
    summary = summarize(run_of(program("a"), program("b")))
    assert summary.hit_rate == pytest.approx(200 / 400)
    assert summary.recomputed_tokens == 60
    assert summary.idle_with_work_waiting_s == 30
    assert summary.idle_with_work_waiting_share == pytest.approx(0.15)
    assert (summary.forced_moves, summary.evictions) == (2, 4)


def test_environments_are_hidden_as_far_as_nobody_waits_for_them_alone():
    summary = summarize(run_of(program("a"), program("b")))
    assert summary.environment_wait_s == 2
    assert summary.hidden_by_prefetch_share == pytest.approx(0.75)
    assert summary.sandbox_s == 40


def test_the_worst_waits_are_of_any_turn_of_any_program():
    summary = summarize(run_of(program("a", waits_s=(1.0, 8.0)), program("b", waits_s=(3.0,))))
    assert (summary.worst_turn_wait_s, summary.worst_admission_wait_s) == (8.0, 4.0)
    assert math.isnan(summary.admission_bound_s)


def test_waits_are_summed_by_reason():
    run = run_of(program("a", reasons_s={"kv": 2.0}), program("b", reasons_s={"kv": 1.0, "order": 4.0}))
    assert summarize(run).waits_by_reason_s == {"kv": 3.0, "order": 4.0}


def test_slowdowns_compare_with_the_time_alone():
    run = run_of(program("a", end_s=10), program("b", end_s=30))
    summary = summarize(run, {ProgramId("a"): 5.0, ProgramId("b"): 5.0})
    assert summary.slowdown_mean == 4
    assert summary.slowdown_jain == pytest.approx((2 + 6) ** 2 / (2 * (4 + 36)))


def test_without_times_alone_slowdowns_are_not_known():
    assert math.isnan(summarize(run_of(program("a"))).slowdown_mean)


def test_a_run_without_programs_has_no_times():
    summary = summarize(run_of(makespan_s=0.0))
    assert summary.programs == 0
    assert math.isnan(summary.completion_mean_s)
    assert math.isnan(summary.tasks_per_hour)


def test_waits_that_grow_with_the_prompt_are_told():
    fair = run_of(
        *(program(f"p{i}", prompt_tokens=100 * i, waits_s=(w,)) for i, w in ((1, 2), (2, 1), (3, 2)))
    )
    unfair = run_of(*(program(f"p{i}", prompt_tokens=100 * i, waits_s=(i, i)) for i in (1, 2, 3)))
    assert summarize(fair).prompt_wait_correlation == pytest.approx(0)
    assert summarize(unfair).prompt_wait_correlation == pytest.approx(1)
    assert summarize(unfair).context_wait_correlation == pytest.approx(1)


def test_jain_is_one_when_all_are_alike_and_one_of_n_when_one_bears_it_all():
    assert jain([3, 3, 3]) == pytest.approx(1)
    assert jain([9, 0, 0]) == pytest.approx(1 / 3)


def test_nothing_correlates_with_what_does_not_vary():
    assert math.isnan(correlation([1, 1, 1], [1, 2, 3]))


def test_an_interval_over_five_seeds_is_students():
    interval = mean_interval([1, 2, 3, 4, 5])
    half = 2.776 * math.sqrt(2.5 / 5)
    assert interval.mean == 3
    assert (interval.low, interval.high) == (pytest.approx(3 - half), pytest.approx(3 + half))


def test_one_seed_has_a_mean_and_no_interval():
    interval = mean_interval([7.0])
    assert interval.mean == 7
    assert not interval.has_width


def test_values_that_are_not_known_are_left_out_of_a_mean():
    assert mean_interval([1.0, float("nan"), 3.0]).n == 2
    assert not mean_interval([float("nan")]).is_known


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (14, 2.145), (30, 2.042), (120, 1.980)])
def test_quantiles_of_student_are_those_of_the_tables(freedom: int, quantile: float):
    assert t_quantile(freedom) == pytest.approx(quantile, abs=0.002)


def test_a_ratio_is_paired_by_seed():
    interval = paired_ratio({1: 50.0, 2: 500.0, 3: 7.0}, {1: 100.0, 2: 1000.0, 4: 1.0})
    assert interval.mean == pytest.approx(0.5)
    assert interval.high - interval.low == pytest.approx(0)
    assert interval.n == 2


def test_alone_a_program_waits_for_nothing():
    times = alone_s(Workload("w", (plan("a"),)), profile(request_s=0.5))
    # 2 s environment, 200 tokens prefilled, 50 more, 18 generated after them, 5 s of tool, two requests
    assert times == {ProgramId("a"): pytest.approx(2 + 2 + 0.5 + 1.8 + 5 + 1)}


def test_simulated_alone_a_program_takes_its_time_alone():
    workload, engine = Workload("w", (plan("a", output=40),), 1), profile()
    run = simulate(RequestSticky(), workload, FleetProfile(engine=engine))
    assert run.programs[0].completion_s == pytest.approx(alone_s(workload, engine)[ProgramId("a")], rel=0.02)
