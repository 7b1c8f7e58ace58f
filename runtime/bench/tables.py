"""A comparison in the terminal: one table for each place."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sostenuto.runtime.bench.comparison import ENDLESS_POOL, Place
from sostenuto.runtime.bench.measures import COMPLETION, HEADLINE, Unit, write, write_interval

_POLICY, _OVER_ENDLESS = "policy", "/endless"
_LEGEND = {
    "mean s": "task completion, with half of the 95 % interval over seeds",
    _OVER_ENDLESS: "mean completion over that with an endless pool",
    "group s": "from a group's first submission to its last finish",
    "recomputed": "tokens prefilled again",
    "idle %": "engines idle while work waits",
    "slowdown": "completion over the time alone",
    "Jain": "fairness of slowdowns, 1 is even",
}
_PADDING = 2


def show_places(console: Console, places: Sequence[Place]) -> None:
    """Means over seeds, in as many columns as there is room for."""
    for place in places:
        columns = _fitting(_columns(place), console.width)
        console.print(_table(place, columns))
        if place is places[-1]:
            told = "; ".join(f"{name}: {what}" for name, what in _LEGEND.items() if name in columns)
            console.print(told, style="dim", highlight=False, markup=False)


def notes_of(place: Place) -> list[str]:
    """What has no column: the lower bound, and programs that failed."""
    bound = place.lower_bound
    notes = [f"lower bound of the mean completion: {write_interval(bound, Unit.SECONDS)} s"]
    failed = {row.label: sum(s.failed for s in row.summaries) for row in place.rows}
    notes += [
        f"{label}: {count} programs failed, and are in no time" for label, count in failed.items() if count
    ]
    return notes if bound.is_known else notes[1:]


def _table(place: Place, columns: Mapping[str, Sequence[str]]) -> Table:
    seeds = max(len(row.summaries) for row in place.rows)
    title = f"{place.title} ({place.fleet}; {seeds} seed{'s' if seeds != 1 else ''})"
    table = Table(title=escape(title), title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    table.caption = escape("\n".join(notes_of(place))) or None
    for heading in columns:
        table.add_column(heading, justify="left" if heading == _POLICY else "right", no_wrap=True)
    for row, *cells in zip(place.rows, *columns.values(), strict=True):
        table.add_row(*map(escape, cells), style="dim" if row.is_reference else "")
    return table


def _columns(place: Place) -> dict[str, list[str]]:
    """By heading, a cell for each row."""
    endless = place.row(ENDLESS_POOL)
    columns = {_POLICY: [row.label for row in place.rows]}
    for heading, measure in HEADLINE.items():
        intervals = [row.interval(measure) for row in place.rows]
        columns[heading] = [write(interval.mean, measure.unit) for interval in intervals]
        if measure is COMPLETION:
            columns[heading] = [write_interval(interval, measure.unit) for interval in intervals]
            columns[_OVER_ENDLESS] = [write(place.over(row, endless).mean, Unit.TIMES) for row in place.rows]
    return columns


def _fitting(columns: Mapping[str, Sequence[str]], width: int) -> dict[str, Sequence[str]]:
    """The first columns, as many as fit in a line.  All are in the files."""
    fitting: dict[str, Sequence[str]] = {}
    for heading, cells in columns.items():
        width -= max(map(len, (heading, *cells))) + _PADDING
        if width < 0:
            break
        fitting[heading] = cells
    return fitting
