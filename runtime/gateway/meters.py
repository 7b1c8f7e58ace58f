"""What the gateway tells Prometheus.

Calls and tokens are counted as they happen, programs and waits taken from the scheduler when it is asked.
Labels are bounded: routes are those that there are, and programs are never one.
"""

from collections import Counter as Count
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sostenuto.runtime.gateway.turn import Standing, Told
from sostenuto.scheduler.program import Snapshot

_PREFIX = "sostenuto_gateway_"
_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Meters:
    """Of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._calls = Counter(
            _PREFIX + "calls", "Requests answered", ("route", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            _PREFIX + "call_seconds",
            "From a request to the end of its response",
            ("route",),
            registry=self._registry,
            buckets=_BUCKETS_S,
        )
        self._tokens = Counter(
            _PREFIX + "tokens", "Tokens of model calls", ("kind",), registry=self._registry
        )

    def answered(self, route: str, status: int, elapsed_s: float) -> None:
        """`status`: 499 where the client went away."""
        self._calls.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(elapsed_s)

    def sampled(self, told: Sequence[Told]) -> None:
        """A call that sampled; what joined another was counted with that."""
        for one in told:
            if one.standing is not Standing.REPEATED:
                self._tokens.labels("prompt").inc(len(one.prompt_token_ids))
                self._tokens.labels("cached").inc(one.reply.cached_tokens)
                self._tokens.labels("generated").inc(len(one.reply.token_ids))

    def text(self, standings: Count[tuple[str, str]], snapshot: Snapshot) -> bytes:
        """Everything, in Prometheus' text format.

        `standings`: programs by what they do and whether an engine holds their KV.
        """
        now = CollectorRegistry()
        now.register(_Now(standings, snapshot))
        return generate_latest(self._registry) + generate_latest(now)


@dataclass(frozen=True, eq=False, slots=True)
class _Now(Collector):
    """The state of things, as metrics."""

    standings: Count[tuple[str, str]]
    snapshot: Snapshot

    def collect(self) -> Iterator[Metric]:
        programs = GaugeMetricFamily(
            _PREFIX + "programs", "Programs that are here", labels=["status", "state"]
        )
        for labels, count in self.standings.items():
            programs.add_metric(labels, count)
        yield programs
        snapshot = self.snapshot
        yield GaugeMetricFamily(
            _PREFIX + "waiting", "Conversations that lack nothing but an engine", value=snapshot.waiting
        )
        waited = CounterMetricFamily(
            _PREFIX + "waited_seconds", "Time that programs have waited", labels=["reason"]
        )
        for reason, seconds in snapshot.waited_s.items():
            waited.add_metric([reason.value], seconds)
        yield waited
        reserved = GaugeMetricFamily(_PREFIX + "reserved_tokens", "KV given to programs", labels=["engine"])
        decoding = GaugeMetricFamily(_PREFIX + "decoding", "Conversations that decode", labels=["engine"])
        for engine_id, (tokens, count) in snapshot.engines.items():
            reserved.add_metric([engine_id], tokens)
            decoding.add_metric([engine_id], count)
        yield reserved
        yield decoding
