"""What every measurement works with: its size, its folders, and where its figures go."""

import hashlib
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.figure import Figure
from sostenuto.runtime.jobs.events import JobEvent, StepTrained, WarmStartStep
from sostenuto.runtime.quickstart.recipe import Recipe

_CACHE = Path(__file__).parent.parent / ".cache" / "benchmarks"


@dataclass(slots=True)
class Bench:
    """One call of the benchmark; the measurements are its only writers, one after the other."""

    quick: bool
    """Small sizes: does it run at all?  The numbers mean little."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Of the quickstarts."""
    figures: list[Figure] = field(default_factory=list[Figure])

    def tell(self, name: str, value: float, unit: str, target: str | None = None) -> None:
        """Print the figure and keep it."""
        figure = Figure(name, float(value), unit, target)
        self.figures.append(figure)
        print(figure.line(), flush=True)

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    @property
    def recipe(self) -> Recipe:
        return Recipe()

    @property
    def models(self) -> Path:
        """Where models of this warm start are kept between calls."""
        plan = self.recipe.model_dump_json(include={"model", "copying", "demonstrating"})
        digest = hashlib.sha256(plan.encode()).hexdigest()[:12]
        return _CACHE / digest

    @contextmanager
    def run_directory(self) -> Generator[Path]:
        """A fresh folder for one run, removed afterwards."""
        with tempfile.TemporaryDirectory(prefix="sostenuto-bench-") as folder:
            yield Path(folder) / "run"

    def follow(self, event: JobEvent) -> None:
        """Say on stderr that something goes on; figures alone go to stdout."""
        if isinstance(event, WarmStartStep | StepTrained) and event.step % 20 == 0:
            print(f"# {type(event).__name__} {event.step}/{event.steps}", file=sys.stderr, flush=True)
