"""`sostenuto engines`: the engines of a run, as they stand."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.table import Table

from sostenuto.runtime.control import ask_engines
from sostenuto.runtime.engine_view import EngineView
from sostenuto.runtime.run_directory import RunDirectory

_STYLES = {"serving": "green", "lost": "red", "quarantined": "red"}
_OTHERWISE = "yellow"


def engines(
    run: Annotated[Path, typer.Argument(help="Directory of a run whose runtime is alive.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each engine, a line.")] = False,
) -> None:
    """Show the engines of a run: state, version, load, pace."""
    told = anyio.run(ask_engines, RunDirectory(run)).engines
    if as_json:
        sys.stdout.writelines(view.model_dump_json() + "\n" for view in told)
        return
    show_engines(Console(), told)


def show_engines(console: Console, views: Sequence[EngineView]) -> None:
    if not views:
        console.print("no job has engines now")
        return
    table = Table(box=None)
    for name in (
        "engine",
        "kind",
        "state",
        "version",
        "runs",
        "waits",
        "KV used",
        "held",
        "hits",
        "token",
        "guesses",
    ):
        table.add_column(name)
    table.add_column("restarts", justify="right")
    has_urls = any(view.url for view in views)
    if has_urls:
        table.add_column("at")
    for view in views:
        cells = [*_cells(view), view.url] if has_urls else _cells(view)
        table.add_row(*cells, style=_STYLES.get(view.state, _OTHERWISE))
    console.print(table)
    for view in views:
        if view.reason:
            console.print(f"{view.id}: {view.reason}", markup=False, highlight=False, soft_wrap=True)


def _cells(view: EngineView) -> list[str]:
    running = f"{view.running}/{view.concurrency}" if view.running is not None else ""
    return [
        view.id,
        view.kind,
        view.state,
        view.version,
        running,
        _shown(view.waiting),
        _share(view.used_kv_tokens, view.kv_tokens),
        _share(view.held_kv_tokens, view.kv_tokens),
        f"{view.hit_rate:.0%}" if view.hit_rate is not None else "",
        f"{view.token_s * 1000:.3g} ms" if view.token_s is not None else "",
        _guesses(view),
        str(view.restarts),
    ]


def _guesses(view: EngineView) -> str:
    """Such as "71%, was 52%": since the last update of weights, and before it."""
    now, before = view.guesses_right, view.guesses_right_before
    told = [] if now is None else [f"{now:.0%}"]
    return ", ".join(told if before is None else [*told, f"was {before:.0%}"])


def _shown(number: int | None) -> str:
    return "" if number is None else str(number)


def _share(tokens: int | None, of: int | None) -> str:
    return "" if tokens is None or not of else f"{tokens / of:.0%}"
