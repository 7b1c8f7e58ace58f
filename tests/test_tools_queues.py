"""Whose turn it is at a tool: the pure queues, by example."""

import pytest

from queue_world import MIB, PATIENCE_S, world
from sostenuto.errors import Overloaded
from sostenuto.tools.claims import Claim
from sostenuto.tools.pace import Pace, Peaks
from sostenuto.tools.wire import ToolLimits


def test_a_tool_without_limits_keeps_nobody_waiting():
    here = world(t=ToolLimits())
    calls = [here.enter(f"p{n}") for n in range(500)]
    assert here.running == calls
    assert here.queues.running() == {"t": 500}


def test_calls_beyond_the_concurrency_wait_for_one_to_end():
    here = world(t=ToolLimits(concurrency=2))
    calls = [here.enter(f"p{n}") for n in range(3)]
    assert here.running == calls[:2]
    assert here.queues.waiting() == {"t": 1}
    here.finish()
    assert here.running == calls[1:]


def test_a_program_with_fifty_calls_takes_turns_with_one_that_has_one():
    here = world(t=ToolLimits(concurrency=1))
    for _ in range(50):
        here.enter("greedy")
    here.enter("modest")
    here.finish()
    here.finish()
    assert here.order[:3] == ["greedy", "greedy", "modest"]


def test_programs_of_one_priority_take_turns():
    here = world(t=ToolLimits(concurrency=1))
    for program in "aaabbbccc":
        here.enter(program)
    while here.running:
        here.later(1)
        here.finish()
    assert "".join(here.order) == "aabcabcbc"


def test_a_smaller_priority_goes_first():
    here = world(t=ToolLimits(concurrency=1))
    here.enter("runs")
    here.enter("patient", priority=1)
    here.enter("urgent", priority=-1)
    here.finish()
    here.finish()
    assert here.order == ["runs", "urgent", "patient"]


def test_waiting_makes_up_for_priority():
    here = world(t=ToolLimits(concurrency=1))
    here.enter("runs")
    here.enter("patient", priority=2)
    here.later(2 * PATIENCE_S + 1)
    here.enter("urgent", priority=0)
    here.finish()
    assert here.order == ["runs", "patient"]


def test_a_rate_spaces_starts_after_its_burst():
    here = world(t=ToolLimits(rate_per_s=2, burst=3))
    for n in range(6):
        here.enter(f"p{n}")
    assert len(here.order) == 3
    starts = [0.0] * 3
    while (next_s := here.queues.next_s(here.now_s)) is not None:
        here.later(next_s - here.now_s)
        starts += [here.now_s] * (len(here.order) - len(starts))
    assert starts == [0, 0, 0, 0.5, 1.0, 1.5]


def test_a_quiet_time_fills_the_bucket_and_no_more():
    here = world(t=ToolLimits(rate_per_s=1, burst=2))
    here.later(1000)
    for n in range(5):
        here.enter(f"p{n}")
    assert len(here.order) == 2


def test_tools_that_share_a_queue_share_its_limits_and_the_strictest_counts():
    here = world(
        a=ToolLimits(queue="search", concurrency=5, rate_per_s=4, burst=9),
        b=ToolLimits(queue="search", concurrency=2, rate_per_s=8, burst=9),
    )
    for n in range(3):
        here.enter(f"p{n}", "ab"[n % 2])
    assert len(here.running) == 2
    assert here.queues.waiting() == {"search": 1}


def test_a_declaration_that_changes_counts_from_then_on():
    here = world(t=ToolLimits(concurrency=1))
    here.enter("a")
    here.enter("b")
    here.queues.declare("t", ToolLimits(concurrency=2))
    here.start()
    assert here.order == ["a", "b"]


def test_processors_are_shared_by_all_tools():
    here = world(cpus=1.0, a=ToolLimits(cpus=0.6), b=ToolLimits(cpus=0.5), c=ToolLimits(cpus=0.4))
    for tool in "abc":
        here.enter(tool, tool)
    assert here.order == ["a", "c"]
    here.finish()
    assert here.order == ["a", "c", "b"]


def test_of_two_tools_the_line_that_began_to_wait_first_gets_the_processor():
    here = world(cpus=1.0, a=ToolLimits(cpus=1.0), z=ToolLimits(cpus=1.0))
    here.enter("runs", "a")
    here.enter("early", "z")
    here.later(1)
    here.enter("late", "a")
    here.finish()
    assert here.order == ["runs", "early"]


