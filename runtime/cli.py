"""The command line: `sostenuto quickstart | train | resume | eval | serve | bench | tools | engines | ...`.

Every error that we raise on purpose ends as one message on stderr and exit code 1; Ctrl-C ends the job
cleanly, its programs in the ledger as cancelled, with exit code 130.
"""

import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import anyio
import typer
from rich.console import Console

from sostenuto.errors import ConfigError, SostenutoError
from sostenuto.runtime.bench.commands import bench
from sostenuto.runtime.config import RuntimeConfig
from sostenuto.runtime.doctor import examine, show_findings
from sostenuto.runtime.engines_command import engines
from sostenuto.runtime.job_file import load_eval_file, load_train_file
from sostenuto.runtime.jobs.events import JobEvent, JobResult
from sostenuto.runtime.jobs.job import EvalJob, RLJob
from sostenuto.runtime.jobs.workshop import Say
from sostenuto.runtime.quickstart.job import QuickstartResult, default_config, quickstart
from sostenuto.runtime.remembered import QuickstartAsked, recall, remember
from sostenuto.runtime.run_directory import RunDirectory, settled_ledger
from sostenuto.runtime.runtime import JobHandle, Runtime
from sostenuto.runtime.seeing.records import Curve
from sostenuto.runtime.seeing.terminal import Terminal, show_ledger, show_result
from sostenuto.runtime.seeing.trackers import trackers
from sostenuto.runtime.serve_command import serve
from sostenuto.runtime.tools_command import tools

R = TypeVar("R")
J = TypeVar("J", bound=RLJob | EvalJob)

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(bench, name="bench")
app.add_typer(tools, name="tools")
app.command("engines")(engines)
app.command("serve")(serve)
console = Console()

UnsafeOption = Annotated[
    bool, typer.Option("--unsafe", help="Run tools as plain processes, isolated from nothing.")
]


class Interrupted(SostenutoError):  # noqa: N818 - reads as the fact it states
    """The user pressed Ctrl-C."""


@app.command("quickstart")
def quickstart_command(
    directory: Annotated[Path, typer.Option(help="Run directory.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(help="Of the model, the worlds and the sampling.")] = 1,
    *,
    shuffle_rewards: Annotated[
        bool, typer.Option("--shuffle-rewards", help="A control: rewards change places, nothing is learnt.")
    ] = False,
    unsafe: UnsafeOption = False,
) -> None:
    """Build a small model and teach it by reward to use three tools, each in a real sandbox."""
    asked, run = (
        QuickstartAsked(seed=seed, shuffle_rewards=shuffle_rewards, unsafe=unsafe),
        _unused(directory),
    )
    remember(run, asked)
    _quickstart(run, asked)


@app.command()
def train(file: Annotated[Path, typer.Argument(help="TOML file of the job.")]) -> None:
    """Run a training job."""
    settings = load_train_file(file)
    remember(settings.directory, file)
    show_result(console, _submit(settings.runtime(), settings.job, Runtime.submit))


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    *,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Go on from this one, not from the newest of the run.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Where the job's model is now; a checkpoint of the run will do.")
    ] = None,
) -> None:
    """Go on with a training job that was cut off, from its last checkpoint."""
    asked = recall(run)
    if isinstance(asked, QuickstartAsked):
        _quickstart(run, asked, resumes=True)
        return
    changes = {"directory": run, **({"model": model} if model else {})}
    settings = load_train_file(asked).model_copy(update=changes)

    async def submit(runtime: Runtime, job: RLJob) -> JobHandle:
        return await runtime.resume(job, checkpoint=checkpoint, or_begin=True)

    show_result(console, _submit(settings.runtime(), settings.job, submit))


@app.command("eval")
def eval_command(file: Annotated[Path, typer.Argument(help="TOML file of the job.")]) -> None:
    """Run a model on an environment's tasks."""
    settings = load_eval_file(file)
    show_result(console, _submit(settings.runtime(), settings.job, Runtime.submit))


