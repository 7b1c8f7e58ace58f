"""`sostenuto bench run`: policies side by side on engines that this command starts."""

import sys
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console

from sostenuto.errors import ConfigError
from sostenuto.runtime.bench.drawing import check_drawing
from sostenuto.runtime.bench.live.cells import LiveCell, LiveSweep
from sostenuto.runtime.bench.live.workload import live_workload
from sostenuto.runtime.bench.options import listed, read_seeds
from sostenuto.runtime.bench.report import write_report
from sostenuto.runtime.bench.source import Source
from sostenuto.runtime.bench.summary import Measured
from sostenuto.runtime.bench.tables import show_places
from sostenuto.runtime.config import EngineSettings, parse
from sostenuto.runtime.simulation.plan import Workload

_WIDTH_OF_A_FILE = 200
_PROGRAMS, _CONCURRENCY = 20, 12


def run_command(  # noqa: PLR0913 - the options of a command
    *,
    out: Annotated[Path, typer.Option(help="Directory for report.json, report.csv and report.html.")],
    policies: Annotated[
        str, typer.Option(help="With commas between; `sostenuto bench policies` lists them.")
    ] = "sostenuto,request-sticky,thunderagent",
    trace: Annotated[Path | None, typer.Option(help="Recorded programs, in place of drawn ones.")] = None,
    programs: Annotated[int | None, typer.Option(help=f"{_PROGRAMS}, or all of a trace.")] = None,
    concurrency: Annotated[int, typer.Option(help="Programs at one time.")] = _CONCURRENCY,
    ratio: Annotated[float, typer.Option(help="Working set over KV pool.")] = 2.0,
    kv_tokens: Annotated[int | None, typer.Option(help="Pool of an engine, in place of a ratio.")] = None,
    time_scale: Annotated[float, typer.Option(help="Seconds for each second of a tool call.")] = 1.0,
    seeds: Annotated[int, typer.Option(help="How many; each draws or orders the programs anew.")] = 1,
    first_seed: Annotated[int, typer.Option(help="The seeds go on from this one.")] = 1,
    model: Annotated[Path | None, typer.Option(help="Folder of a model; a small random one.")] = None,
    engines: Annotated[int, typer.Option(help="Processes, each with a pool of its own.")] = 1,
    threads: Annotated[int, typer.Option(help="Of an engine.")] = 1,
    slots: Annotated[int, typer.Option(help="Requests that decode together on an engine.")] = 16,
    device: Annotated[str, typer.Option(help="Of the engines.")] = "cpu",
    references: Annotated[bool, typer.Option(help="Run an endless pool, too.")] = True,
    html: Annotated[bool, typer.Option(help="Draw report.html; needs matplotlib.")] = True,
) -> None:
    """Run policies on the same programs and engines of this machine, and report what differs."""

    def workload(seed: int) -> Workload:
        if trace is not None:
            return Source(trace=trace, programs=programs, concurrency=concurrency).load(seed)
        return live_workload(_PROGRAMS if programs is None else programs, seed=seed, concurrency=concurrency)

    engine = {"threads": threads, "concurrency": slots, "device": device}
    sweep = LiveSweep(
        tuple(listed(policies)),
        workload,
        read_seeds(seeds, first_seed),
        parse(engine, EngineSettings, where="engine"),
        engines=engines,
        model=_folder(model),
        ratio=ratio,
        kv_tokens=kv_tokens,
        time_scale=time_scale,
        references=references,
    )
    if html:
        check_drawing()
    cells = sweep.cells()
    _make(out)
    measured = anyio.run(sweep.run, _tell)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE)
    show_places(console, write_report(out, measured, _told(cells, sweep), html=html))
    console.print(f"reports: {out}", markup=False, highlight=False, soft_wrap=True)


def _tell(cell: LiveCell, measured: Measured) -> None:
    summary = measured.summary
    text = f"{cell}: mean completion {summary.completion_mean_s:.1f} s, hit rate {summary.hit_rate:.2f}"
    if summary.failed:
        failed = next(program for program in measured.run.programs if program.failed)
        text += f"; {summary.failed} failed, {failed.id} as: {failed.failed}"
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def _told(cells: list[LiveCell], sweep: LiveSweep) -> dict[str, str]:
    return {
        "workload": cells[0].workload.name,
        "policies": ", ".join(sweep.policies),
        "engines": f"{sweep.engines} embedded, {sweep.engine.threads} threads, {sweep.engine.device}",
        "model": sweep.model.name if sweep.model else "random weights",
        "KV tokens of an engine": ", ".join(
            str(tokens) for tokens in dict.fromkeys(c.kv_tokens for c in cells)
        ),
        "time scale of tools": f"{sweep.time_scale:g}",
        "seeds": ", ".join(map(str, sweep.seeds)),
    }


def _folder(model: Path | None) -> Path | None:
    if model is not None and not model.is_dir():
        raise ConfigError(f"model: {model} is not a folder; give one with config.json and *.safetensors")
    return model


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: {out}: {error.strerror}; choose another place") from error