def test_thousands_of_small_claims_leave_nothing_behind():
    here = world(t=ToolLimits(cpus=0.1))
    for n in range(5000):
        here.enter(f"p{n % 7}")
    while here.running:
        here.finish()
    assert here.queues.used == Claim()
    assert not here.queues.waiting()


def test_memory_is_claimed_as_it_was_measured():
    here = world(memory_bytes=1024 * MIB, t=ToolLimits(memory_bytes=MIB))
    for _ in range(20):
        here.queues.measured("t", 400 * MIB)
    for n in range(4):
        here.enter(f"p{n}")
    assert len(here.running) == 2
    assert here.queues.used == Claim(0, 800 * MIB)


def test_a_declared_claim_stands_when_less_was_measured():
    here = world(memory_bytes=1024 * MIB, t=ToolLimits(memory_bytes=600 * MIB))
    here.queues.measured("t", MIB)
    here.enter("a")
    here.enter("b")
    assert len(here.running) == 1


def test_a_claim_beyond_the_budget_runs_alone():
    here = world(memory_bytes=100 * MIB, big=ToolLimits(memory_bytes=900 * MIB), free=ToolLimits(),
                 small=ToolLimits(memory_bytes=MIB))  # fmt: skip
    here.enter("s", "small")
    here.enter("b", "big")
    assert here.order == ["s"]
    here.finish()
    here.enter("s2", "small")
    here.enter("f", "free")
    assert here.order == ["s", "b", "f"]


def test_small_claims_pass_a_large_one_for_its_patience_and_no_longer():
    here = world(
        cpus=0.1,
        memory_bytes=100 * MIB,
        small=ToolLimits(memory_bytes=40 * MIB),
        large=ToolLimits(memory_bytes=100 * MIB),
        cpu=ToolLimits(cpus=0.1),
    )
    here.enter("s0", "small")
    here.enter("s1", "small")
    here.enter("large", "large")
    for n in (2, 3):
        here.finish()
        here.enter(f"s{n}", "small")
    assert here.order == ["s0", "s1", "s2", "s3"]
    here.later(PATIENCE_S)
    here.finish()
    here.enter("s4", "small")
    here.enter("other", "cpu")
    here.finish(here.running[0])
    assert here.order[4:] == ["other", "large"]


def test_a_full_queue_says_when_to_try_again():
    here = world(queue_limit=2, t=ToolLimits(concurrency=1), other=ToolLimits(concurrency=1))
    for n in range(3):
        here.enter(f"p{n}")
    with pytest.raises(Overloaded, match="2 calls wait for t already; try again in 1 s") as refused:
        here.enter("p3")
    assert refused.value.retry_after_s == 1.0
    here.enter("p3", "other")
    here.finish()
    here.enter("p3")


def test_the_time_to_try_again_grows_with_what_waits_and_how_slowly_it_moves():
    here = world(queue_limit=10, t=ToolLimits(concurrency=1))
    for n in range(11):
        here.enter(f"p{n}")
    for n in range(40):
        here.later(4)
        here.finish()
        here.enter(f"q{n}")
    with pytest.raises(Overloaded) as refused:
        here.enter("late")
    assert refused.value.retry_after_s == pytest.approx(20, rel=0.05)


def test_a_line_that_is_given_up_again_and_again_leaves_no_trace():
    here = world(t=ToolLimits(concurrency=1))
    runs = here.enter("runs")
    for n in range(1000):
        here.finish(here.enter(f"p{n}"))
    tools = vars(here.queues)["_tools"]
    assert len(tools["t"].heap) < 20
    here.finish(runs)
    assert not here.queues.waiting()
    assert not here.queues.running()


def test_a_bucket_gives_at_most_its_burst_and_its_rate_in_any_window():
    pace, now_s, starts = Pace(interval_s=0.1, burst=4), 0.0, list[float]()
    for step in (0.0, 0.03, 0.31, 0.0, 5.0, 0.07, 0.2) * 20:
        now_s += step
        while pace.opens_s <= now_s:
            pace.take(now_s)
            starts.append(now_s)
    for first, begun_s in enumerate(starts):
        for last in range(first, len(starts)):
            assert last - first + 1 <= 4 + (starts[last] - begun_s) / 0.1 + 1e-6


def test_peaks_believe_nearly_all_and_forget_what_is_long_past():
    peaks = Peaks()
    for n in range(100):
        peaks.add(1000 if n % 50 == 0 else 10)
    assert peaks.claim_bytes == 10
    for _ in range(8):
        peaks.add(500)
    assert peaks.claim_bytes == 500
    for _ in range(64):
        peaks.add(10)
    assert peaks.claim_bytes == 10
