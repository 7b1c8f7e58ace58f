"""Whose turn it is: calls that wait for their tool, and for processors and memory of this server.

Pure: time is an argument, in seconds of one clock that never goes back.

- A line is what waits of one program at one tool under one priority, first in, first out.  Of two lines
  the one with the smaller `since_s + priority * patience_s` has its turn first, where `since_s` is when the
  line began to wait or had its last turn.  So programs of one priority take turns, however many calls each
  has, and waiting makes up for priority.
- Whatever fits runs.  A line that lacks processors or memory is passed by lines behind it for `patience_s`
  and no longer; then they leave alone what it lacks.
- A call claims the memory that the tool declares or that its last calls took, whichever is more; a claim
  beyond the whole budget counts as all of it, so that its call runs alone.

Hence the bound, for a line of priority p where the most urgent in use is q: once it has waited for
`max(1, p - q) * patience_s`, each other line starts at most one call more before it, and none that begins
to wait from then on does.  What it then waits for is the end of calls that run, or its tool's rate.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

from sostenuto.errors import Overloaded
from sostenuto.tools.claims import Claim
from sostenuto.tools.pace import Pace, Peaks
from sostenuto.tools.wire import ToolLimits

LONGEST_RETRY_S = 60.0
_LENIENT = 16
"""Dead entries that a heap may have, beside as many as living ones."""


@dataclass(slots=True, eq=False)
class Call:
    """One call, from `enter` until `leave`."""

    program_id: str
    tool: str
    priority: int
    entered_s: float
    started_s: float | None = None
    claim: Claim = field(default_factory=Claim)
    """Held while it runs."""


@dataclass(slots=True, eq=False)
class _Line:
    since_s: float
    entry: int
    """Of its entries in the heap the one that counts."""
    calls: OrderedDict[Call, None] = field(default_factory=OrderedDict[Call, None])


@dataclass(slots=True, eq=False)
class _Queue:
    """What tools share that name the same queue; of what they declare, the strictest counts."""

    limits: dict[str, ToolLimits] = field(default_factory=dict[str, ToolLimits])
    concurrency: int | None = None
    pace: Pace = field(default_factory=Pace)
    running: int = 0
    waiting: int = 0
    last_start_s: float | None = None
    between_s: float = 1.0
    """Two starts, on the average of late."""

    def declare(self, tool: str, limits: ToolLimits) -> None:
        self.limits[tool] = limits
        every = self.limits.values()
        self.concurrency = min((one.concurrency for one in every if one.concurrency), default=None)
        paced = [one for one in every if one.rate_per_s]
        self.pace.interval_s = max((1.0 / (one.rate_per_s or 1.0) for one in paced), default=0.0)
        self.pace.burst = min((one.burst for one in paced), default=1)

    @property
    def has_place(self) -> bool:
        return self.concurrency is None or self.running < self.concurrency

    def begin(self, now_s: float) -> None:
        self.running += 1
        self.waiting -= 1
        self.pace.take(now_s)
        if self.last_start_s is not None:
            self.between_s += 0.2 * (now_s - self.last_start_s - self.between_s)
        self.last_start_s = now_s


@dataclass(slots=True, eq=False)
class _Tool:
    name: str
    limits: ToolLimits
    queue: _Queue
    claim: Claim = field(default_factory=Claim)
    """Of its next call."""
    peaks: Peaks = field(default_factory=Peaks)
    lines: dict[tuple[str, int], _Line] = field(default_factory=dict[tuple[str, int], _Line])
    heap: list[tuple[float, int, tuple[str, int]]] = field(
        default_factory=list[tuple[float, int, tuple[str, int]]]
    )

    def set_claim(self, whole: Claim) -> None:
        """After what it declares or took has changed."""
        memory_bytes = max(self.limits.memory_bytes, self.peaks.claim_bytes)
        self.claim = Claim(round(self.limits.cpus * 1000), memory_bytes).within(whole)

    def first(self) -> tuple[float, int, tuple[str, int]]:
        """The heap's entry of the line whose turn it is.  There is one."""
        while not self._lives(self.heap[0]):
            heappop(self.heap)
        return self.heap[0]

    def push(self, key: tuple[str, int], rank_s: float, entry: int) -> None:
        heappush(self.heap, (rank_s, entry, key))
        if len(self.heap) > 2 * len(self.lines) + _LENIENT:
            self.heap = [item for item in self.heap if self._lives(item)]
            heapify(self.heap)

    def _lives(self, item: tuple[float, int, tuple[str, int]]) -> bool:
        line = self.lines.get(item[2])
        return line is not None and line.entry == item[1]