@app.command()
def status(run: Annotated[Path, typer.Argument(help="Run directory.")]) -> None:
    """Print the ledger of a run, living or dead."""
    directory = RunDirectory(run)
    ledger, cut_off = settled_ledger(directory)
    state = "its runtime is alive" if directory.is_in_use else "no runtime holds it"
    _tell(console, f"{run}: {state}")
    if cut_off:
        console.print(f"{len(cut_off)} programs were cut off by the death of the runtime")
    show_ledger(console, ledger.statistics())


@app.command()
def doctor() -> None:
    """Say what this system can isolate and run, and the remedy for what it cannot."""
    findings = anyio.run(examine)
    show_findings(console, findings)
    if not findings.can_isolate:
        raise typer.Exit(1)


def _quickstart(directory: Path, asked: QuickstartAsked, *, resumes: bool = False) -> None:
    config = default_config(directory, unsafe=asked.unsafe)

    async def run(say: Say) -> QuickstartResult:
        return await quickstart(
            config, say, seed=asked.seed, shuffle_rewards=asked.shuffle_rewards, resumes=resumes
        )

    result = _follow(config, run)
    console.print(f"warm start took {result.warm_start_s:.0f} s")
    show_result(console, result.job)


def _submit(
    config: RuntimeConfig,
    make: Callable[[], Awaitable[J]],
    submit: Callable[[Runtime, J], Awaitable[JobHandle]],
) -> JobResult:
    async def run(say: Say) -> JobResult:
        job = await make()
        async with Runtime(config) as runtime:
            handle = await submit(runtime, job)
            async for event in handle.events():
                say(event)
            return await handle.result()

    return _follow(config, run)


def _follow(config: RuntimeConfig, run: Callable[[Say], Awaitable[R]]) -> R:
    """Run with everything that watches, and draw the curve whatever the end."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    curve = Curve()
    with ExitStack() as stack:
        terminal = stack.enter_context(Terminal(console))
        _make(config.directory)
        board = stack.enter_context(trackers(config.trackers, config.directory))
        stack.callback(_draw, curve, config.directory / "curve.png")

        def say(event: JobEvent) -> None:
            for watcher in (terminal.say, board, curve.say):
                watcher(event)

        return anyio.run(_until_interrupted, run, say)


async def _until_interrupted(run: Callable[[Say], Awaitable[R]], say: Say) -> R:
    """Run to the end or, on Ctrl-C or SIGTERM, cancel and raise once everything is cleaned up."""
    done: list[R] = []
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    console.print("ending: programs are cancelled, processes are ended ...")
                    group.cancel_scope.cancel()

        group.start_soon(watch)
        done.append(await run(say))
        group.cancel_scope.cancel()
    if not done:
        raise Interrupted("interrupted; `sostenuto status RUN` shows the ledger, `resume RUN` goes on")
    return done[0]


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run directory {directory}: {error.strerror}; choose another one") from error


def _draw(curve: Curve, path: Path) -> None:
    if curve.draw(path):
        _tell(console, f"reward curve: {path}")


def _unused(directory: Path) -> Path:
    """The directory, or a numbered one beside it when a run is in it already."""
    for number in range(1, 10_000):
        candidate = directory if number == 1 else directory.with_name(f"{directory.name}-{number}")
        if not (candidate / "journal.db").exists():
            return candidate
    return directory


def main() -> None:
    """Entry point of the `sostenuto` command."""
    try:
        app()
    except Interrupted as error:
        _tell(Console(stderr=True), str(error))
        sys.exit(130)
    except BaseExceptionGroup as group:
        ours, others = group.split(SostenutoError)
        if others is not None or ours is None:
            raise
        _fail(_first(ours))
    except SostenutoError as error:
        _fail(error)


def _fail(error: BaseException) -> NoReturn:
    _tell(Console(stderr=True), f"error: {error}", style="bold red")
    sys.exit(1)


def _tell(to: Console, text: str, *, style: str = "") -> None:
    """Print a text as it is: brackets in it are no markup, and it is not broken into lines."""
    to.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _first(group: BaseExceptionGroup[SostenutoError]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
