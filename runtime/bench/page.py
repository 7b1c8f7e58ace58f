"""One HTML file that shows a comparison: settings, tables, plots.  It loads nothing from anywhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from sostenuto.runtime.bench.comparison import RATIO, Place, Row, compare
from sostenuto.runtime.bench.measures import BY_FIELD, Measure
from sostenuto.runtime.bench.page_tables import Table, all_measures, headline
from sostenuto.runtime.bench.page_template import PAGE, TABLE
from sostenuto.runtime.bench.plots import (
    LOWER_BOUND,
    Ink,
    bars,
    completion_shares,
    has_ratio,
    over_ratios,
    waits_by_reason,
)
from sostenuto.runtime.bench.summary import Measured, Summary
from sostenuto.runtime.bench.tables import notes_of
from sostenuto.runtime.bench.timelines import fleet_timeline, has_series, program_timeline, program_to_show
from sostenuto.runtime.simulation.results import RunResult

TITLE = "Scheduling policies side by side"
_OVER_RATIOS = ("completion_mean_s", "group_completion_mean_s", "hit_rate", "worst_turn_wait_s")
_BARS = ("completion_mean_s", "hit_rate")

_Key = tuple[str, str, str, int, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class _Plot:
    svg: Markup
    caption: str


@dataclass(frozen=True, slots=True)
class _ShownPlace:
    title: str
    headline: Table
    measures: Table
    notes: list[str]
    plots: list[_Plot]
    timelines: list[_Plot]


@dataclass(frozen=True, slots=True)
class _Section:
    """Places that differ in the size of the pool alone."""

    title: str
    plots: list[Markup]
    places: list[_ShownPlace]


def page(measured: Sequence[Measured], settings: Mapping[str, str]) -> str:
    """The report as HTML; Unsupported where plots cannot be drawn."""
    places = compare([m.summary for m in measured])
    ink = Ink.of(places)
    runs = {_key(m.summary): m.run for m in measured}
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    template = environment.from_string(TABLE)

    def table(shown: Table) -> Markup:
        return Markup(template.render(headings=shown.headings, lines=shown.lines))

    return environment.from_string(PAGE).render(
        title=TITLE,
        lead=_lead(places),
        settings=settings,
        legend=_legend(ink, places),
        sections=[_section(members, ink, runs) for members in _sections(places)],
        table=table,
    )


def _lead(places: Sequence[Place]) -> str:
    workloads = ", ".join(dict.fromkeys(place.workload for place in places))
    fleets = ", ".join(dict.fromkeys(place.fleet for place in places))
    return f"{workloads} on {fleets}"


def _legend(ink: Ink, places: Sequence[Place]) -> list[dict[str, str]]:
    names = {"-": "solid", "--": "dashed", ":": "dotted"}
    lines = {label: ink.line(label) for label in ink.colour}
    if any(place.lower_bound.is_known for place in places):
        lines["lower bound"] = LOWER_BOUND
    return [
        {"label": label, "colour": line["color"], "style": names[line["linestyle"]]}
        for label, line in lines.items()
    ]


def _sections(places: Sequence[Place]) -> list[list[Place]]:
    sections: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[Place]] = {}
    for place in places:
        setting = tuple(item for item in place.setting.items() if item[0] != RATIO)
        sections.setdefault((place.workload, place.fleet, setting), []).append(place)
    return list(sections.values())


def _section(places: Sequence[Place], ink: Ink, runs: Mapping[_Key, RunResult]) -> _Section:
    first = places[0]
    setting = (f"{name} {value}" for name, value in first.setting.items() if name != RATIO)
    with_ratio = sorted(filter(has_ratio, places), key=lambda place: float(place.setting[RATIO]))
    plots = [Markup(over_ratios(with_ratio, measure, ink)) for measure in _measures(_OVER_RATIOS)]
    return _Section(
        " · ".join([first.workload, *setting, first.fleet]),
        plots if len(with_ratio) > 1 else [],
        [_place(place, ink, runs, with_bars=len(with_ratio) < 2) for place in places],
    )


def _place(place: Place, ink: Ink, runs: Mapping[_Key, RunResult], *, with_bars: bool) -> _ShownPlace:
    by_policy = {row.label: _runs_of(row, runs) for row in place.rows}
    shares = _plot(completion_shares(by_policy, ink), "Share of programs over within a time, all seeds.")
    waits = _plot(waits_by_reason(place), "What programs waited for besides tools, mean over all.")
    compared = [_plot(bars(place, measure, ink), "") for measure in _measures(_BARS)] if with_bars else []
    return _ShownPlace(
        f"ratio {place.setting[RATIO]}" if RATIO in place.setting else place.title,
        headline(place),
        all_measures(place),
        notes_of(place),
        [*compared, shares, waits],
        _timelines(by_policy, ink),
    )


def _timelines(by_policy: Mapping[str, Sequence[RunResult]], ink: Ink) -> list[_Plot]:
    """Of the first run of each policy that has them."""
    lives = {label: run for label, runs in by_policy.items() for run in runs[:1] if _has_lives(run)}
    curves = {label: run for label, runs in by_policy.items() for run in runs[:1] if has_series(run)}
    program_id = program_to_show(list(lives.values()))
    plots: list[_Plot] = []
    if program_id is not None:
        seed = next(iter(lives.values())).seed
        caption = f"Program {program_id} of seed {seed} under each policy: slower than nine in ten."
        plots.append(_plot(program_timeline(lives, program_id), caption))
    if curves:
        caption = f"The fleet over time, seed {next(iter(curves.values())).seed}."
        plots.append(_plot(fleet_timeline(curves, ink), caption))
    return plots


def _has_lives(run: RunResult) -> bool:
    return any(program.stretches for program in run.programs)


def _plot(svg: str, caption: str) -> _Plot:
    return _Plot(Markup(svg), caption)


def _measures(names: Sequence[str]) -> list[Measure]:
    return [BY_FIELD[name] for name in names]


def _runs_of(row: Row, runs: Mapping[_Key, RunResult]) -> list[RunResult]:
    return [runs[_key(summary)] for summary in row.summaries]


def _key(summary: Summary) -> _Key:
    settings = tuple(summary.settings.items())
    return summary.workload, summary.fleet, summary.policy, summary.seed, settings
