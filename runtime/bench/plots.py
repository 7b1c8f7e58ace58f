"""The plots of a comparison, each as SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sostenuto.runtime.bench.comparison import ENDLESS, RATIO, Place, Row
from sostenuto.runtime.bench.drawing import REASONS, colours, drawn, new_figure
from sostenuto.runtime.bench.intervals import Interval
from sostenuto.runtime.bench.measures import BY_FIELD, Measure, Unit
from sostenuto.runtime.bench.summary import program_ended
from sostenuto.runtime.simulation.results import RunResult

COMPLETION = BY_FIELD["completion_mean_s"]
HIT_RATE = BY_FIELD["hit_rate"]


@dataclass(frozen=True, slots=True)
class Ink:
    """The colours of a page: the same policy looks the same in every plot."""

    colour: Mapping[str, str]

    @classmethod
    def of(cls, places: Sequence[Place]) -> "Ink":
        rows = [row for place in places for row in place.rows]
        names = list(dict.fromkeys(family(row.label) for row in rows if not row.is_reference))
        references = list(dict.fromkeys(row.label for row in rows if row.is_reference))
        return cls(colours(names, references))

    def line(self, row: Row) -> dict[str, Any]:
        return {"color": self.colour[family(row.label)], "linestyle": "--" if row.is_reference else "-"}


def family(label: str) -> str:
    """The policy without the value that was best for it in one place."""
    return label.partition(" (best of ")[0]


@drawn
def over_ratios(places: Sequence[Place], measure: Measure, ink: Ink) -> Any:  # noqa: ANN401
    """A measure of each policy over the ratio of working set and pool, with intervals."""
    figure, axes = new_figure(7.2, 4.0)
    scale = 100.0 if measure.unit is Unit.SHARE else 1.0
    ratios = [float(place.setting[RATIO]) for place in places]
    for label, line in _lines(places, measure).items():
        row = line[max(line)][0]
        xs = [ratios[at] for at in line]
        _error_bars(axes, xs, [interval for _, interval in line.values()], scale, ink.line(row), label)
    if measure is COMPLETION:
        _lower_bound(axes, ratios, places)
    axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axes.set(xlabel="working set / KV pool", ylabel=f"{measure.label} ({measure.unit})", ylim=(0, None))
    _legend_beside(axes)
    return figure


def has_ratio(place: Place) -> bool:
    return place.setting.get(RATIO, ENDLESS) != ENDLESS and place.setting[RATIO][0].isdigit()


@drawn
def bars(place: Place, measure: Measure, ink: Ink) -> Any:  # noqa: ANN401
    """A measure of each policy in one place, with intervals."""
    figure, axes = new_figure(7.2, 0.9 + 0.38 * len(place.rows))
    scale = 100.0 if measure.unit is Unit.SHARE else 1.0
    for at, row in enumerate(place.rows):
        interval = row.interval(measure)
        axes.barh(at, scale * interval.mean, color=ink.colour[family(row.label)], height=0.62)
        if interval.has_width:
            spread = [[scale * (interval.mean - interval.low)], [scale * (interval.high - interval.mean)]]
            axes.errorbar(scale * interval.mean, at, xerr=spread, color="#1d2730", capsize=3, linewidth=1.2)
    if measure is COMPLETION and place.lower_bound.is_known:
        axes.axvline(place.lower_bound.mean, color="#1d2730", linestyle=":", label="lower bound")
        axes.legend(loc="lower right")
    _one_line_each(axes, [row.label for row in place.rows])
    axes.set(xlabel=f"{measure.label} ({measure.unit})", xlim=(0, None))
    return figure


@drawn
def completion_shares(runs: Mapping[str, Sequence[RunResult]], place: Place, ink: Ink) -> Any:  # noqa: ANN401
    """The share of programs that are over within a time; all seeds together."""
    figure, axes = new_figure(7.2, 4.0)
    for row in place.rows:
        times_s = sorted(
            p.completion_s for run in runs.get(row.label, []) for p in run.programs if program_ended(p)
        )
        if times_s:
            shares = np.arange(1, len(times_s) + 1) / len(times_s)
            axes.step(times_s, 100 * shares, where="post", label=row.label, **ink.line(row))
    axes.set(xlabel="completion time (s)", ylabel="programs that are over (%)", ylim=(0, 101), xlim=(0, None))
    _legend_beside(axes)
    return figure


@drawn
def waits_by_reason(place: Place) -> Any:  # noqa: ANN401
    """What the programs of each policy waited for, stacked."""
    figure, axes = new_figure(7.2, 1.3 + 0.38 * len(place.rows))
    left = [0.0] * len(place.rows)
    waits = [row.waits_by_reason_s for row in place.rows]
    for reason in _reasons(waits):
        label, colour = REASONS.get(reason, (reason, "#5b6670"))
        widths = [waited.get(reason, 0.0) for waited in waits]
        axes.barh(range(len(left)), widths, left=left, label=label, color=colour, height=0.62)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    _one_line_each(axes, [row.label for row in place.rows])
    axes.set(xlabel="seconds for each program", xlim=(0, None))
    axes.figure.legend(loc="outside upper left", ncols=6)
    return figure


def _lines(places: Sequence[Place], measure: Measure) -> dict[str, dict[int, tuple[Row, Interval]]]:
    """For each policy: by the place's number, its row there and the measure's interval."""
    lines: dict[str, dict[int, tuple[Row, Interval]]] = {}
    for at, place in enumerate(places):
        for row in place.rows:
            interval = row.interval(measure)
            if interval.is_known:
                lines.setdefault(family(row.label), {})[at] = (row, interval)
    return lines


def _error_bars(
    axes: Any,  # noqa: ANN401
    xs: Sequence[float],
    intervals: Sequence[Interval],
    scale: float,
    line: Mapping[str, Any],
    label: str,
) -> None:
    axes.plot(xs, [scale * i.mean for i in intervals], marker="o", markersize=4.5, label=label, **line)
    wide = [(x, i) for x, i in zip(xs, intervals, strict=True) if i.has_width]
    if wide:
        axes.fill_between(
            [x for x, _ in wide],
            [scale * i.low for _, i in wide],
            [scale * i.high for _, i in wide],
            color=line["color"],
            alpha=0.12,
            linewidth=0,
        )


def _lower_bound(axes: Any, ratios: Sequence[float], places: Sequence[Place]) -> None:  # noqa: ANN401
    bounds = [place.lower_bound for place in places]
    if all(bound.is_known for bound in bounds):
        means = [bound.mean for bound in bounds]
        axes.plot(ratios, means, color="#1d2730", linestyle=":", label="lower bound")


def _reasons(waits: Sequence[Mapping[str, float]]) -> list[str]:
    """Those that occur, in the order of the legend."""
    found = {reason for waited in waits for reason, seconds in waited.items() if seconds > 0}
    return [*(r for r in REASONS if r in found), *sorted(found - REASONS.keys())]


def _one_line_each(axes: Any, labels: Sequence[str]) -> None:  # noqa: ANN401
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def _legend_beside(axes: Any) -> None:  # noqa: ANN401
    axes.figure.legend(loc="outside right upper")
