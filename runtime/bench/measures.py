"""The measures that reports show: how each is called, in what unit, and how a value of it is written."""

import math
from dataclasses import dataclass
from enum import StrEnum

from sostenuto.runtime.bench.intervals import Interval
from sostenuto.runtime.bench.summary import Summary


class Unit(StrEnum):
    SECONDS = "s"
    PER_HOUR = "/h"
    SHARE = "%"
    TIMES = "x"
    TOKENS = "tokens"
    BYTES = "GiB"
    COUNT = ""
    NUMBER = "index"


@dataclass(frozen=True, slots=True)
class Measure:
    """A field of Summary, for people."""

    field: str
    label: str
    unit: Unit
    more_is_better: bool | None = False
    """None: neither."""

    def of(self, summary: Summary) -> float:
        return float(getattr(summary, self.field))


MEASURES = (
    Measure("completion_mean_s", "completion, mean", Unit.SECONDS),
    Measure("completion_p50_s", "completion, p50", Unit.SECONDS),
    Measure("completion_p90_s", "completion, p90", Unit.SECONDS),
    Measure("completion_p99_s", "completion, p99", Unit.SECONDS),
    Measure("tasks_per_hour", "tasks per hour", Unit.PER_HOUR, more_is_better=True),
    Measure("slowdown_mean", "slowdown, mean", Unit.TIMES),
    Measure("slowdown_p90", "slowdown, p90", Unit.TIMES),
    Measure("group_completion_mean_s", "group completion, mean", Unit.SECONDS),
    Measure("group_completion_p90_s", "group completion, p90", Unit.SECONDS),
    Measure("hit_rate", "cache hit rate", Unit.SHARE, more_is_better=True),
    Measure("recomputed_tokens", "recomputed", Unit.TOKENS),
    Measure("idle_with_work_waiting_s", "idle with work waiting", Unit.SECONDS),
    Measure("idle_with_work_waiting_share", "idle with work waiting, share", Unit.SHARE),
    Measure("worst_turn_wait_s", "worst wait of a turn", Unit.SECONDS),
    Measure("worst_admission_wait_s", "worst admission wait", Unit.SECONDS),
    Measure("admission_bound_s", "its computed bound", Unit.SECONDS, more_is_better=None),
    Measure("slowdown_jain", "fairness (Jain, slowdowns)", Unit.NUMBER, more_is_better=True),
    Measure("prompt_wait_correlation", "correlation of prompt and first wait", Unit.NUMBER, None),
    Measure("context_wait_correlation", "correlation of context and wait", Unit.NUMBER, None),
    Measure("sandbox_s", "sandbox-seconds", Unit.SECONDS),
    Measure("environment_wait_s", "environment wait", Unit.SECONDS),
    Measure("hidden_by_prefetch_share", "environments hidden by prefetch", Unit.SHARE, more_is_better=True),
    Measure("peak_sandbox_bytes", "peak sandbox memory", Unit.BYTES),
    Measure("peak_disk_bytes", "peak sandbox disk", Unit.BYTES),
    Measure("peak_sandboxes", "peak sandboxes", Unit.COUNT),
    Measure("evictions", "KV given up", Unit.COUNT, more_is_better=None),
    Measure("forced_moves", "forced moves", Unit.COUNT),
    Measure("failed", "failed programs", Unit.COUNT),
    Measure("makespan_s", "makespan", Unit.SECONDS),
)

BY_FIELD = {measure.field: measure for measure in MEASURES}
COMPLETION = BY_FIELD["completion_mean_s"]

HEADLINE = {
    "mean s": COMPLETION,
    "p90 s": BY_FIELD["completion_p90_s"],
    "tasks/h": BY_FIELD["tasks_per_hour"],
    "worst wait s": BY_FIELD["worst_turn_wait_s"],
    "group s": BY_FIELD["group_completion_mean_s"],
    "hit %": BY_FIELD["hit_rate"],
    "recomputed": BY_FIELD["recomputed_tokens"],
    "idle %": BY_FIELD["idle_with_work_waiting_share"],
    "slowdown": BY_FIELD["slowdown_mean"],
    "Jain": BY_FIELD["slowdown_jain"],
}
"""The measures of a short table by their headings, what is looked at first in front."""

NOT_KNOWN = "-"


def write(value: float, unit: Unit) -> str:
    """A value with as many digits as help, without its unit."""
    if not math.isfinite(value):
        return NOT_KNOWN
    match unit:
        case Unit.SHARE:
            return f"{abs(100 * value) if abs(value) < 5e-4 else 100 * value:.1f}"
        case Unit.TOKENS:
            return _shortened(value)
        case Unit.BYTES:
            return f"{value / (1 << 30):.1f}"
        case Unit.TIMES | Unit.NUMBER:
            return f"{value:.2f}"
        case _:
            return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"


def write_interval(interval: Interval, unit: Unit) -> str:
    """Mean, and half the width of the interval where there is one."""
    mean = write(interval.mean, unit)
    if not interval.has_width:
        return mean
    return f"{mean} ±{write(interval.high - interval.mean, unit)}"


def _shortened(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"
