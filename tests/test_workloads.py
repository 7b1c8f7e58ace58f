"""Generated workloads: what was published comes out, and the same seed gives the same programs."""

from collections import Counter

import numpy as np
import pytest

from sostenuto.errors import ConfigError
from sostenuto.runtime.simulation.distributions import LogNormal
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn, Workload
from sostenuto.runtime.simulation.profile import EngineProfile, FleetProfile
from sostenuto.runtime.simulation.workloads import (
    WORKLOADS,
    check_fits,
    generate,
    unavoidable,
    working_set_tokens,
)
from sostenuto.scheduler.kv import Segment
from sostenuto.types import GroupId, ProgramId

MANY = 600


@pytest.fixture(scope="module")
def many() -> dict[str, Workload]:
    return {name: generate(name, programs=MANY, seed=3, concurrency=64) for name in WORKLOADS}


def turn_counts(workload: Workload) -> list[int]:
    return [len(plan.turns) for plan in workload.programs]


def calls(workload: Workload) -> list[PlannedTurn]:
    return [turn for plan in workload.programs for turn in plan.turns if turn.tool is not None]


def tool_seconds(workload: Workload, tool: str = "") -> np.ndarray:
    return np.array([turn.tool_s for turn in calls(workload) if tool in (turn.tool, "")])


@pytest.mark.parametrize(
    ("name", "mean", "most"),
    [("swe-light", 30, 150), ("swe-heavy", 64, 100), ("rl-groups", 16, 25), ("remote-tools", 15, 15)],
)
def test_turns_have_the_published_mean_and_cap(many: dict[str, Workload], name: str, mean: float, most: int):
    counts = turn_counts(many[name])
    assert np.mean(counts) == pytest.approx(mean, rel=0.05)
    assert max(counts) <= most
    assert min(counts) >= 1


@pytest.mark.parametrize("name", ["swe-light", "swe-heavy", "rl-groups"])
def test_coding_tokens_are_as_published(many: dict[str, Workload], name: str):
    output = np.array([turn.output_tokens for plan in many[name].programs for turn in plan.turns])
    result = np.array([turn.result_tokens for turn in calls(many[name])])
    assert np.median(output) == pytest.approx(215, rel=0.05)
    assert np.mean(output) == pytest.approx(428, rel=0.1)
    assert np.mean(result == 0) == pytest.approx(0.12, abs=0.01)
    assert np.median(result) == pytest.approx(260, rel=0.1)
    assert np.mean(result) == pytest.approx(1400, rel=0.1)
    assert np.quantile(result, 0.9) == pytest.approx(2900, rel=0.15)


@pytest.mark.parametrize("name", ["swe-light", "swe-heavy", "rl-groups"])
def test_the_times_of_all_coding_tools_add_up_to_the_published_mixture(many: dict[str, Workload], name: str):
    seconds = tool_seconds(many[name])
    assert np.median(seconds) == pytest.approx(0.3, rel=0.1)
    assert np.quantile(seconds, 0.9) == pytest.approx(13.6, rel=0.1)
    assert np.quantile(seconds, 0.99) == pytest.approx(216, rel=0.25)
    long = seconds > 60
    assert np.mean(long) == pytest.approx(0.0397, rel=0.2)
    assert seconds[long].sum() / seconds.sum() == pytest.approx(0.847, abs=0.1)


def test_an_hour_as_the_longest_call_takes_a_quarter_off_the_published_mean(many: dict[str, Workload]):
    seconds = tool_seconds(many["swe-heavy"])
    assert seconds.max() <= 3600
    assert np.mean(seconds) == pytest.approx(0.77 * 18.4, rel=0.12)


def test_long_calls_are_mostly_test_runs_and_test_runs_are_mostly_not_long(many: dict[str, Workload]):
    long = Counter(turn.tool for turn in calls(many["swe-heavy"]) if turn.tool_s > 60)
    assert 0.75 < long["test"] / long.total() < 0.92
    assert 0.15 < np.mean(tool_seconds(many["swe-heavy"], "test") > 60) < 0.35
    assert np.quantile(tool_seconds(many["swe-heavy"], "read"), 0.99) < 5


