"""The tables of a page: values with their intervals, and which of them are best."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sostenuto.runtime.bench.comparison import ENDLESS_POOL, Place, Row
from sostenuto.runtime.bench.intervals import Interval
from sostenuto.runtime.bench.measures import HEADLINE, MEASURES, Measure, Unit, write


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    spread: str = ""
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    cells: tuple[Cell, ...]
    is_reference: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    headings: tuple[str, ...]
    lines: tuple[Line, ...]


def headline(place: Place) -> Table:
    """One line for each policy."""
    measures = list(HEADLINE.values())
    columns = [_column(place, measure) for measure in measures]
    columns.append(_ratios(place, place.row(ENDLESS_POOL)))
    columns.append(_ratios(place, place.rows[0]))
    headings = ("policy", *HEADLINE, "over endless", f"over {place.rows[0].label}")
    lines = (
        Line((Cell(row.label), *cells), row.is_reference)
        for row, *cells in zip(place.rows, *columns, strict=True)
    )
    return Table(headings, tuple(lines))


def all_measures(place: Place) -> Table:
    """One line for each measure."""
    headings = ("", *(row.label for row in place.rows))
    lines = (Line((Cell(_heading(measure)), *_column(place, measure))) for measure in MEASURES)
    return Table(headings, tuple(lines))


def _column(place: Place, measure: Measure) -> list[Cell]:
    intervals = [row.interval(measure) for row in place.rows]
    best = _best(place.rows, intervals, measure.more_is_better)
    return [_cell(interval, measure.unit, is_best=at in best) for at, interval in enumerate(intervals)]


def _ratios(place: Place, base: Row | None) -> list[Cell]:
    """Mean completion over that of `base`."""
    return [_cell(place.over(row, base), Unit.TIMES) for row in place.rows]


def _cell(interval: Interval, unit: Unit, *, is_best: bool = False) -> Cell:
    has_spread = interval.has_width and interval.high > interval.low
    spread = write(interval.high - interval.mean, unit) if has_spread else ""
    return Cell(write(interval.mean, unit), spread, is_best)


def _best(rows: Sequence[Row], intervals: Sequence[Interval], more_is_better: bool | None) -> set[int]:
    """Numbers of the policies whose mean nobody's is better than; none where all are alike."""
    means = {
        at: interval.mean
        for at, (row, interval) in enumerate(zip(rows, intervals, strict=True))
        if math.isfinite(interval.mean) and not row.is_reference
    }
    if more_is_better is None or len(set(means.values())) < 2:
        return set()
    best = max(means.values()) if more_is_better else min(means.values())
    return {at for at, mean in means.items() if mean == best}


def _heading(measure: Measure) -> str:
    return f"{measure.label} ({measure.unit})" if measure.unit else measure.label
