"""Cells in worker processes.  One that fails is told with its name, and the others go on."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from threading import Thread

from sostenuto.runtime.bench.cells import Cell, run_cell
from sostenuto.runtime.bench.summary import Measured


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one cell: what was measured, or why nothing was."""

    cell: Cell
    measured: Measured | None
    failed: str = ""


def run_cells(
    cells: Sequence[Cell],
    *,
    workers: int,
    say: Callable[[Outcome], None] | None = None,
    run: Callable[[Cell], Measured] = run_cell,
) -> list[Outcome]:
    """An outcome for each cell, in the order of the cells; `say` hears of each when it is there.

    With one worker they run in this process; with more, `run` has to be a function of a module.
    """
    outcomes: dict[int, Outcome] = {}
    for index, outcome in _run(dict(enumerate(cells)), workers, run):
        outcomes[index] = outcome
        if say is not None:
            say(outcome)
    return [outcomes[index] for index in range(len(cells))]


def _run(
    cells: dict[int, Cell], workers: int, run: Callable[[Cell], Measured]
) -> Iterator[tuple[int, Outcome]]:
    """A worker's death takes the others' cells with it: those are run again, one worker for each."""
    lost: dict[int, Cell] = {}
    for index, future in _finished(cells, _executor(workers), run):
        if isinstance(future.exception(), BrokenProcessPool):
            lost[index] = cells[index]
        else:
            yield index, _outcome(cells[index], future)
    for index, cell in lost.items():
        for _, future in _finished({index: cell}, _processes(1), run):
            yield index, _outcome(cell, future)


def _finished(
    cells: dict[int, Cell], executor: Executor, run: Callable[[Cell], Measured]
) -> Iterator[tuple[int, "Future[Measured]"]]:
    try:
        futures = {executor.submit(run, cell): index for index, cell in cells.items()}
        for future in as_completed(futures):
            yield futures[future], future
    finally:
        executor.shutdown(cancel_futures=True)


def _outcome(cell: Cell, future: "Future[Measured]") -> Outcome:
    error = future.exception()
    if error is None:
        return Outcome(cell, future.result())
    if isinstance(error, BrokenProcessPool):
        return Outcome(cell, None, "its process died: out of memory, or killed")
    return Outcome(cell, None, f"{type(error).__name__}: {error}")


def _executor(workers: int) -> Executor:
    return _processes(workers) if workers > 1 else ThreadPoolExecutor(max_workers=1)


def _processes(workers: int) -> Executor:
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=spawn, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """A worker waits for its next cell for ever: it does not see that whoever would send it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a worker"

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()
