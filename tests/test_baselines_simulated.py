"""Every baseline reproduces a published behaviour of its own system in simulation."""

from functools import cache

import numpy as np
import pytest

from sostenuto.runtime.simulation.faults import ClientDies, EngineDies
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn, Workload
from sostenuto.runtime.simulation.profile import EngineProfile, FleetProfile
from sostenuto.runtime.simulation.results import RunResult
from sostenuto.runtime.simulation.workloads import generate, working_set_tokens
from sostenuto.runtime.simulation.world import simulate
from sostenuto.scheduler.actions import Action, Offload
from sostenuto.scheduler.baselines.infercept import InferCept
from sostenuto.scheduler.baselines.thunderagent import ThunderAgent
from sostenuto.scheduler.baselines.thunderagent_accounts import Account, Node
from sostenuto.scheduler.events import Event
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.policies import POLICIES, make_policy
from sostenuto.types import GroupId, ProgramId

SEED = 3
CONCURRENCY = 24
ITL_S = ((4, 0.010), (8, 0.015), (12, 0.020), (16, 0.029), (24, 0.038), (32, 0.040))
REQUEST_LEVEL = ("request-round-robin", "request-hash", "request-sticky")


@cache
def groups() -> Workload:
    return generate("rl-groups", programs=2 * CONCURRENCY, seed=SEED, concurrency=CONCURRENCY)


def fleet(kv_tokens: int, *, engines: int = 1, host_tokens_s: float = 0.0) -> FleetProfile:
    """`host_tokens_s` 0: without a lower tier."""
    engine = EngineProfile(
        name="test",
        kv_tokens=kv_tokens,
        prefill_tokens_s=4000,
        itl_s=ITL_S,
        host_tokens=1_000_000 if host_tokens_s else 0,
        host_tokens_s=host_tokens_s,
    )
    return FleetProfile(engines=engines, engine=engine)


def pool_tokens(ratio: float, engines: int = 2) -> int:
    """Of one engine, so that the working set is `ratio` times all pools together."""
    return int(working_set_tokens(groups()) / ratio / engines)


def on_groups(policy: Frame, ratio: float = 2.0, *, engines: int = 2) -> RunResult:
    return simulate(policy, groups(), fleet(pool_tokens(ratio, engines), engines=engines))


@cache
def crowded(name: str) -> RunResult:
    """Two engines, a working set twice their pools."""
    return on_groups(make_policy(name))


def hit_rate(run: RunResult) -> float:
    cached = sum(program.cached_tokens for program in run.programs)
    return cached / (cached + sum(program.prefilled_tokens for program in run.programs))


def mean_s(run: RunResult, name: str = "") -> float:
    """Mean completion time of the programs whose name starts like this."""
    times = [program.completion_s for program in run.programs if program.id.startswith(name)]
    return sum(times) / len(times)


def worst_wait_s(run: RunResult) -> float:
    return max(max(program.turn_waits_s) for program in run.programs)


def plan(name: str, prompt_tokens: int, turns: int, output_tokens: int, arrival_s: float = 0.0) -> Plan:
    acting = PlannedTurn(output_tokens, "bash", 1.0, 50)
    return Plan(
        ProgramId(name),
        GroupId(name),
        1,
        (),
        prompt_tokens,
        (*[acting] * (turns - 1), PlannedTurn(output_tokens)),
        arrival_s,
    )


# ---- by request ----


def test_the_hit_rate_of_request_level_scheduling_collapses_past_the_knee() -> None:
    below = on_groups(make_policy("request-sticky"), ratio=0.5)
    assert hit_rate(below) > 0.9
    assert hit_rate(crowded("request-sticky")) < 0.5


def test_at_saturation_no_placement_comes_near_a_gate() -> None:
    runs = [crowded(name) for name in REQUEST_LEVEL]
    spans_s = [run.makespan_s for run in runs]
    assert max(spans_s) < 1.15 * min(spans_s)
    assert all(hit_rate(run) < 0.6 for run in runs)
    assert min(mean_s(run) for run in runs) > 1.5 * mean_s(crowded("thunderagent"))


# ---- windows ----


def test_the_best_cap_lies_between_one_that_idles_and_one_that_thrashes() -> None:
    few, some, many = (crowded(f"cap:{cap}") for cap in (4, 12, 24))
    assert mean_s(some) < 0.8 * min(mean_s(few), mean_s(many))
    assert hit_rate(few) > hit_rate(some) > hit_rate(many)


