"""`sostenuto bench`: policies side by side, and engines measured for it."""

import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sostenuto.errors import ConfigError
from sostenuto.runtime.bench.cells import CLAIRVOYANT
from sostenuto.runtime.bench.drawing import check_drawing
from sostenuto.runtime.bench.grid import CAP, Sweep
from sostenuto.runtime.bench.live.command import run_command
from sostenuto.runtime.bench.options import (
    CONCURRENCY,
    PROGRAMS,
    Load,
    listed,
    read_fleet,
    read_ratios,
    read_seeds,
    told,
)
from sostenuto.runtime.bench.report import write_report
from sostenuto.runtime.bench.sweep import Outcome, run_cells
from sostenuto.runtime.bench.tables import show_places
from sostenuto.runtime.calibration.calibrate import ProbeSettings, calibrate
from sostenuto.runtime.calibration.profile_file import profile_text
from sostenuto.runtime.simulation.traces.files import write_trace
from sostenuto.scheduler.policies import POLICIES

bench = typer.Typer(no_args_is_help=True, help="Compare scheduling policies.")
bench.command("run")(run_command)

_WIDTH_OF_A_FILE = 200
Say = Callable[[Outcome], None]


@bench.command()
def simulate(  # noqa: PLR0913 - the options of a command
    *,
    out: Annotated[Path, typer.Option(help="Directory for report.json, report.csv and report.html.")],
    workload: Annotated[str, typer.Option(help="Named workloads, with commas between.")] = "swe-light",
    trace: Annotated[Path | None, typer.Option(help="Recorded programs, in place of a workload.")] = None,
    policies: Annotated[
        str, typer.Option(help="With commas between; `sostenuto bench policies` lists them.")
    ] = "sostenuto,request-sticky,thunderagent,cap",
    engines: Annotated[int, typer.Option(help="Replicas.")] = 2,
    profile: Annotated[
        str, typer.Option(help="Of an engine: a name or a TOML file.")
    ] = "pod-h100x2-qwen3-30b",
    ratio: Annotated[
        str, typer.Option(help="Working set over KV pool: numbers, `endless`, or the profile's `own`.")
    ] = "1.2,2,3",
    programs: Annotated[int | None, typer.Option(help=f"{PROGRAMS} of a workload, all of a trace.")] = None,
    concurrency: Annotated[int | None, typer.Option(help=f"Closed: at one time; {CONCURRENCY}.")] = None,
    arrivals_per_hour: Annotated[float | None, typer.Option(help="Open: so many come in an hour.")] = None,
    seeds: Annotated[int, typer.Option(help="How many; each draws or orders the programs anew.")] = 5,
    first_seed: Annotated[int, typer.Option(help="The seeds go on from this one.")] = 1,
    workers: Annotated[int | None, typer.Option(help="Processes; one for each CPU.")] = None,
    save_trace: Annotated[Path | None, typer.Option(help="Write the first seed's programs there.")] = None,
    references: Annotated[
        bool, typer.Option(help="Run the clairvoyant policy and an endless pool, too.")
    ] = True,
    html: Annotated[bool, typer.Option(help="Draw report.html; needs matplotlib.")] = True,
) -> None:
    """Run policies on the same simulated programs and engines, and report what differs."""
    sweep = Sweep(
        Load(programs, concurrency, arrivals_per_hour).sources(workload, trace),
        tuple(listed(policies)),
        read_fleet(profile, engines),
        read_ratios(ratio),
        read_seeds(seeds, first_seed),
        references,
    )
    if html:
        check_drawing()
    cells = sweep.cells()
    with _writing("out", out):
        out.mkdir(parents=True, exist_ok=True)
    if save_trace is not None:
        _save(sweep, save_trace)
    with _progress(len(cells)) as say:
        outcomes = run_cells(cells, workers=_workers(workers), say=say)
    _report(out, outcomes, told(sweep), html=html)


@bench.command("calibrate")
def calibrate_command(
    url: Annotated[str, typer.Argument(help="Of a running engine that speaks the OpenAI routes.")],
    *,
    out: Annotated[Path, typer.Option(help="TOML file of the profile.")],
    model: Annotated[str | None, typer.Option(help="Its name there; the first that it serves.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="SOSTENUTO_API_KEY", help="For the engine.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of context at which decoding is timed; half of the most.")
    ] = None,
) -> None:
    """Measure an engine and write the profile with which it is simulated."""
    settings = ProbeSettings() if context is None else ProbeSettings(decode_context_tokens=context)
    with _writing("out", out):
        out.parent.mkdir(parents=True, exist_ok=True)
    profile = anyio.run(partial(calibrate, url, model=model, api_key=api_key, settings=settings))
    with _writing("out", out):
        out.write_text(profile_text(profile), encoding="utf-8")
    Console().print(f"profile: {out}", markup=False, highlight=False, soft_wrap=True)


@bench.command("policies")
def policies_command() -> None:
    """List the policies that can be compared."""
    table = Table("name", "what it does")
    others = {
        CAP: "the same, tried at several values, of which the best is reported",
        CLAIRVOYANT: "ours, told how long each tool call will take: a reference",
    }
    for name, what in {**POLICIES, **others}.items():
        table.add_row(name, what)
    Console().print(table)


def _report(out: Path, outcomes: Sequence[Outcome], settings: dict[str, str], *, html: bool) -> None:
    """Reports of the cells that ran; exit code 1 when one did not."""
    errors = Console(stderr=True)
    failed = [outcome for outcome in outcomes if outcome.measured is None]
    for outcome in failed:
        text = f"failed: {outcome.cell}: {outcome.failed}"
        errors.print(text, style="bold red", markup=False, highlight=False, soft_wrap=True)
    measured = [outcome.measured for outcome in outcomes if outcome.measured is not None]
    if measured:
        console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE)
        show_places(console, write_report(out, measured, settings, html=html))
        console.print(f"reports: {out}", markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


@contextmanager
def _progress(cells: int) -> Generator[Say]:
    """On stderr: a bar that moves, or a line for each cell where nobody watches."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("simulating", total=cells)
        numbers = count(1)

        def say(outcome: Outcome) -> None:
            progress.advance(bar)
            if not console.is_terminal:
                text = f"{next(numbers)}/{cells} {outcome.cell}"
                console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield say


def _workers(asked: int | None) -> int:
    if asked is not None and asked < 1:
        raise ConfigError(f"workers: {asked} are too few; give at least 1")
    return asked or len(os.sched_getaffinity(0))


def _save(sweep: Sweep, path: Path) -> None:
    source, *others = sweep.sources
    if others:
        raise ConfigError("save-trace: one file holds one workload; give one workload")
    with _writing("save-trace", path):
        write_trace(source.load(sweep.seeds[0]), path)


@contextmanager
def _writing(option: str, path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option}: {path}: {error.strerror}; choose another place") from error
