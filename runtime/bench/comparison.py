"""Runs of several policies, arranged for reports: places that can be compared, and rows within them.

A place is one workload under one setting; its rows are policies, each over all seeds.  Runs that say
`swept` in their settings are tries of one policy, of which the best by mean completion is the row.
Runs that say `reference` are no competitors; one of an endless pool stands in every place of its workload.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sostenuto.runtime.bench.intervals import Interval, mean_interval, paired_ratio
from sostenuto.runtime.bench.measures import Measure
from sostenuto.runtime.bench.summary import Summary

SWEPT = "swept"
REFERENCE = "reference"
RATIO = "ratio"
ENDLESS = "endless"
ENDLESS_POOL = "endless pool"
_OF_A_RUN = frozenset({SWEPT, REFERENCE})

_Key = tuple[str, str, tuple[tuple[str, str], ...]]
"""Workload, fleet, setting."""


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in one place."""

    label: str
    summaries: tuple[Summary, ...]
    is_reference: bool = False

    def interval(self, measure: Measure) -> Interval:
        return mean_interval([measure.of(summary) for summary in self.summaries])

    @property
    def means_s(self) -> dict[int, float]:
        """Mean completion by seed."""
        return {summary.seed: summary.completion_mean_s for summary in self.summaries}

    @property
    def waits_by_reason_s(self) -> dict[str, float]:
        """Per program, averaged over seeds."""
        reasons = sorted({reason for summary in self.summaries for reason in summary.waits_by_reason_s})
        return {
            reason: sum(s.waits_by_reason_s.get(reason, 0.0) / s.programs for s in self.summaries)
            / len(self.summaries)
            for reason in reasons
        }


@dataclass(frozen=True, slots=True)
class Place:
    """Where policies are compared."""

    workload: str
    fleet: str
    setting: Mapping[str, str]
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        return " · ".join([self.workload, *(f"{name} {value}" for name, value in self.setting.items())])

    @property
    def lower_bound(self) -> Interval:
        """Of the mean completion, over the seeds."""
        runs = [summary for row in self.rows for summary in row.summaries]
        bounds_s = {s.seed: s.lower_bound_mean_s for s in runs if math.isfinite(s.lower_bound_mean_s)}
        return mean_interval(list(bounds_s.values()))

    def row(self, label: str) -> Row | None:
        return next((row for row in self.rows if row.label == label), None)

    def over(self, row: Row, base: Row | None) -> Interval:
        """Mean completion of `row` over that of `base`, paired by seed."""
        return paired_ratio(row.means_s, base.means_s if base else {})


def compare(summaries: Sequence[Summary]) -> list[Place]:
    """Places in the order in which they first appear."""
    places: dict[_Key, list[Summary]] = {}
    endless: dict[_Key, list[Summary]] = {}
    for summary in summaries:
        found = endless if summary.settings.get(REFERENCE) == ENDLESS_POOL else places
        found.setdefault(_key(summary, _OF_A_RUN), []).append(summary)
    return [
        Place(workload, fleet, dict(setting), (*_rows(members), *_endless(endless, members[0])))
        for (workload, fleet, setting), members in places.items()
    ]


def _key(summary: Summary, left_out: frozenset[str]) -> _Key:
    setting = tuple((name, value) for name, value in summary.settings.items() if name not in left_out)
    return summary.workload, summary.fleet, setting


def _rows(summaries: Iterable[Summary]) -> list[Row]:
    """Competitors in order of appearance, then references; tries of a swept policy make one row."""
    policies: dict[str, list[Summary]] = {}
    for summary in summaries:
        policies.setdefault(summary.policy, []).append(summary)
    families: dict[str, list[Row]] = {}
    for policy, members in policies.items():
        row = Row(policy, tuple(members), is_reference=REFERENCE in members[0].settings)
        families.setdefault(members[0].settings.get(SWEPT, policy), []).append(row)
    rows = [_best(family, tries) for family, tries in families.items()]
    return sorted(rows, key=lambda row: row.is_reference)


def _best(family: str, tries: Sequence[Row]) -> Row:
    if len(tries) == 1 and tries[0].label == family:
        return tries[0]
    best = min(tries, key=lambda row: _mean_or_last(row.means_s.values()))
    value = best.label.removeprefix(family).lstrip(":")
    return replace(best, label=f"{family} (best of {len(tries)}: {value})")


def _mean_or_last(means_s: Iterable[float]) -> float:
    mean = mean_interval(list(means_s)).mean
    return mean if math.isfinite(mean) else math.inf


def _endless(endless: Mapping[_Key, list[Summary]], like: Summary) -> list[Row]:
    """The row of the endless pool for a place of which one run is `like`."""
    but_the_pool = _OF_A_RUN | {RATIO}
    return [
        Row(ENDLESS_POOL, tuple(members), is_reference=True)
        for members in endless.values()
        if _key(members[0], but_the_pool) == _key(like, but_the_pool)
    ]
