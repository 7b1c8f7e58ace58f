"""The lower bound is one: a lone program meets it, no policy beats it, and hand-computed cases come out."""

from dataclasses import replace

import pytest

from sostenuto.runtime.simulation.bounds import lower_bound
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn, Workload
from sostenuto.runtime.simulation.profile import EngineProfile, FleetProfile, ToolServerProfile
from sostenuto.runtime.simulation.workloads import generate
from sostenuto.runtime.simulation.world import simulate
from sostenuto.scheduler.kv import Segment
from sostenuto.scheduler.policies import make_policy
from sostenuto.types import GroupId, ProgramId

ENGINE = EngineProfile(
    name="round",
    kv_tokens=1_000_000,
    block_tokens=1,
    prefill_tokens_s=1000,
    chunk_tokens=500,
    overlap=0.0,
    itl_s=((1, 0.01), (2, 0.01), (4, 0.02)),
    request_s=0.25,
)
FLEET = FleetProfile(engine=ENGINE)
TURNS = (PlannedTurn(101, "bash", 3.0, 500), PlannedTurn(51))


def plan(
    name: str, *, turns: tuple[PlannedTurn, ...] = TURNS, shared: tuple[Segment, ...] = (), at_s: float = 0.0
) -> Plan:
    return Plan(ProgramId(name), GroupId(name), 1, shared, 1000, turns, arrival_s=at_s, prepare_s=2.0)


def test_a_program_alone_takes_exactly_its_critical_path():
    # prepare 2, prompt 1 + prefix 1, result 0.5, decode 1 + 0.5, tool 3, two requests 0.5
    alone = Workload("alone", (plan("p", shared=(Segment("all", 1000),)),), concurrency=1)
    bound = lower_bound(alone, FLEET)
    assert bound.mean_completion_s == bound.critical_path_s == pytest.approx(9.5)
    run = simulate(make_policy("request-sticky"), alone, FLEET)
    assert run.programs[0].completion_s == pytest.approx(bound.mean_completion_s)
    assert run.makespan_s == pytest.approx(bound.makespan_s)


def test_a_common_prefix_is_prefilled_by_one_program_only():
    both = Workload("two", tuple(plan(p, shared=(Segment("all", 1000),)) for p in "ab"), concurrency=2)
    assert lower_bound(both, FLEET).critical_path_s == pytest.approx(8.5 + 1.0 / 2)


def test_one_at_a_time_takes_all_paths_one_after_the_other():
    assert lower_bound(Workload("w", (plan("a"), plan("b")), concurrency=1), FLEET).makespan_s == 17.0


def test_work_is_prefill_and_the_best_decoding_one_after_the_other_without_overlap():
    # two decode together at 5 ms a token: 0.75 s each for decoding, 1.5 s each for prefill
    many = Workload("w", tuple(plan(f"p{i}") for i in range(20)), concurrency=20)
    bound = lower_bound(many, FLEET)
    assert bound.work_s == pytest.approx(20 * 2.25)
    assert bound.makespan_s == bound.work_s
    assert bound.mean_completion_s == pytest.approx(2.25 * sum(range(1, 21)) / 20)


def test_prefill_beside_decoding_counts_only_the_longer():
    fleet = FleetProfile(engines=2, engine=ENGINE.model_copy(update={"overlap": 1.0}))
    many = Workload("w", tuple(plan(f"p{i}") for i in range(20)), concurrency=20)
    assert lower_bound(many, fleet).work_s == pytest.approx(20 * 1.5 / 2)


def test_a_rate_limited_tool_bounds_the_makespan():
    many = Workload("w", tuple(plan(f"p{i}") for i in range(20)), 20, {"bash": 1})
    assert lower_bound(many, FLEET).work_s == pytest.approx(60.0)


def test_environments_made_one_at_a_time_bound_the_makespan():
    fleet = FleetProfile(engine=ENGINE, tools=ToolServerProfile(prepare_concurrency=1))
    short = (PlannedTurn(2),)
    many = Workload("w", tuple(plan(f"p{i}", turns=short) for i in range(20)), concurrency=20)
    assert lower_bound(many, fleet).work_s == pytest.approx(40.0)


def test_late_arrivals_take_their_time_out_of_the_mean_and_push_the_end():
    apart = Workload("w", (plan("a"), plan("b", at_s=100.0)))
    bound = lower_bound(apart, FLEET)
    assert bound.mean_completion_s == pytest.approx(8.5)
    assert bound.makespan_s == pytest.approx(108.5)


@pytest.mark.parametrize("policy", ["sostenuto", "request-sticky", "cap:6"])
@pytest.mark.parametrize("name", ["rl-groups", "remote-tools"])
@pytest.mark.parametrize("concurrency", [12, None])
def test_no_policy_beats_the_bound(policy: str, name: str, concurrency: int | None):
    rate_s = None if concurrency else 0.2
    workload = generate(name, programs=24, seed=2, concurrency=concurrency, arrival_rate_s=rate_s)
    engine = ENGINE.model_copy(update={"kv_tokens": 250_000, "prefill_tokens_s": 8000, "overlap": 0.5})
    fleet = FleetProfile(engines=2, engine=engine)
    run = simulate(make_policy(policy), replace(workload, tool_concurrency={"ask": 2}), fleet)
    bound = lower_bound(replace(workload, tool_concurrency={"ask": 2}), fleet)
    assert [program.failed for program in run.programs] == [""] * 24
    assert sum(p.completion_s for p in run.programs) / 24 >= bound.mean_completion_s
    assert run.makespan_s >= bound.makespan_s