def test_remote_tools_are_slow_and_rate_limited(many: dict[str, Workload]):
    seconds = tool_seconds(many["remote-tools"])
    assert np.median(seconds) == pytest.approx(10, rel=0.05)
    assert np.quantile(seconds, 0.99) == pytest.approx(200, rel=0.12)
    assert np.mean([turn.result_tokens for turn in calls(many["remote-tools"])]) == pytest.approx(
        3000, rel=0.05
    )
    assert {turn.tool for turn in calls(many["remote-tools"])} == set(many["remote-tools"].tool_concurrency)


def test_environments_take_as_long_as_published(many: dict[str, Workload]):
    light = [plan.prepare_s for plan in many["swe-light"].programs]
    heavy = [plan.prepare_s for plan in many["swe-heavy"].programs]
    assert 3 <= min(light) < 4
    assert 25 < max(light) <= 26
    assert np.median(heavy) == pytest.approx(23, rel=0.06)
    assert np.mean(heavy) == pytest.approx(26.5, rel=0.06)
    assert max(heavy) <= 97


def test_heavy_sandboxes_have_a_base_and_spikes(many: dict[str, Workload]):
    plans = many["swe-heavy"].programs
    assert {plan.sandbox.memory_bytes for plan in plans} == {185 << 20}
    assert min(plan.spike_bytes for plan in plans) >= 500 << 20
    assert max(plan.spike_bytes for plan in plans) <= 4 << 30


def test_only_the_last_turn_answers(many: dict[str, Workload]):
    for workload in many.values():
        for plan in workload.programs:
            assert [turn.tool is None for turn in plan.turns] == [False] * (len(plan.turns) - 1) + [True]
            assert plan.turns[-1].result_tokens == 0
            assert min(turn.output_tokens for turn in plan.turns) >= 1


def test_the_same_seed_gives_the_same_programs_and_another_seed_others():
    one = generate("swe-light", programs=16, seed=1, concurrency=4)
    assert one == generate("swe-light", programs=16, seed=1, concurrency=4)
    assert (
        one.programs[0].turns != generate("swe-light", programs=16, seed=2, concurrency=4).programs[0].turns
    )


def test_more_programs_change_none_of_the_earlier_ones():
    few = generate("swe-heavy", programs=16, seed=1, concurrency=4)
    assert generate("swe-heavy", programs=24, seed=1, concurrency=4).programs[:16] == few.programs


def test_another_order_is_of_the_same_programs_and_keeps_groups_together():
    plain = generate("rl-groups", programs=40, seed=1, concurrency=8)
    other = generate("rl-groups", programs=40, seed=1, concurrency=8, order_seed=5)
    assert other.programs != plain.programs
    assert sorted(other.programs, key=lambda plan: plan.id) == list(plain.programs)
    groups = [plan.group for plan in other.programs]
    assert [groups[at : at + 8] for at in range(0, 40, 8)] == [[groups[at]] * 8 for at in range(0, 40, 8)]


@pytest.mark.parametrize("size", [8, 16])
def test_members_of_a_group_share_its_prompt_and_nobody_else_does(size: int):
    workload = generate("rl-groups", programs=3 * size, seed=1, group_size=size, concurrency=8)
    holders = Counter(segment for plan in workload.programs for segment in plan.shared)
    assert sorted(holders.values()) == [size, size, size, 3 * size]
    assert len({plan.group for plan in workload.programs}) == 3
    assert {plan.group_size for plan in workload.programs} == {size}


def test_a_last_group_that_is_smaller_says_so():
    sizes = [p.group_size for p in generate("swe-light", programs=10, seed=1, concurrency=4).programs]
    assert sizes == [8] * 8 + [2] * 2


def test_a_program_alone_has_the_prompt_of_its_task_for_itself():
    alone = generate("swe-light", programs=2, seed=1, group_size=1, concurrency=1).programs[0]
    assert [segment.tokens for segment in alone.shared] == [3000]
    assert alone.prompt_tokens == 2000


