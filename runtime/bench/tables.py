"""A comparison in the terminal: one table for each place."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sostenuto.runtime.bench.comparison import ENDLESS_POOL, Place, Row
from sostenuto.runtime.bench.measures import HEADLINE, Unit, write, write_interval

_OVER_ENDLESS = "/endless"
_LEGEND = (
    "mean, p90: task completion.  slower: completion over time alone.  group: completion of a group.\n"
    "again: tokens prefilled again.  idle: engines idle while work waits.  wait: worst of any turn.\n"
    "Jain: fairness of slowdowns, 1 is even.  /endless: mean completion over that with an endless pool."
)


def show_places(console: Console, places: Sequence[Place]) -> None:
    """Means over seeds; the mean completion with half the width of its 95 % interval."""
    for place in places:
        console.print(_table(place))
    if places:
        console.print(_LEGEND, style="dim", highlight=False)


def notes_of(place: Place) -> list[str]:
    """What has no column: the lower bound, and programs that failed."""
    bound = place.lower_bound
    notes = [f"lower bound of the mean completion: {write_interval(bound, Unit.SECONDS)} s"]
    failed = {row.label: sum(s.failed for s in row.summaries) for row in place.rows}
    notes += [
        f"{label}: {count} programs failed, and are in no time" for label, count in failed.items() if count
    ]
    return notes if bound.is_known else notes[1:]


def _table(place: Place) -> Table:
    seeds = max((len(row.summaries) for row in place.rows), default=0)
    title = f"{place.title} ({place.fleet}; {seeds} seed{'s' if seeds != 1 else ''})"
    table = Table(title=escape(title), title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    table.caption = escape("\n".join(notes_of(place))) or None
    lines = [_line(place, row) for row in place.rows]
    for index, heading in enumerate(["policy", *HEADLINE, _OVER_ENDLESS]):
        width = max(len(line[index]) for line in lines)
        table.add_column(heading, justify="right" if index else "left", overflow="fold", min_width=width)
    for row, line in zip(place.rows, lines, strict=True):
        table.add_row(*map(escape, line), style="dim" if row.is_reference else "")
    return table


def _line(place: Place, row: Row) -> list[str]:
    first, *others = HEADLINE.values()
    return [
        row.label,
        write_interval(row.interval(first), first.unit),
        *(write(row.interval(measure).mean, measure.unit) for measure in others),
        write_interval(place.over(row, place.row(ENDLESS_POOL)), Unit.TIMES),
    ]
