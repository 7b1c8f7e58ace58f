"""The plots of a comparison, each as SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sostenuto.runtime.bench.comparison import ENDLESS, RATIO, Place
from sostenuto.runtime.bench.drawing import REASONS, colours, drawn, new_figure
from sostenuto.runtime.bench.intervals import Interval
from sostenuto.runtime.bench.measures import COMPLETION, Measure, Unit
from sostenuto.runtime.bench.summary import program_ended
from sostenuto.runtime.simulation.results import RunResult
from sostenuto.scheduler.program import Reason

_APART = 0.012
"""Of the axis: policies stand beside each other, lest their intervals hide one another."""
LOWER_BOUND = {"color": "#1d2730", "linestyle": ":"}


@dataclass(frozen=True, slots=True)
class Ink:
    """How policies look: the same in every plot of a page.  References are grey and dashed."""

    colour: Mapping[str, str]
    references: frozenset[str]

    @classmethod
    def of(cls, places: Sequence[Place]) -> "Ink":
        rows = [row for place in places for row in place.rows]
        names = list(dict.fromkeys(family(row.label) for row in rows if not row.is_reference))
        references = list(dict.fromkeys(row.label for row in rows if row.is_reference))
        return cls(colours(names, references), frozenset(references))

    def line(self, label: str) -> dict[str, Any]:
        name = family(label)
        return {"color": self.colour[name], "linestyle": "--" if name in self.references else "-"}


def family(label: str) -> str:
    """The policy without the value that was best for it in one place."""
    return label.partition(" (best of ")[0]


@drawn
def over_ratios(places: Sequence[Place], measure: Measure, ink: Ink) -> Any:  # noqa: ANN401
    """A measure of each policy over the ratio of working set and pool, with intervals.  No legend."""
    figure, axes = new_figure(5.4, 3.4)
    ratios = [float(place.setting[RATIO]) for place in places]
    lines = _lines(places, measure)
    step = _APART * (max(ratios) - min(ratios) or 1.0)
    for number, (label, line) in enumerate(lines.items()):
        xs = [ratios[at] + step * (number - (len(lines) - 1) / 2) for at in line]
        _with_intervals(axes, xs, [_scaled(interval, measure) for interval in line.values()], ink.line(label))
    bounds = [place.lower_bound.mean for place in places if place.lower_bound.is_known]
    if measure is COMPLETION and len(bounds) == len(ratios):
        axes.plot(ratios, bounds, **LOWER_BOUND)
    axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axes.set(title=_titled(measure), xlabel="working set / KV pool", ylim=(0, None))
    return figure


def has_ratio(place: Place) -> bool:
    return place.setting.get(RATIO, ENDLESS) != ENDLESS and place.setting[RATIO][0].isdigit()


@drawn
def bars(place: Place, measure: Measure, ink: Ink) -> Any:  # noqa: ANN401
    """A measure of each policy in one place, with intervals."""
    figure, axes = new_figure(5.4, 0.8 + 0.34 * len(place.rows))
    for at, row in enumerate(place.rows):
        interval = _scaled(row.interval(measure), measure)
        axes.barh(at, interval.mean, color=ink.line(row.label)["color"], height=0.62)
        if interval.has_width:
            spread = [[interval.mean - interval.low], [interval.high - interval.mean]]
            axes.errorbar(interval.mean, at, xerr=spread, color="#1d2730", capsize=3, linewidth=1.2)
    if measure is COMPLETION and place.lower_bound.is_known:
        axes.axvline(place.lower_bound.mean, **LOWER_BOUND)
    _one_line_each(axes, [row.label for row in place.rows])
    axes.set(title=_titled(measure), xlim=(0, None))
    return figure


@drawn
def completion_shares(runs: Mapping[str, Sequence[RunResult]], ink: Ink) -> Any:  # noqa: ANN401
    """The share of programs that are over within a time; all seeds together.  No legend."""
    figure, axes = new_figure(5.4, 3.4)
    for label, of_policy in runs.items():
        times_s = sorted(p.completion_s for run in of_policy for p in run.programs if program_ended(p))
        if times_s:
            shares = np.arange(1, len(times_s) + 1) / len(times_s)
            axes.step(times_s, 100 * shares, where="post", **ink.line(label))
    axes.set(title="programs that are over (%)", xlabel="completion time (s)", ylim=(0, 101), xlim=(0, None))
    return figure


@drawn
def waits_by_reason(place: Place) -> Any:  # noqa: ANN401
    """What the programs of each policy waited for besides their tools, stacked."""
    figure, axes = new_figure(5.4, 1.3 + 0.34 * len(place.rows))
    left = [0.0] * len(place.rows)
    waits = [row.waits_by_reason_s for row in place.rows]
    for reason in _reasons(waits):
        label, colour = REASONS.get(reason, (reason, "#5b6670"))
        widths = [waited.get(reason, 0.0) for waited in waits]
        axes.barh(range(len(left)), widths, left=left, label=label, color=colour, height=0.62)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    _one_line_each(axes, [row.label for row in place.rows])
    axes.set(title="waits of a program (s)", xlim=(0, max(*left, 1.0) * 1.05))
    if any(left):
        axes.figure.legend(loc="outside lower center", ncols=5)
    return figure


def _lines(places: Sequence[Place], measure: Measure) -> dict[str, dict[int, Interval]]:
    """For each policy: the measure's interval by the place's number."""
    lines: dict[str, dict[int, Interval]] = {}
    for at, place in enumerate(places):
        for row in place.rows:
            interval = row.interval(measure)
            if interval.is_known:
                lines.setdefault(family(row.label), {})[at] = interval
    return lines


def _with_intervals(
    axes: Any,  # noqa: ANN401
    xs: Sequence[float],
    intervals: Sequence[Interval],
    line: Mapping[str, Any],
) -> None:
    axes.plot(xs, [i.mean for i in intervals], marker="o", markersize=4, **line)
    wide = [(x, i) for x, i in zip(xs, intervals, strict=True) if i.has_width]
    for x, interval in wide:
        axes.plot([x, x], [interval.low, interval.high], color=line["color"], linewidth=1, alpha=0.65)


def _scaled(interval: Interval, measure: Measure) -> Interval:
    """A share as a percentage."""
    scale = 100.0 if measure.unit is Unit.SHARE else 1.0
    return Interval(scale * interval.mean, scale * interval.low, scale * interval.high, interval.n)


def _titled(measure: Measure) -> str:
    return f"{measure.label} ({measure.unit})" if measure.unit else measure.label


def _reasons(waits: Sequence[Mapping[str, float]]) -> list[str]:
    """Those that occur, in the order of the legend."""
    found = {r for waited in waits for r, seconds in waited.items() if seconds > 0} - {Reason.TOOL.value}
    return [*(r for r in REASONS if r in found), *sorted(found - REASONS.keys())]


def _one_line_each(axes: Any, labels: Sequence[str]) -> None:  # noqa: ANN401
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
