"""Where the programs of a sweep come from: a named workload or a trace, one order for each seed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from sostenuto.errors import ConfigError
from sostenuto.runtime.bench.alone import alone_s
from sostenuto.runtime.simulation.plan import Plan, Workload
from sostenuto.runtime.simulation.profile import FleetProfile
from sostenuto.runtime.simulation.traces.files import read_trace
from sostenuto.runtime.simulation.workloads import generate
from sostenuto.types import GroupId

_HOUR_S = 3600.0
_ROUNDS = 32
"""Until batch size and decode time agree."""


@dataclass(frozen=True, slots=True)
class Source:
    """A named workload draws other programs with each seed; a trace's programs come in another order."""

    workload: str = ""
    trace: Path | None = None
    programs: int | None = None
    """The first so many; None: all of a trace."""
    concurrency: int | None = None
    arrivals_per_hour: float | None = None
    """Neither: a trace's own arrivals."""

    def load(self, seed: int) -> Workload:
        return _load(self, seed)

    @property
    def name(self) -> str:
        return self.trace.stem if self.trace else self.workload

    @property
    def settings(self) -> dict[str, str]:
        """What tells this source from others of the same name."""
        named = {
            "programs": self.programs,
            "concurrency": self.concurrency,
            "arrivals/h": self.arrivals_per_hour,
        }
        return {name: f"{value:g}" for name, value in named.items() if value is not None}


@lru_cache(maxsize=32)
def _load(source: Source, seed: int) -> Workload:
    if source.trace is not None:
        return _of_trace(source, _read(source.trace), seed)
    if source.programs is None:
        raise ConfigError("programs: a named workload has no end; say how many to draw")
    return generate(
        source.workload,
        programs=source.programs,
        seed=seed,
        concurrency=source.concurrency,
        arrival_rate_s=None if source.arrivals_per_hour is None else source.arrivals_per_hour / _HOUR_S,
    )


def _of_trace(source: Source, trace: Workload, seed: int) -> Workload:
    """The first programs of the trace in another order; the n-th comes when the n-th came."""
    rng = np.random.default_rng(seed)
    plans = trace.programs[: source.programs]
    arrivals_s = sorted(plan.arrival_s for plan in plans)
    if source.arrivals_per_hour is not None:
        gaps_s = rng.exponential(_HOUR_S / source.arrivals_per_hour, len(plans))
        arrivals_s = np.cumsum(gaps_s).tolist()
    came = zip(_reordered(plans, rng), arrivals_s, strict=True)
    ordered = tuple(replace(plan, arrival_s=at_s) for plan, at_s in came)
    return replace(trace, programs=ordered, concurrency=source.concurrency)


def expected_concurrency(workload: Workload, fleet: FleetProfile) -> int:
    """Programs in the system at one time, if none had to wait: what an open workload's pool is sized by.

    Arrivals a second times the time alone, decoding as fast as in the batch that this leads to.
    """
    if workload.concurrency is not None:
        return workload.concurrency
    plans, engine = workload.programs, fleet.engine
    last_s = max(plan.arrival_s for plan in plans)
    if not last_s:
        return len(plans)
    rate_s = len(plans) / last_s
    tokens = sum(turn.output_tokens for plan in plans for turn in plan.turns) / len(plans)
    rest_s = sum(alone_s(workload, engine).values()) / len(plans) - tokens * engine.itl(1)
    decoding = 1.0
    for _ in range(_ROUNDS):
        decode_s = tokens * engine.itl(max(1, round(decoding)))
        decoding = min(rate_s * decode_s, len(plans)) / fleet.engines
    return min(len(plans), max(1, round(rate_s * (rest_s + tokens * engine.itl(max(1, round(decoding)))))))


@lru_cache(maxsize=4)
def _read(path: Path) -> Workload:
    return read_trace(path)


def _reordered(plans: Sequence[Plan], rng: np.random.Generator) -> list[Plan]:
    """Groups in another order, and the members of each."""
    groups: dict[GroupId, list[Plan]] = {}
    for plan in plans:
        groups.setdefault(plan.group, []).append(plan)
    members = list(groups.values())
    order: list[int] = rng.permutation(len(members)).tolist()
    return [members[g][m] for g in order for m in rng.permutation(len(members[g])).tolist()]
