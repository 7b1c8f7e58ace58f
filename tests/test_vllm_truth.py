"""The programs that real vLLM and its simulation run are the same."""

import pytest
from benchmarks.vllm_client import MeasuredRun, MeasuredTurn
from benchmarks.vllm_truth import Means, Recorded, measured, simulated, slowed
from benchmarks.vllm_workload import (
    PROGRAMS,
    TURNS,
    Conversation,
    make_workload,
    usual_context_tokens,
    with_other_tool_times,
    working_set_tokens,
)

from sostenuto.runtime.simulation.profile import EngineProfile

WORKLOAD = make_workload(1)
PROFILE = EngineProfile(
    name="quick", kv_tokens=1, block_tokens=32, prefill_tokens_s=5_000, itl_s=((1, 0.01),), request_s=0.01
)


def test_the_same_seed_gives_the_same_programs():
    assert make_workload(1) == WORKLOAD != make_workload(2)
    assert {len(plan.turns) for plan in WORKLOAD.programs} == {TURNS}
    assert len(WORKLOAD.programs) == PROGRAMS


def test_a_conversation_has_as_many_tokens_as_its_plan_and_shares_the_system_prompt_alone():
    one, other = (Conversation(plan, seed=1) for plan in WORKLOAD.programs[:2])
    shared = one.plan.shared_tokens
    assert len(one.token_ids) == shared + one.plan.prompt_tokens
    assert one.token_ids[:shared] == other.token_ids[:shared]
    assert one.token_ids[shared : shared + 8] != other.token_ids[shared : shared + 8]
    assert Conversation(one.plan, seed=1).token_ids == one.token_ids


def test_the_working_set_counts_the_system_prompt_once():
    private = sum(plan.peak_tokens - plan.shared_tokens for plan in WORKLOAD.programs)
    assert working_set_tokens(WORKLOAD) == private + 256
    assert 256 < usual_context_tokens(WORKLOAD) < max(plan.peak_tokens for plan in WORKLOAD.programs)


def test_other_tool_times_change_nothing_else():
    changed = with_other_tool_times(WORKLOAD, 3, 0.05)
    for plan, other in zip(WORKLOAD.programs, changed.programs, strict=True):
        assert plan.peak_tokens == other.peak_tokens
        for turn, its in zip(plan.turns, other.turns, strict=True):
            assert abs(its.tool_s - turn.tool_s) <= 0.05 * turn.tool_s
    assert changed != WORKLOAD == with_other_tool_times(WORKLOAD, 3, 0.0)


def test_a_larger_pool_is_never_predicted_to_be_worse():
    small, large = (simulated(PROFILE, blocks, seed=1) for blocks in (414, 1_660))
    assert small.hit_rate < large.hit_rate
    assert small.completion_s > large.completion_s


def test_a_slower_engine_is_slower_in_everything_by_the_same_factor():
    slow = slowed(PROFILE, 1.5)
    assert slow.prefill_s(100, 400) == pytest.approx(1.5 * PROFILE.prefill_s(100, 400))
    assert slow.itl(3) == pytest.approx(1.5 * PROFILE.itl(3))
    assert slow.request_s == pytest.approx(1.5 * PROFILE.request_s)
    assert slow.kv_tokens == PROFILE.kv_tokens


def test_what_was_measured_is_the_mean_over_the_rounds_of_one_size():
    def run(blocks: int, ended_s: float, cached: int) -> MeasuredRun:
        turn = MeasuredTurn(sent_s=0.0, ended_s=ended_s, prompt_tokens=10, cached_tokens=cached)
        return MeasuredRun(blocks=blocks, seed=1, turns={"p": [turn]})

    recorded = Recorded(profile=PROFILE, runs=[run(5, 2.0, 4), run(9, 7.0, 0), run(5, 4.0, 6)])
    assert measured(recorded, 5) == Means(hit_rate=0.5, completion_s=3.0)