def test_open_arrivals_come_at_the_rate_and_a_group_at_once():
    workload = generate("rl-groups", programs=1600, seed=1, arrival_rate_s=2.0)
    arrivals = [plan.arrival_s for plan in workload.programs]
    assert workload.concurrency is None
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 200
    assert arrivals[-1] == pytest.approx(800, rel=0.2)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"name": "swe-lite", "concurrency": 1}, "swe-light"),
        ({"programs": 0, "concurrency": 1}, "programs"),
        ({"group_size": 0, "concurrency": 1}, "group_size"),
        ({"concurrency": 0}, "concurrency"),
        ({"arrival_rate_s": 0.0}, "arrival_rate_s"),
        ({"concurrency": 1, "arrival_rate_s": 1.0}, "not both"),
        ({}, "either"),
    ],
)
def test_a_wrong_argument_is_named(wrong: dict[str, float], named: str):
    arguments = {"name": "swe-light", "programs": 8, "seed": 0} | wrong
    with pytest.raises(ConfigError, match=named):
        generate(**arguments)  # pyright: ignore[reportArgumentType]


def two_groups_of_two() -> Workload:
    """Prefix of all 100; of a group 40; then 10 of its own, 5 out, 20 back, 5 out."""
    turns = (PlannedTurn(5, "bash", 1.0, 20), PlannedTurn(5))
    plans = [
        Plan(
            ProgramId(f"p{i}"),
            GroupId(f"g{i // 2}"),
            2,
            (Segment("all", 100), Segment(f"g{i // 2}", 40)),
            10,
            turns,
        )
        for i in range(4)
    ]
    return Workload("by-hand", tuple(plans), concurrency=2)


@pytest.mark.parametrize(
    ("concurrency", "tokens"),
    [
        (1, 100 + 40 + 27.5),
        (2, 100 + 40 + 2 * 27.5),  # own context: 15 after the first turn, 40 after the second
        (4, 100 + 2 * 40 + 4 * 27.5),
        (9, 100 + 2 * 40 + 4 * 27.5),
    ],
)
def test_the_working_set_counts_common_prefixes_once(concurrency: int, tokens: float):
    assert working_set_tokens(two_groups_of_two(), concurrency) == pytest.approx(tokens)


def test_the_working_set_weighs_programs_by_their_turns():
    short = Plan(ProgramId("s"), GroupId("s"), 1, (), 100, (PlannedTurn(100),))
    long = Plan(
        ProgramId("l"), GroupId("l"), 1, (), 1000, (PlannedTurn(1, "t"), PlannedTurn(1, "t"), PlannedTurn(1))
    )
    assert working_set_tokens(Workload("w", (short, long)), 1) == (200 + 1001 + 1002 + 1003) / 4


def test_the_working_set_of_an_open_workload_needs_a_concurrency():
    with pytest.raises(ConfigError, match="open workload"):
        working_set_tokens(generate("swe-light", programs=8, seed=0, arrival_rate_s=1.0))


def test_a_program_that_no_engine_can_hold_is_named_before_anything_runs():
    def fleet(kv_tokens: int) -> FleetProfile:
        return FleetProfile(
            engine=EngineProfile(name="tiny", kv_tokens=kv_tokens, prefill_tokens_s=1, itl_s=((1, 1.0),))
        )

    check_fits(two_groups_of_two(), fleet(180))
    with pytest.raises(ConfigError, match=r"program p0 grows to 180 tokens.*tiny.*179"):
        check_fits(two_groups_of_two(), fleet(179))


def test_every_new_token_has_to_be_prefilled_once():
    assert unavoidable(two_groups_of_two()) == 100 + 2 * 40 + 4 * (10 + 20)


@pytest.mark.parametrize(("mean", "sigma", "high"), [(64, 0.5, 100), (30, 0.6, 150), (3000, 0.8, 32_768)])
def test_a_limited_lognormal_has_the_mean_that_was_asked_for(mean: float, sigma: float, high: float):
    law = LogNormal.with_mean(mean, sigma, low=1, high=high)
    draws = law.draw(np.random.default_rng(0), 100_000)
    assert law.mean == pytest.approx(mean, rel=1e-6)
    assert draws.mean() == pytest.approx(mean, rel=0.02)
    assert draws.max() <= high
