"""A job in the terminal: one line that moves, and lines that stay."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sostenuto.runtime.jobs.events import (
    Alarm,
    Dropped,
    Evaluated,
    GivenUp,
    JobEvent,
    JobResult,
    JobStarted,
    NoSignal,
    Quarantined,
    Replaced,
    Resumed,
    Saved,
    Stalled,
    StepTrained,
    WarmStartChecked,
    WarmStartStep,
)
from sostenuto.runtime.ledger import LedgerStatistics

_EXPECTED = {"job_over", "no_signal"}
"""Reasons that need no line of their own; the ledger has them."""
_EVERY = 10
"""Steps between two lines that stay."""


class Terminal:
    """A context manager that shows what it is told."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[news]}"),
            console=self.console,
            transient=True,
        )
        self._stage = ""
        self._bar = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, event: JobEvent) -> None:
        """Show one event."""
        match event:
            case WarmStartStep(stage, step, steps, report):
                self._move(f"warm start: {stage}", step, steps, f"loss {report.loss:.3f}")
            case StepTrained():
                self._step(event)
            case Evaluated():
                self._line(_held_out(event))
            case _:
                self._other(event)

    def _step(self, event: StepTrained) -> None:
        news = f"reward {event.reward:.2f}  staleness {event.staleness_mean:.1f}"
        self._move("training", event.step, event.steps, news)
        if event.report.refused:
            self._line(f"[yellow]step {event.step} was refused: {escape(event.report.refused)}[/]")
        if event.step % _EVERY == 0 or event.step == 1:
            self._line(
                f"step {event.step}/{event.steps}: reward {event.reward:.3f}, version {event.version}, "
                f"staleness {event.staleness_mean:.2f} (most {event.staleness_max}), waited "
                f"{event.wait_s:.2f} s, learnt {event.learn_s:.2f} s, published {event.publish_s:.2f} s"
            )

    def _other(self, event: JobEvent) -> None:
        match event:
            case JobStarted() | Resumed():
                self._line(escape(_beginning(event)))
            case WarmStartChecked():
                state = "open" if event.passed else "[yellow]closed[/]"
                self._line(
                    f"warm start, step {event.step}: lessons {event.lessons_exact:.3f} exact, "
                    f"answers {event.answers_exact:.3f} exact; gate {state}"
                )
            case Dropped() | Replaced() | GivenUp() | Alarm():
                self._lost(event)
            case NoSignal(groups, reward):
                self._line(
                    f"[yellow]nothing to learn from: in each of {groups} groups all rewards are equal "
                    f"(mean {reward:.2f}); sampling others[/]"
                )
            case Quarantined(task_id):
                self._line(
                    f"[yellow]task {escape(task_id)} is quarantined: infrastructure fails it every time[/]"
                )
            case Stalled():
                self._line(f"[yellow]{escape(str(event))}[/]")
            case Saved():
                self._line(escape(f"saved {event.path}"))
            case _:
                pass

    def _lost(self, event: Dropped | Replaced | GivenUp | Alarm) -> None:
        match event:
            case Dropped(reason, programs, detail):
                if reason not in _EXPECTED:
                    self._line(escape(f"{programs} programs dropped: {reason} {detail}"))
            case Replaced(program, by, reason):
                self._line(escape(f"{program} was started anew as {by}: {reason}"))
            case Alarm():
                self._line(f"[red]{escape(str(event))}[/]")
            case GivenUp(group, programs, reason, again):
                then = "its task is started anew" if again else "its task is left out"
                told = escape(f"{group} was given up ({programs} programs): {reason}; {then}")
                self._line(f"[yellow]{told}[/]")

    def _move(self, stage: str, step: int, steps: int, news: str) -> None:
        if stage != self._stage:
            if self._bar is not None:
                self._progress.remove_task(self._bar)
            self._stage, self._bar = stage, self._progress.add_task(stage, total=steps, news="")
        assert self._bar is not None
        self._progress.update(self._bar, completed=step, total=max(step, steps), news=news)

    def _line(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


def _held_out(told: Evaluated) -> str:
    how = "greedy" if told.temperature == 0 else f"sampled at T={told.temperature:g}"
    about = "" if told.interval == "none" else f" [{told.low:.3f}, {told.high:.3f}]"
    ks = "".join(f", pass@{k} {share:.3f}" for k, share in sorted(told.pass_at.items()) if k > 1)
    failed = f", {told.failed} failed" if told.failed else ""
    mixed = f", versions {told.versions[0]} to {told.versions[-1]}" if len(told.versions) > 1 else ""
    where = f", {escape(told.environment)}" if told.environment else ""
    return (
        f"held-out{where}, step {told.step}, {how}: [bold]{told.reward:.3f}[/]{escape(about)}{ks} "
        f"({told.programs} programs{failed}{mixed}, {told.elapsed_s:.1f} s)"
    )


def show_result(console: Console, result: JobResult) -> None:
    """The end of a job: curve's ends, time, ledger."""
    _show_evaluations(console, result)
    _show_time(console, result)
    show_ledger(console, result.ledger)


def _show_evaluations(console: Console, result: JobResult) -> None:
    if not result.evaluations:
        return
    table = Table(title="Held-out success", title_justify="left")
    for column in ("step", "version", "temperature", "mean reward", "programs", "failed"):
        table.add_column(column, justify="right")
    for told in result.evaluations:
        temperature = "greedy" if told.temperature == 0 else f"{told.temperature:g}"
        table.add_row(
            f"{escape(told.environment)} {told.step}".lstrip(),
            str(told.version),
            temperature,
            f"{told.reward:.3f}",
            str(told.programs),
            str(told.failed),
        )
    console.print(table)


def _show_time(console: Console, result: JobResult) -> None:
    if not result.steps:
        return
    t = result.time
    table = Table(
        title=f"Time over {result.steps} steps, {result.elapsed_s:.0f} s in all", title_justify="left"
    )
    table.add_column("what")
    table.add_column("seconds", justify="right")
    table.add_column("counted", style="dim")
    for what, seconds, counted in (
        ("decode", t.decode_s, "program-seconds, they overlap"),
        ("prefill", t.prefill_s, "program-seconds"),
        ("tools", t.tool_s, "program-seconds"),
        ("environment (prepare, score)", t.environment_s, "program-seconds"),
        ("waiting for KV or a slot", t.queue_s, "program-seconds"),
        ("trainer waits for a batch", t.wait_s, "wall"),
        ("learning", t.learn_s, "wall"),
        ("publication", t.publish_s, "wall"),
    ):
        table.add_row(what, f"{seconds:.1f}", counted)
    console.print(table)


def show_ledger(console: Console, ledger: LedgerStatistics) -> None:
    """The sums, and whether they close."""
    table = Table(title="Ledger", title_justify="left")
    table.add_column("programs")
    table.add_column("count", justify="right")
    table.add_row("submitted", str(ledger.submitted))
    table.add_row("running", str(ledger.running))
    table.add_row("sealed, waiting for the trainer", str(ledger.sealed))
    for outcome, count in sorted(ledger.outcomes.items(), key=lambda item: -item[1]):
        table.add_row(escape(outcome), str(count))
    console.print(table)
    console.print("the sums close" if ledger.closes else "[bold red]the sums do not close[/]")


def _beginning(event: JobStarted | Resumed) -> str:
    if isinstance(event, JobStarted):
        return f"{event.job}: model {event.model}; sandboxes: {event.isolation}"
    if not event.checkpoint:
        return f"{event.job}: begins anew, there is no checkpoint of it"
    return (
        f"{event.job}: goes on after step {event.step}, {event.lost_steps} later ones are lost; version "
        f"{event.version}, {event.kept} finished groups are kept, {event.dropped} are dropped"
    )
