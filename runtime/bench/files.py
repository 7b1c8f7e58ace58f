"""What a comparison leaves for programs to read: one JSON file and one CSV file."""

import csv
import json
import math
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sostenuto.runtime.bench.comparison import ENDLESS_POOL, Place, Row
from sostenuto.runtime.bench.intervals import Interval
from sostenuto.runtime.bench.measures import MEASURES
from sostenuto.runtime.bench.summary import Summary

_NAMES = ("policy", "workload", "fleet", "seed")
_REASON = "waits_for_{}_s"


def versions() -> dict[str, str]:
    """Of the code that measured."""
    return {"sostenuto": version("sostenuto"), "commit": _commit(), "python": platform.python_version()}


def write_json(
    path: Path, summaries: Sequence[Summary], places: Sequence[Place], settings: Mapping[str, str]
) -> None:
    """Settings, versions, each run, and each row of each place with its intervals."""
    report = {
        "settings": dict(settings),
        "versions": versions(),
        "places": [_place(place) for place in places],
        "runs": [asdict(summary) for summary in summaries],
    }
    path.write_text(json.dumps(_finite(report), indent=1) + "\n")


def write_csv(path: Path, summaries: Sequence[Summary]) -> None:
    """One line for each run.  A value that is not known is empty."""
    settings = sorted({name for summary in summaries for name in summary.settings})
    reasons = sorted({reason for summary in summaries for reason in summary.waits_by_reason_s})
    measures = [name for name in Summary.__dataclass_fields__ if name not in (*_NAMES, *_APART)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*_NAMES, *settings, *measures, *(_REASON.format(reason) for reason in reasons)])
        for summary in summaries:
            writer.writerow(
                [
                    *(getattr(summary, name) for name in _NAMES),
                    *(summary.settings.get(name, "") for name in settings),
                    *(_known(getattr(summary, name)) for name in measures),
                    *(summary.waits_by_reason_s.get(reason, 0.0) for reason in reasons),
                ]
            )


_APART = ("settings", "waits_by_reason_s")


def _place(place: Place) -> dict[str, Any]:
    return {
        "workload": place.workload,
        "fleet": place.fleet,
        "setting": dict(place.setting),
        "lower_bound_mean_s": asdict(place.lower_bound),
        "rows": [_row(place, row) for row in place.rows],
    }


def _row(place: Place, row: Row) -> dict[str, Any]:
    measures: dict[str, Interval] = {measure.field: row.interval(measure) for measure in MEASURES}
    return {
        "policy": row.label,
        "is_reference": row.is_reference,
        "completion_over_endless_pool": asdict(place.over(row, place.row(ENDLESS_POOL))),
        "completion_over_first_row": asdict(place.over(row, place.rows[0])),
        **{name: asdict(interval) for name, interval in measures.items()},
    }


def _finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """JSON has no NaN: what is not known is null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: _finite(inner) for name, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case list():
            return [_finite(inner) for inner in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


def _known(value: float) -> float | str:
    return value if math.isfinite(value) else ""


def _commit() -> str:
    """Of the checkout that this file is in, if it is in one."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
