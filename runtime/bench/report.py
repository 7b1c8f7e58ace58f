"""All reports of a set of runs, simulated or live, into one directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sostenuto.runtime.bench.comparison import Place, compare
from sostenuto.runtime.bench.drawing import check_drawing
from sostenuto.runtime.bench.files import versions, write_csv, write_json
from sostenuto.runtime.bench.page import page
from sostenuto.runtime.bench.summary import Measured


def write_report(
    directory: Path, measured: Sequence[Measured], settings: Mapping[str, str], *, html: bool = True
) -> list[Place]:
    """Write report.json, report.csv and, where asked for, report.html; returns what was compared."""
    if html:
        check_drawing()
    directory.mkdir(parents=True, exist_ok=True)
    summaries = [m.summary for m in measured]
    places = compare(summaries)
    write_json(directory / "report.json", summaries, places, settings)
    write_csv(directory / "report.csv", summaries)
    if html:
        shown = page(measured, {**settings, **versions()})
        (directory / "report.html").write_text(shown, encoding="utf-8")
    return places
