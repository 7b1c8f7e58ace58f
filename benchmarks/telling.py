"""What a command that measures prints, keeps and ends with."""

import signal
import sys
from pathlib import Path
from typing import NoReturn

from benchmarks.figure import Figure, keep


class Telling:
    """Prints each figure as it comes, and keeps it in `results`; None: it is not kept."""

    def __init__(self, results: Path | None) -> None:
        self._results = results
        self._figures: list[Figure] = []

    def __call__(self, name: str, value: float, unit: str, target: str | None = None) -> None:
        self._figures.append(Figure(name, float(value), unit, target))
        print(self._figures[-1].line(), flush=True)
        if self._results is not None:
            keep(self._figures, self._results)

    def end(self) -> NoReturn:
        """Name what missed its target; exit status 1 when something did."""
        missed = [figure for figure in self._figures if not figure.is_met]
        for figure in missed:
            print(f"# missed: {figure.name} is {figure.value:g}, not {figure.target}", file=sys.stderr)
        sys.exit(1 if missed else 0)


def end_in_order() -> None:
    """Let SIGTERM unwind what runs: the engines that were started are ended with it.

    Another one meanwhile is ignored: make tells its commands what it was told itself.
    """
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, _frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)
