"""What a sweep runs, what it refuses before it runs anything, and how its cells are run."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sostenuto.errors import ConfigError
from sostenuto.runtime.bench.cells import Cell, Pool, fleet_of, policy_of, run_cell
from sostenuto.runtime.bench.comparison import compare
from sostenuto.runtime.bench.grid import Sweep
from sostenuto.runtime.bench.options import Load, read_fleet, read_ratios, read_seeds
from sostenuto.runtime.bench.source import Source, expected_concurrency
from sostenuto.runtime.bench.summary import Measured
from sostenuto.runtime.bench.sweep import Outcome, run_cells
from sostenuto.runtime.bench.tables import show_places
from sostenuto.runtime.cli import app
from sostenuto.runtime.simulation.profile import FleetProfile
from sostenuto.runtime.simulation.traces.files import read_trace, write_trace
from sostenuto.runtime.simulation.workloads import working_set_tokens

FLEET = FleetProfile(engines=2, engine=read_fleet("pod-h100x2-qwen3-30b", 2).engine)
SOURCE = Source("remote-tools", programs=6, concurrency=4)


def sweep(
    *,
    source: Source = SOURCE,
    policies: tuple[str, ...] = ("sostenuto", "request-sticky"),
    ratios: tuple[float | Pool, ...] = (0.25, 0.5),
    seeds: tuple[int, ...] = (1, 2),
    references: bool = False,
) -> Sweep:
    return Sweep((source,), policies, FLEET, ratios, seeds, references)


def test_every_policy_runs_at_every_ratio_with_every_seed():
    cells = sweep().cells()
    expected = {
        (policy, ratio, seed)
        for policy in ("sostenuto", "request-sticky")
        for ratio in (0.25, 0.5)
        for seed in (1, 2)
    }
    assert {(cell.policy, cell.ratio, cell.seed) for cell in cells} == expected
    assert len(cells) == len(expected)


def test_references_stand_beside_the_policies():
    cells = sweep(policies=("sostenuto",), references=True).cells()
    noted = [(cell.policy, cell.ratio) for cell in cells if "reference" in cell.notes and cell.seed == 1]
    assert noted == [("clairvoyant", 0.25), ("clairvoyant", 0.5), ("request-sticky", Pool.ENDLESS)]


def test_a_cap_without_a_number_is_tried_over_the_concurrency():
    source = Source("remote-tools", programs=12, concurrency=8)
    cells = sweep(source=source, policies=("cap", "cap:3"), ratios=(0.5,), seeds=(1,)).cells()
    tried = [cell.policy for cell in cells if cell.notes == {"swept": "cap"}]
    assert tried == [f"cap:{cap}" for cap in range(1, 9)]
    assert [cell.policy for cell in cells if not cell.notes] == ["cap:3"]


def test_the_pool_is_the_working_set_over_the_ratio_shared_among_engines():
    workload = SOURCE.load(1)
    fleet = fleet_of(Cell(SOURCE, "sostenuto", FLEET, 0.5, 1), workload)
    assert fleet.engine.kv_tokens == round(working_set_tokens(workload) / 0.5 / 2)
    assert fleet_of(Cell(SOURCE, "sostenuto", FLEET, Pool.OWN, 1), workload) == FLEET
    assert fleet_of(Cell(SOURCE, "sostenuto", FLEET, Pool.ENDLESS, 1), workload).engine.kv_tokens == 1 << 40


def test_an_open_workload_is_sized_by_arrivals_times_time_alone():
    def live(rate: float) -> int:
        return expected_concurrency(
            Source("remote-tools", programs=40, arrivals_per_hour=rate).load(1), FLEET
        )

    assert live(60) < live(240) < 40
    assert live(1e9) == 40


@pytest.mark.parametrize(
    ("policies", "ratios", "named"),
    [
        (("sostenuto", "thunderagnt"), (0.5,), "thunderagent"),
        (("cap:0",), (0.5,), "cap"),
        (("sostenuto",), (0.0,), "ratio"),
        (("sostenuto",), (-2.0,), "ratio"),
        ((), (0.5,), "policies"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(
    policies: tuple[str, ...], ratios: tuple[float, ...], named: str
):
    with pytest.raises(ConfigError, match=named):
        sweep(policies=policies, ratios=ratios).cells()


def test_a_program_that_no_engine_can_hold_is_named_with_the_remedy():
    with pytest.raises(ConfigError, match=r"program p\d+ \(seed 1\) needs \d+ tokens .* lower the ratio"):
        sweep(ratios=(50.0,)).cells()


def test_an_unknown_workload_is_named():
    with pytest.raises(ConfigError, match="did you mean 'swe-light'"):
        sweep(source=Source("swe-lite", programs=4, concurrency=2)).cells()


@pytest.mark.parametrize(
    ("load", "named"),
    [
        ({"concurrency": 4, "arrivals_per_hour": 10.0}, "give one of the two"),
        ({"concurrency": 0}, "concurrency"),
        ({"programs": -1}, "programs"),
        ({"arrivals_per_hour": float("inf")}, "arrivals-per-hour"),
    ],
)
def test_a_load_that_means_nothing_is_refused(load: dict[str, float], named: str):
    with pytest.raises(ConfigError, match=named):
        Load(**load)  # pyright: ignore[reportArgumentType]


def test_numbers_on_the_command_line_are_read_or_named():
    assert read_ratios("1.2, 2,endless,own") == (1.2, 2.0, Pool.ENDLESS, Pool.OWN)
    assert read_seeds(2, 7) == (7, 8)
    with pytest.raises(ConfigError, match="ratio: 'two'"):
        read_ratios("two")
    with pytest.raises(ConfigError, match="seeds"):
        read_seeds(0, 1)
    with pytest.raises(ConfigError, match="engines"):
        read_fleet("small", 0)


def test_a_trace_comes_in_another_order_with_each_seed_groups_together(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    write_trace(Source("swe-light", programs=24, concurrency=4).load(1), path)
    source = Source(trace=path, concurrency=4)
    first, second = (source.load(seed).programs for seed in (1, 2))
    assert [plan.id for plan in first] != [plan.id for plan in second]
    assert sorted(plan.id for plan in first) == sorted(plan.id for plan in second)
    groups = [plan.group for plan in second]
    assert all(len(set(groups[at : at + 8])) == 1 for at in (0, 8, 16))


def test_a_trace_keeps_its_own_arrivals_or_is_given_others(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    recorded = Source("remote-tools", programs=5, arrivals_per_hour=60.0).load(1)
    write_trace(recorded, path)
    own = [plan.arrival_s for plan in Source(trace=path).load(1).programs]
    assert own == pytest.approx([plan.arrival_s for plan in recorded.programs])
    given = [plan.arrival_s for plan in Source(trace=path, arrivals_per_hour=6e5).load(1).programs]
    assert given == sorted(given)
    assert given[-1] < own[-1]


def test_a_cell_measures_its_run():
    measured = run_cell(Cell(SOURCE, "sostenuto", FLEET, 0.5, 1))
    summary = measured.summary
    assert (summary.programs, summary.failed) == (6, 0)
    assert summary.settings == {"programs": "6", "concurrency": "4", "ratio": "0.5"}
    assert summary.lower_bound_mean_s <= summary.completion_mean_s
    assert summary.slowdown_mean == pytest.approx(1, abs=0.3)
    assert measured.run.engines[0].used_tokens == []


def test_the_same_cell_gives_the_same_measures():
    first, second = (run_cell(Cell(SOURCE, "thunderagent", FLEET, 0.5, 3)).summary for _ in range(2))
    assert first.completion_p90_s == second.completion_p90_s
    assert first.worst_turn_wait_s == second.worst_turn_wait_s


def test_the_clairvoyant_policy_is_ours_with_foresight():
    workload = SOURCE.load(1)
    assert type(policy_of("clairvoyant", workload)) is type(policy_of("sostenuto", workload))


def run_or_fail(cell: Cell) -> Measured:
    if cell.policy == "thunderagent":
        raise ValueError("something is wrong")
    return run_cell(cell)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_cell_that_fails_is_named_and_the_others_go_on(workers: int):
    names = ("request-sticky", "thunderagent", "sostenuto")
    cells = [Cell(SOURCE, name, FLEET, 0.5, 1) for name in names]
    heard: list[Outcome] = []
    outcomes = run_cells(cells, workers=workers, say=heard.append, run=run_or_fail)
    assert [outcome.cell.policy for outcome in outcomes] == list(names)
    assert [outcome.failed for outcome in outcomes] == ["", "ValueError: something is wrong", ""]
    assert {outcome.cell.policy for outcome in heard} == set(names)
    assert str(outcomes[1].cell) == (
        "remote-tools, thunderagent, programs 6, concurrency 4, ratio 0.5, seed 1"
    )


def test_a_whole_sweep_becomes_a_table():
    outcomes = run_cells(sweep(seeds=(1,), ratios=(0.5,), references=True).cells(), workers=1)
    places = compare([outcome.measured.summary for outcome in outcomes if outcome.measured])
    console = Console(file=io.StringIO(), width=200)
    show_places(console, places)
    assert isinstance(console.file, io.StringIO)
    assert all(name in console.file.getvalue() for name in ("sostenuto", "clairvoyant", "endless pool"))


def test_the_command_writes_reports_and_the_trace(tmp_path: Path):
    out, trace = tmp_path / "out", tmp_path / "programs.jsonl"
    arguments = "--workload remote-tools --policies request-sticky,cap:4 --ratio 0.2 --programs 4"
    more = f"--concurrency 2 --seeds 1 --workers 1 --no-html --out {out} --save-trace {trace}"
    result = CliRunner().invoke(app, ["bench", "simulate", *arguments.split(), *more.split()])
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} == {"report.json", "report.csv"}
    assert len(read_trace(trace).programs) == 4
    assert "request-sticky" in result.stdout
    assert "4/4 remote-tools" in result.stderr


def test_a_bad_value_stops_the_command_before_the_directory_is_made(tmp_path: Path):
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["bench", "simulate", "--seeds", "0", "--out", str(out)])
    assert isinstance(result.exception, ConfigError)
    assert not out.exists()


@pytest.mark.parametrize("option", ["--out", "--save-trace"])
def test_a_place_that_cannot_be_written_is_named(option: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    places = {"--out": str(tmp_path / "out"), option: str(tmp_path / "file" / "in")}
    arguments = [word for item in places.items() for word in item]
    few = [
        "--workload",
        "remote-tools",
        "--programs",
        "4",
        "--concurrency",
        "2",
        "--ratio",
        "0.2",
        "--seeds",
        "1",
        "--no-html",
    ]
    result = CliRunner().invoke(app, ["bench", "simulate", *few, *arguments])
    assert isinstance(result.exception, ConfigError)
    assert option.removeprefix("--") in str(result.exception)


def test_policies_are_listed_with_what_they_do():
    result = CliRunner().invoke(app, ["bench", "policies"])
    assert re.search(r"sostenuto +│ ours", result.stdout)
    assert "clairvoyant" in result.stdout
