"""The places in which policies are compared, and their runs."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sostenuto.runtime.bench.cells import Cell, Pool, Ratio, run_cell
from sostenuto.runtime.bench.source import Source
from sostenuto.runtime.bench.summary import Summary
from sostenuto.runtime.bench.sweep import Outcome, run_cells
from sostenuto.runtime.simulation.profile import FleetProfile
from sostenuto.runtime.simulation.profiles import load_profile
from sostenuto.runtime.simulation.results import RunResult
from sostenuto.runtime.simulation.traces.files import write_trace
from sostenuto.runtime.simulation.workloads import generate

OURS = "sostenuto"
HONEST = "request-sticky"
"""By request, each program on the engine that was least loaded when it came."""
CODE = ("thunderagent", "thunderagent-decay")
PAPER = "thunderagent-paper"
OTHERS = ("aimd", "ttl", "infercept", "las")
CAP_SHARES = (3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Of the programs in the system; the best is taken for each place by hand, as it were."""
REPORTED_SEED = 7
"""Of the programs.  The policy was tuned on others."""
ORDERS = (1, 2, 3, 4, 5)


@dataclass(frozen=True, slots=True)
class Load:
    """Programs of one workload, and how they come."""

    workload: str
    programs: int
    concurrency: int
    arrivals_per_hour: float | None = None
    """Open: so many; None: closed, `concurrency` in the system."""

    @property
    def name(self) -> str:
        return f"{self.workload} {'closed' if self.arrivals_per_hour is None else 'open'}"

    @property
    def caps(self) -> list[str]:
        return [f"cap:{round(share * self.concurrency)}" for share in CAP_SHARES]

    def source(self, folder: Path) -> Source:
        """The same programs for every policy; a seed is an order of them."""
        path = folder / f"{self.workload}-{self.programs}.jsonl"
        if not path.exists():
            drawn = generate(
                self.workload, programs=self.programs, seed=REPORTED_SEED, concurrency=self.concurrency
            )
            write_trace(drawn, path)
        if self.arrivals_per_hour is None:
            return Source(trace=path, programs=self.programs, concurrency=self.concurrency)
        return Source(trace=path, programs=self.programs, arrivals_per_hour=self.arrivals_per_hour)


@dataclass(frozen=True, slots=True)
class WhileFull:
    """Of a closed run, without its beginning and its end."""

    tasks_per_hour: float
    """Until the last program has come."""
    hidden_by_prefetch: float
    """Share of preparation that nobody waited for, of programs that came when others were running."""


def _while_full(run: RunResult) -> WhileFull:
    last_s = max(program.submitted_s for program in run.programs)
    over = sum(program.finished_s <= last_s for program in run.programs)
    later = [program for program in run.programs if program.submitted_s > 0]
    prepare_s = sum(program.prepare_s for program in later)
    waited_s = sum(program.environment_wait_s for program in later)
    return WhileFull(
        over / last_s * 3600 if last_s else math.nan, 1 - waited_s / prepare_s if prepare_s else math.nan
    )


def fleet(engines: int = 2) -> FleetProfile:
    return FleetProfile(engines=engines, engine=load_profile("pod-h100x2-qwen3-30b"))


class Runs:
    """Summaries by load, ratio and policy, one for each order."""

    def __init__(self, folder: Path, orders: Sequence[int], workers: int) -> None:
        self._folder = folder
        self._orders = orders
        self._workers = workers
        self._summaries: dict[tuple[Load, Ratio, str], list[Summary]] = {}
        self._whole: dict[tuple[Load, Ratio, str], list[WhileFull]] = {}

    def run(self, loads: Sequence[Load], ratios: Sequence[Ratio], policies: Sequence[str]) -> None:
        """What is there already is not run again."""
        missing = list(self._missing(loads, ratios, policies))
        cells = [cell for cell, _ in missing]
        outcomes = run_cells(cells, workers=self._workers, say=_progress(len(cells)), run=run_cell)
        for (_, key), outcome in zip(missing, outcomes, strict=True):
            if outcome.measured is None:
                raise RuntimeError(f"{outcome.cell}: {outcome.failed}")
            self._summaries.setdefault(key, []).append(outcome.measured.summary)
            self._whole.setdefault(key, []).append(_while_full(outcome.measured.run))

    def of(self, load: Load, ratio: Ratio, policy: str) -> list[Summary]:
        return self._summaries[load, ratio, policy]

    def while_full(self, load: Load, ratio: Ratio, policy: str) -> "list[WhileFull]":
        return self._whole[load, ratio, policy]

    def mean(self, load: Load, ratio: Ratio, policy: str, measure: str = "completion_mean_s") -> float:
        """Over the orders."""
        values = [float(getattr(summary, measure)) for summary in self.of(load, ratio, policy)]
        return sum(values) / len(values)

    def worst(self, load: Load, ratio: Ratio, policy: str, measure: str) -> float:
        return max(float(getattr(summary, measure)) for summary in self.of(load, ratio, policy))

    def best_of(self, load: Load, ratio: Ratio, policies: Sequence[str]) -> str:
        """The policy with the least mean completion."""
        return min(policies, key=lambda policy: self.mean(load, ratio, policy))

    def endless_s(self, load: Load) -> float:
        return self.mean(load, Pool.ENDLESS, HONEST)

    def _missing(
        self, loads: Sequence[Load], ratios: Sequence[Ratio], policies: Sequence[str]
    ) -> Iterator[tuple[Cell, tuple[Load, Ratio, str]]]:
        for load in loads:
            for ratio in ratios:
                for policy in policies:
                    if (load, ratio, policy) not in self._summaries:
                        for order in self._orders:
                            cell = Cell(load.source(self._folder), policy, fleet(), ratio, order)
                            yield cell, (load, ratio, policy)


def _progress(cells: int) -> Callable[[Outcome], None]:
    done = 0

    def say(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        if outcome.failed or done % 20 == 0:
            print(f"#   {done} of {cells} {outcome.failed}", file=sys.stderr, flush=True)

    return say


CLOSED = (
    Load("swe-light", 128, 64),
    Load("swe-heavy", 72, 48),
    Load("remote-tools", 128, 64),
)
OPEN = (
    Load("swe-light", 128, 64, arrivals_per_hour=320),
    Load("swe-heavy", 72, 48, arrivals_per_hour=120),
    Load("remote-tools", 128, 64, arrivals_per_hour=560),
)
GROUPS = (Load("rl-groups", 128, 64),)
COMPARED = (OURS, HONEST, *CODE, PAPER)
