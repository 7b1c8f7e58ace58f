"""Whose turn it is at a tool: the pure queues, by example and against random use."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sostenuto.errors import Overloaded
from sostenuto.tools.claims import Claim
from sostenuto.tools.pace import Pace, Peaks
from sostenuto.tools.queues import Call, Queues
from sostenuto.tools.wire import ToolLimits

MIB = 1 << 20
PATIENCE_S = 10.0


@dataclass
class World:
    """Queues, their clock, and what runs."""

    queues: Queues
    now_s: float = 0.0
    order: list[str] = field(default_factory=list[str])
    running: list[Call] = field(default_factory=list[Call])

    def enter(self, program: str, tool: str = "t", priority: int = 0) -> Call:
        call = self.queues.enter(program, tool, priority, now_s=self.now_s)
        self.start()
        return call

    def start(self) -> None:
        started = self.queues.start(self.now_s)
        self.running += started
        self.order += [call.program_id for call in started]

    def finish(self, call: Call | None = None) -> None:
        call = call or self.running[0]
        if call in self.running:
            self.running.remove(call)
        self.queues.leave(call)
        self.start()

    def later(self, seconds: float) -> None:
        self.now_s += seconds
        self.start()


def world(
    *, cpus: float = 4, memory_bytes: int = 1024 * MIB, queue_limit: int = 10_000, **tools: ToolLimits
) -> World:
    budget = Claim(round(cpus * 1000), memory_bytes)
    queues = Queues(budget, patience_s=PATIENCE_S, queue_limit=queue_limit)
    for name, limits in tools.items():
        queues.declare(name, limits)
    return World(queues)


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


LineKey = tuple[str, int]


@dataclass
class Watch:
    """Holds the starts at one tool against the bound that the module promises; the most urgent has 0."""

    since_s: dict[LineKey, float] = field(default_factory=dict[LineKey, float])
    waiting: Counter[LineKey] = field(default_factory=Counter[LineKey])
    may_pass: dict[LineKey, Counter[LineKey]] = field(default_factory=dict[LineKey, "Counter[LineKey]"])
    """Of each line whose patience is over, who may still start before it, and how often."""

    def time_is(self, now_s: float) -> None:
        for line, begun_s in self.since_s.items():
            if line not in self.may_pass and now_s > begun_s + max(1, line[1]) * PATIENCE_S:
                self.may_pass[line] = Counter(dict.fromkeys(self.since_s, 1))

    def enters(self, line: LineKey, now_s: float) -> None:
        self.waiting[line] += 1
        self.since_s.setdefault(line, now_s)

    def starts(self, line: LineKey, now_s: float) -> None:
        for passed, others in self.may_pass.items():
            others[line] -= passed != line
            assert others[line] >= 0
        self.waiting[line] -= 1
        self.may_pass.pop(line, None)
        del self.since_s[line]
        if self.waiting[line]:
            self.since_s[line] = now_s


STEP = st.tuples(st.sampled_from("abcdef"), st.integers(0, 3), st.sampled_from([0.0, 1.0, 6.0, 20.0]))


@given(first=st.lists(STEP, min_size=2, max_size=12), then=st.lists(STEP, min_size=20, max_size=60))
def test_after_its_patience_a_line_is_passed_once_at_most_by_each_line_then_waiting(
    first: list[tuple[str, int, float]], then: list[tuple[str, int, float]]
):
    """Some come first; then, at every step, another comes and the one call that runs ends."""
    here, watch = world(t=ToolLimits(concurrency=1)), Watch()
    for step, (program, priority, pause_s) in enumerate([*first, *then]):
        here.now_s += pause_s
        watch.time_is(here.now_s)
        here.queues.enter(program, "t", priority, now_s=here.now_s)
        watch.enters((program, priority), here.now_s)
        if step >= len(first) and here.running:
            here.queues.leave(here.running.pop())
        for call in here.queues.start(here.now_s):
            here.running.append(call)
            watch.starts((call.program_id, call.priority), here.now_s)


LIMITS = {
    "free": ToolLimits(),
    "narrow": ToolLimits(concurrency=1, cpus=0.5),
    "shared_a": ToolLimits(queue="shared", concurrency=3, memory_bytes=30),
    "shared_b": ToolLimits(queue="shared", concurrency=2, memory_bytes=70),
    "paced": ToolLimits(rate_per_s=0.5, burst=2, memory_bytes=10),
    "heavy": ToolLimits(memory_bytes=100, cpus=1.0),
    "huge": ToolLimits(memory_bytes=1000),
}
QUEUE_OF = {name: limits.queue or name for name, limits in LIMITS.items()}
CONCURRENCY = {"narrow": 1, "shared": 2}
WHOLE = Claim(1500, 100)


class QueuesUnderRandomUse(RuleBasedStateMachine):
    """Enter, give up, finish and let time pass in any order; a model beside counts what is where."""

    def __init__(self) -> None:
        super().__init__()
        self.queues = Queues(WHOLE, patience_s=PATIENCE_S, queue_limit=40)
        for name, limits in LIMITS.items():
            self.queues.declare(name, limits)
        self.now_s = 0.0
        self.waiting: list[Call] = []
        self.running: list[Call] = []
        self.starts_s: list[float] = []
        self.since_s: dict[tuple[str, str, int], float] = {}
        self.peaks = dict.fromkeys(LIMITS, 0)

    @rule(program=st.sampled_from("abcd"), tool=st.sampled_from(sorted(LIMITS)), priority=st.integers(-1, 2))
    def enter(self, program: str, tool: str, priority: int) -> None:
        try:
            call = self.queues.enter(program, tool, priority, now_s=self.now_s)
        except Overloaded:
            assert sum(QUEUE_OF[c.tool] == QUEUE_OF[tool] for c in self.waiting) == 40
            return
        self.waiting.append(call)
        self._note_line(_line(call))
        self._start()

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.running:
            call = data.draw(st.sampled_from(self.running))
            self.running.remove(call)
            self.queues.leave(call)
            self._start()

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        if self.waiting:
            call = data.draw(st.sampled_from(self.waiting))
            self.waiting.remove(call)
            self.queues.leave(call)
            self._forget_line(_line(call))
            self._start()

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 7.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self._start()

    @rule(tool=st.sampled_from(["free", "shared_a"]), peak=st.sampled_from([5, 50, 500]))
    def measure(self, tool: str, peak: int) -> None:
        for _ in range(70):
            self.queues.measured(tool, peak)
        self.peaks[tool] = peak
        self._start()

    def _start(self) -> None:
        for call in self.queues.start(self.now_s):
            self._check_order(call)
            self.waiting.remove(call)
            self.running.append(call)
            if call.tool == "paced":
                self.starts_s.append(self.now_s)
            self._forget_line(_line(call))
            if any(_line(other) == _line(call) for other in self.waiting):
                self._note_line(_line(call), anew=True)

    def _note_line(self, line: tuple[str, str, int], *, anew: bool = False) -> None:
        if anew or line not in self.since_s:
            self.since_s[line] = self.now_s

    def _forget_line(self, line: tuple[str, str, int]) -> None:
        if not any(_line(other) == line for other in self.waiting) or line not in self.since_s:
            self.since_s.pop(line, None)

    def _check_order(self, call: Call) -> None:
        """First in, first out within the line; among lines of a tool the promised order."""
        mine = _line(call)
        assert next(c for c in self.waiting if _line(c) == mine) is call
        for line, since_s in self.since_s.items():
            if line != mine and line[1] == mine[1]:
                assert _rank(mine, self.since_s[mine]) <= _rank(line, since_s)

    @invariant()
    def nobody_is_lost_and_no_ghost_is_left(self) -> None:
        assert self.queues.waiting() == Counter(QUEUE_OF[call.tool] for call in self.waiting)
        assert self.queues.running() == Counter(QUEUE_OF[call.tool] for call in self.running)

    @invariant()
    def limits_hold(self) -> None:
        running = Counter(QUEUE_OF[call.tool] for call in self.running)
        assert all(running[queue] <= most for queue, most in CONCURRENCY.items())
        held = sum((call.claim for call in self.running), Claim())
        assert held == self.queues.used
        assert held.millicpus <= WHOLE.millicpus
        assert held.memory_bytes <= WHOLE.memory_bytes

    @invariant()
    def a_rate_holds_in_any_window(self) -> None:
        for back, begun_s in enumerate(reversed(self.starts_s[-6:]), start=1):
            assert back <= 2 + (self.now_s - begun_s) * 0.5 + 1e-6

    @invariant()
    def whatever_fits_runs_but_for_one_that_waited_too_long(self) -> None:
        free = WHOLE - self.queues.used
        ready = [call for call in self.waiting if self._has_place(call)]
        overdue = any(
            self.now_s - self.since_s[_line(call)] >= PATIENCE_S and self._claim(call).lacking(free)
            for call in ready
        )
        if not overdue:
            assert not [call for call in ready if not self._claim(call).lacking(free)]

    def _claim(self, call: Call) -> Claim:
        limits = LIMITS[call.tool]
        memory_bytes = max(limits.memory_bytes, self.peaks[call.tool])
        return Claim(round(limits.cpus * 1000), memory_bytes).within(WHOLE)

    def _has_place(self, call: Call) -> bool:
        queue = QUEUE_OF[call.tool]
        if sum(QUEUE_OF[c.tool] == queue for c in self.running) >= CONCURRENCY.get(queue, 1000):
            return False
        next_s = self.queues.next_s(self.now_s)
        return call.tool != "paced" or next_s is None


def _line(call: Call) -> tuple[str, str, int]:
    return (call.program_id, call.tool, call.priority)


def _rank(line: tuple[str, str, int], since_s: float) -> float:
    return since_s + line[2] * PATIENCE_S


TestQueuesUnderRandomUse = QueuesUnderRandomUse.TestCase
TestQueuesUnderRandomUse.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
