"""What the tool server tells Prometheus.

- Latencies are taken as things happen, the state of things when it is asked for.
- Labels are bounded: tools beyond the first `MOST_TOOLS` share the name `other`, and names that no
  environment has declared never become a label.
"""

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import psutil
from anyio import to_thread
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sostenuto.tools.wire import State

MOST_TOOLS = 64
_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_PREFIX = "sostenuto_tools_"


class Metrics:
    """Of one server."""

    def __init__(self, disk: Path | None) -> None:
        """`disk` is a folder where sandboxes or results lie."""
        self._disk = disk
        self._tools: set[str] = set()
        self._registry = CollectorRegistry()
        self._starts = self._histogram("start_seconds", "Start of a sandbox")
        self._prepares = self._histogram("prepare_seconds", "Preparation of a program", "outcome")
        self._calls = self._histogram("call_seconds", "Tool call, waiting included", "tool", "outcome")
        self._measuring = anyio.Lock()

    def declare(self, tools: Iterable[str]) -> None:
        """These tools may be named from now on."""
        for tool in tools:
            if len(self._tools) < MOST_TOOLS:
                self._tools.add(tool)

    def started(self, elapsed_s: float) -> None:
        self._starts.observe(elapsed_s)

    def prepared(self, outcome: str, elapsed_s: float) -> None:
        self._prepares.labels(outcome).observe(elapsed_s)

    def called(self, tool: str, outcome: str, elapsed_s: float) -> None:
        label = tool if tool in self._tools else "other"
        self._calls.labels(label, outcome).observe(elapsed_s)

    async def text(self, state: State) -> bytes:
        """Everything, in Prometheus' text format."""
        async with self._measuring:
            machine = await to_thread.run_sync(_measure, self._disk)
        now = CollectorRegistry()
        now.register(_Now(state, machine))
        return generate_latest(self._registry) + generate_latest(now)

    def _histogram(self, name: str, what: str, *labels: str) -> Histogram:
        return Histogram(_PREFIX + name, what, labels, registry=self._registry, buckets=_BUCKETS_S)


@dataclass(frozen=True, slots=True)
class _Machine:
    server_bytes: int
    below_bytes: int
    available_bytes: int
    disk_used_bytes: int
    disk_free_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class _Now(Collector):
    """The state of things, as metrics."""

    state: State
    machine: _Machine

    def collect(self) -> Iterator[Metric]:
        state, machine = self.state, self.machine
        phases = Counter(program.phase for program in state.programs)
        yield _gauges("programs", "Programs that are here", "phase", phases)
        sandboxes = Counter(program.sandbox for program in state.programs if program.sandbox)
        sandboxes.update(one.sandbox for one in state.warm)
        yield _gauges("sandboxes", "Sandboxes that are here", "backend", sandboxes)
        yield _gauge("queued", "Calls that wait for their turn", state.queued)
        yield _gauge("leaked", "What could not be given back yet", state.leaked)
        yield _gauge("warm", "Sandboxes that wait for a program", len(state.warm))
        yield _gauge("layer_bytes", "Disk of what set-up commands have made", state.layer_bytes)
        yield _gauge("hosts", "Workers that are alive", state.hosts)
        yield _gauge("owners", "Owners with a lease", len(state.owners))
        memory = {
            "server": machine.server_bytes,
            "hosts_and_sandboxes": machine.below_bytes,
            "available": machine.available_bytes,
        }
        yield _gauges("memory_bytes", "Memory, resident or free", "of", memory)
        disk = {"used": machine.disk_used_bytes, "free": machine.disk_free_bytes}
        yield _gauges("disk_bytes", "Disk below the sandboxes", "what", disk)
        events = CounterMetricFamily(_PREFIX + "events", "What happened so far", labels=["event"])
        for event, count in state.counters.items():
            events.add_metric([event], count)
        yield events


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, what, value=value)


def _gauges(name: str, what: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(_PREFIX + name, what, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _measure(disk: Path | None) -> _Machine:
    me = psutil.Process()
    usage = shutil.disk_usage(disk or Path.cwd())
    return _Machine(
        server_bytes=me.memory_info().rss,
        below_bytes=sum(map(_resident, me.children(recursive=True))),
        available_bytes=psutil.virtual_memory().available,
        disk_used_bytes=usage.used,
        disk_free_bytes=usage.free,
    )


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0
