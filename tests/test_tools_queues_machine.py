"""Whose turn it is at a tool: the pure queues, against random use."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from queue_world import PATIENCE_S, world
from sostenuto.errors import Overloaded
from sostenuto.tools.claims import Claim
from sostenuto.tools.queues import Call, Queues
from sostenuto.tools.wire import ToolLimits

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
