"""What reports make of runs: places, rows, tables, files."""

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench_runs import even_run, program, run_of
from sostenuto.runtime.bench.comparison import compare
from sostenuto.runtime.bench.files import write_csv, write_json
from sostenuto.runtime.bench.measures import BY_FIELD, Unit, write
from sostenuto.runtime.bench.summary import Summary, summarize
from sostenuto.runtime.bench.tables import show_places

COMPLETION = BY_FIELD["completion_mean_s"]


def summaries() -> list[Summary]:
    """Two policies, a swept cap and two references at two ratios, over two seeds."""
    made: list[Summary] = []
    for seed in (1, 2):
        for ratio in ("1.2", "2"):
            at = {"concurrency": "24", "ratio": ratio}
            swept = at | {"swept": "cap"}
            runs = [
                even_run("ours", seed, 50 + seed, at),
                even_run("theirs", seed, 100 + 2 * seed, at),
                even_run("cap:6", seed, 80, swept),
                even_run("cap:12", seed, 60, swept),
                even_run("clairvoyant", seed, 45, at | {"reference": "clairvoyant"}),
            ]
            made += [summarize(run, lower_bound_mean_s=30.0) for run in runs]
        endless = {"concurrency": "24", "ratio": "endless", "reference": "endless pool"}
        made.append(summarize(even_run("request-sticky", seed, 25 + seed / 2, endless)))
    return made


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_a_place_is_one_workload_under_one_setting():
    places = compare(summaries())
    assert [place.setting["ratio"] for place in places] == ["1.2", "2"]
    assert places[0].title == "swe-light · concurrency 24 · ratio 1.2"


def test_of_a_swept_policy_the_best_value_is_the_row():
    labels = [row.label for row in compare(summaries())[0].rows]
    assert labels == ["ours", "theirs", "cap (best of 2: 12)", "clairvoyant", "endless pool"]


def test_references_stand_beside_the_policies_and_the_endless_pool_in_every_place():
    for place in compare(summaries()):
        references = [row.label for row in place.rows if row.is_reference]
        assert references == ["clairvoyant", "endless pool"]
        assert place.lower_bound.mean == 30


def test_the_endless_pool_of_another_setting_stands_nowhere():
    here = summarize(even_run("ours", 1, 50, {"concurrency": "24", "ratio": "2"}))
    endless = {"concurrency": "48", "ratio": "endless", "reference": "endless pool"}
    (place,) = compare([here, summarize(even_run("request-sticky", 1, 25, endless))])
    assert [row.label for row in place.rows] == ["ours"]


def test_policies_are_compared_seed_by_seed():
    place = compare(summaries())[0]
    ours, theirs = place.rows[:2]
    ratio = place.over(ours, theirs)
    assert (ratio.mean, ratio.n) == (pytest.approx(0.5), 2)
    assert ratio.high == pytest.approx(ratio.low)


def test_waits_by_reason_are_told_for_each_program():
    run = run_of(program("a", reasons_s={"kv": 2.0}), program("b", reasons_s={"kv": 1.0, "order": 4.0}))
    row = compare([summarize(run)])[0].rows[0]
    assert row.waits_by_reason_s == {"kv": 1.5, "order": 2.0}


def test_the_table_shows_every_policy_with_its_interval_and_the_lower_bound():
    console = Console(file=io.StringIO(), width=160)
    show_places(console, compare(summaries()))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "cap (best of 2: 12)" in text
    assert "51.5 ±6.4" in text
    assert "lower bound of the mean completion: 30" in text


def test_the_table_says_when_programs_failed():
    console = Console(file=io.StringIO(), width=160)
    show_places(console, compare([summarize(run_of(program("a"), program("b", failed="refused")))]))
    assert isinstance(console.file, io.StringIO)
    assert "ours: 1 programs failed" in console.file.getvalue()


def test_names_with_brackets_are_shown_as_they_are():
    console = Console(file=io.StringIO(), width=160)
    show_places(console, compare([summarize(run_of(program("a"), policy="[red]mine[/red]"))]))
    assert isinstance(console.file, io.StringIO)
    assert "[red]mine[/red]" in console.file.getvalue()


def test_json_has_settings_versions_runs_and_rows(tmp_path: Path):
    path = tmp_path / "report.json"
    made = summaries()
    write_json(path, made, compare(made), {"programs": "4"})
    report = json.loads(path.read_text())
    assert report["settings"] == {"programs": "4"}
    assert report["versions"].keys() == {"sostenuto", "commit", "python"}
    assert len(report["runs"]) == len(made)
    row = report["places"][0]["rows"][1]
    assert row["completion_over_first_row"]["mean"] == pytest.approx(2)
    assert row["completion_mean_s"]["n"] == 2


def test_what_is_not_known_is_null_in_json_and_empty_in_csv(tmp_path: Path):
    made = [summarize(run_of(program("a")))]
    write_json(tmp_path / "report.json", made, compare(made), {})
    write_csv(tmp_path / "report.csv", made)
    assert json.loads((tmp_path / "report.json").read_text())["runs"][0]["slowdown_mean"] is None
    assert "NaN" not in (tmp_path / "report.json").read_text()
    (row,) = rows_of(tmp_path / "report.csv")
    assert row["slowdown_mean"] == ""


def test_csv_has_a_line_for_each_run_and_a_column_for_each_setting_and_reason(tmp_path: Path):
    made = summaries()
    write_csv(tmp_path / "report.csv", made)
    rows = rows_of(tmp_path / "report.csv")
    assert len(rows) == len(made)
    assert rows[0]["ratio"] == "1.2"
    assert float(rows[0]["waits_for_kv_s"]) == 8
    assert rows[2]["swept"] == "cap"


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (1234.5, Unit.SECONDS, "1,234"),
        (12.34, Unit.SECONDS, "12.3"),
        (0.1234, Unit.SHARE, "12.3"),
        (1.5e6, Unit.TOKENS, "1.5M"),
        (3 << 30, Unit.BYTES, "3.0"),
        (float("nan"), Unit.TIMES, "-"),
        (7.0, Unit.COUNT, "7"),
    ],
)
def test_values_are_written_with_the_digits_that_help(value: float, unit: Unit, written: str):
    assert write(value, unit) == written


def test_every_shown_measure_is_one_of_a_summary():
    summary = summarize(run_of(program("a")))
    assert all(isinstance(measure.of(summary), float) for measure in BY_FIELD.values())
    assert COMPLETION.of(summary) == 10