class Queues:
    """Written by the tool server's loop alone."""

    def __init__(self, budget: Claim, *, patience_s: float, queue_limit: int) -> None:
        """`budget` is what running calls may claim together; `queue_limit` calls may wait at one queue."""
        self._patience_s = patience_s
        self._queue_limit = queue_limit
        self._whole = budget
        self._used = Claim()
        self._tools: dict[str, _Tool] = {}
        self._queues: dict[str, _Queue] = {}
        self._waiting: dict[str, _Tool] = {}
        """Tools with lines."""
        self._entries = count()

    @property
    def used(self) -> Claim:
        """What running calls claim together."""
        return self._used

    def waiting(self) -> Mapping[str, int]:
        """Calls that wait, by queue; only where any do."""
        return {name: queue.waiting for name, queue in self._queues.items() if queue.waiting}

    def running(self) -> Mapping[str, int]:
        """Calls that run, by queue; only where any do."""
        return {name: queue.running for name, queue in self._queues.items() if queue.running}

    def declare(self, tool: str, limits: ToolLimits) -> None:
        """Say what holds for a tool from now on.  A tool stays in the queue that it named first."""
        known = self._tools.get(tool)
        if known is None:
            queue = self._queues.setdefault(limits.queue or tool, _Queue())
            known = self._tools[tool] = _Tool(tool, limits, queue)
        known.limits = limits
        known.set_claim(self._whole)
        known.queue.declare(tool, limits)

    def measured(self, tool: str, peak_bytes: int) -> None:
        """Remember what memory a call of the tool took."""
        self._tools[tool].peaks.add(peak_bytes)
        self._tools[tool].set_claim(self._whole)

    def enter(self, program_id: str, tool: str, priority: int, *, now_s: float) -> Call:
        """Let a call wait at a declared tool; Overloaded when too many wait there."""
        known = self._tools[tool]
        self._refuse_if_full(known)
        call = Call(program_id, tool, priority, now_s)
        key = (program_id, priority)
        line = known.lines.get(key)
        if line is None:
            line = known.lines[key] = _Line(now_s, -1)
            self._queue_up(known, key, line, now_s)
        line.calls[call] = None
        known.queue.waiting += 1
        self._waiting[tool] = known
        return call

    def leave(self, call: Call) -> None:
        """The call is over or given up, waiting or running.  Once for each call."""
        known = self._tools[call.tool]
        if call.started_s is None:
            known.queue.waiting -= 1
            self._take_out(known, call)
        else:
            known.queue.running -= 1
            self._used -= call.claim

    def start(self, now_s: float) -> list[Call]:
        """The calls whose turn has come; they run from now on."""
        started: list[Call] = []
        while (tool := self._next(now_s)) is not None:
            started.append(self._begin(tool, now_s))
        return started

    def next_s(self, now_s: float) -> float | None:
        """When to ask again though nothing happens meanwhile: a rate allows one more then."""
        open_s = (t.queue.pace.opens_s for t in self._waiting.values() if t.queue.has_place)
        return min((at_s for at_s in open_s if at_s > now_s), default=None)

    def _next(self, now_s: float) -> _Tool | None:
        """The tool whose first line may start a call now."""
        ready = [t for t in self._waiting.values() if t.queue.has_place and t.queue.pace.opens_s <= now_s]
        free, reserved = self._whole - self._used, Claim()
        if not any(tool.claim.fits(free) for tool in ready):
            return None
        for tool in sorted(ready, key=lambda tool: tool.first()[:2]):
            if tool.claim.touches(reserved):
                continue
            if tool.claim.fits(free):
                return tool
            if now_s - tool.lines[tool.first()[2]].since_s >= self._patience_s:
                reserved += tool.claim.lacking(free)
        return None

    def _begin(self, tool: _Tool, now_s: float) -> Call:
        _, _, key = tool.first()
        line = tool.lines[key]
        call = next(iter(line.calls))
        call.started_s = now_s
        call.claim = tool.claim
        self._used += call.claim
        tool.queue.begin(now_s)
        self._take_out(tool, call)
        if line.calls:
            self._queue_up(tool, key, line, now_s)
        return call

    def _queue_up(self, tool: _Tool, key: tuple[str, int], line: _Line, now_s: float) -> None:
        line.since_s = now_s
        line.entry = next(self._entries)
        tool.push(key, now_s + key[1] * self._patience_s, line.entry)

    def _take_out(self, tool: _Tool, call: Call) -> None:
        key = (call.program_id, call.priority)
        line = tool.lines[key]
        del line.calls[call]
        if not line.calls:
            del tool.lines[key]
        if not tool.lines:
            tool.heap.clear()
            del self._waiting[tool.name]

    def _refuse_if_full(self, tool: _Tool) -> None:
        queue = tool.queue
        if queue.waiting < self._queue_limit:
            return
        retry_s = min(LONGEST_RETRY_S, max(1.0, queue.between_s * queue.waiting / 2))
        raise Overloaded(
            f"{queue.waiting} calls wait for {tool.limits.queue or tool.name} already; "
            f"try again in {retry_s:.0f} s, or raise the tool's limits or queue_limit",
            retry_after_s=retry_s,
        )