def test_congestion_control_keeps_more_hits_than_no_control() -> None:
    assert hit_rate(crowded("aimd")) > 1.3 * hit_rate(crowded("request-sticky"))
    assert mean_s(crowded("aimd")) < mean_s(crowded("request-sticky"))


# ---- queues of engines ----


def test_a_time_to_live_helps_where_plain_eviction_thrashes() -> None:
    assert mean_s(crowded("ttl")) < 0.7 * mean_s(crowded("request-sticky"))
    assert hit_rate(crowded("ttl")) > 1.5 * hit_rate(crowded("request-sticky"))


def test_preserving_by_minimum_waste_beats_leaving_all_to_eviction() -> None:
    assert mean_s(crowded("infercept")) < 0.85 * mean_s(crowded("request-sticky"))


class ListenedTo(InferCept):
    """InferCept, its swaps counted."""

    swaps = 0

    def apply(self, event: Event, now_s: float) -> list[Action]:
        actions = super().apply(event, now_s)
        self.swaps += sum(isinstance(action, Offload) for action in actions)
        return actions


def swaps(host_tokens_s: float) -> int:
    policy = ListenedTo()
    simulate(policy, groups(), fleet(pool_tokens(2, 1), host_tokens_s=host_tokens_s))
    return policy.swaps


def test_kv_is_swapped_where_the_bandwidth_is_enough_for_it() -> None:
    slow, fast = swaps(1000), swaps(1_000_000)
    assert fast > 300
    assert slow < fast / 3


def test_the_least_served_first_lets_short_programs_pass_long_ones() -> None:
    long = [plan(f"long{index}", 2000, 12, 800) for index in range(8)]
    short = [plan(f"short{index}", 500, 2, 50, arrival_s=60.0) for index in range(8)]
    mixed = Workload("mixed", (*long, *short))
    by_service, by_submission = (
        simulate(make_policy(name), mixed, fleet(24_000)) for name in ("las", "ttl:0")
    )
    assert mean_s(by_service, "short") < 0.5 * mean_s(by_submission, "short")


# ---- ThunderAgent ----


def test_a_gate_keeps_the_hit_rate_up() -> None:
    for name in ("thunderagent", "thunderagent-paper"):
        assert hit_rate(crowded(name)) > 0.8


def test_without_decay_idle_programs_hold_the_pool_and_the_worst_wait_is_longer() -> None:
    assert worst_wait_s(crowded("thunderagent")) > 1.5 * worst_wait_s(crowded("thunderagent-decay"))


class Watched(ThunderAgent):
    """ThunderAgent, its resumes counted by whether they go back to where the program was."""

    stayed = 0
    moved = 0

    def _resume(self, account: Account, node: Node, now_s: float) -> None:
        if account.origin is not None:
            self.stayed += account.origin == node.seat.id
            self.moved += account.origin != node.seat.id
        super()._resume(account, node, now_s)


def test_most_resumes_of_four_nodes_go_to_another_one() -> None:
    policy = Watched(decay=True)
    on_groups(policy, ratio=1.2, engines=4)
    assert policy.stayed + policy.moved > 100
    assert 0.6 < policy.moved / (policy.stayed + policy.moved) < 0.8


def test_smallest_first_makes_large_prompts_wait_and_order_of_arrival_does_not() -> None:
    sizes = np.random.default_rng(SEED).permutation(np.linspace(500, 12_000, 48).astype(int))
    burst = Workload("burst", tuple(plan(f"p{index}", int(size), 4, 100) for index, size in enumerate(sizes)))
    correlation: dict[str, float] = {}
    for name in ("thunderagent", "cap:8"):
        run = simulate(make_policy(name), burst, fleet(50_000))
        waits = [(program.prompt_tokens, program.admission_waits_s[0]) for program in run.programs]
        correlation[name] = float(np.corrcoef(np.array(waits).T)[0, 1])
    assert correlation["thunderagent"] > 0.7
    assert abs(correlation["cap:8"]) < 0.3


# ---- all ----


@pytest.mark.parametrize("name", [name.replace("N", "10") for name in POLICIES])
def test_every_policy_brings_all_programs_home_through_faults_and_new_versions(name: str) -> None:
    dead = groups().programs[5].id
    run = simulate(
        make_policy(name),
        groups(),
        fleet(pool_tokens(2), engines=2, host_tokens_s=50_000),
        publish_every_s=120,
        faults=(EngineDies(200, 1, back_after_s=100), ClientDies(50, dead, lease_s=300)),
    )
    assert {program.id for program in run.programs} == {plan.id for plan in groups().programs}
    assert [program.id for program in run.programs if program.failed] == [dead]
