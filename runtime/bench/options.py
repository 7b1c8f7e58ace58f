"""Text from the command line, read into a sweep.  Every error names the option."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sostenuto.errors import ConfigError
from sostenuto.runtime.bench.cells import Pool, Ratio
from sostenuto.runtime.bench.grid import Sweep
from sostenuto.runtime.bench.source import Source
from sostenuto.runtime.simulation.profile import FleetProfile
from sostenuto.runtime.simulation.profiles import load_profile

PROGRAMS = 128
CONCURRENCY = 64


@dataclass(frozen=True, slots=True)
class Load:
    """How many programs there are, and when they come."""

    programs: int | None = None
    concurrency: int | None = None
    arrivals_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.arrivals_per_hour is not None:
            raise ConfigError(
                "concurrency, arrivals-per-hour: programs come when one is over or at times of their own;"
                " give one of the two"
            )
        given = {
            "programs": self.programs,
            "concurrency": self.concurrency,
            "arrivals-per-hour": self.arrivals_per_hour,
        }
        for name, value in given.items():
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}: {value:g} is too few; give a number above 0")

    def sources(self, workloads: str, trace: Path | None) -> tuple[Source, ...]:
        """One for each workload, or the trace."""
        if trace is not None:
            return (
                Source(
                    trace=trace,
                    programs=self.programs,
                    concurrency=self.concurrency,
                    arrivals_per_hour=self.arrivals_per_hour,
                ),
            )
        closed = CONCURRENCY if self.arrivals_per_hour is None else None
        return tuple(
            Source(
                name,
                programs=self.programs or PROGRAMS,
                concurrency=self.concurrency or closed,
                arrivals_per_hour=self.arrivals_per_hour,
            )
            for name in listed(workloads)
        )


def read_fleet(profile: str, engines: int) -> FleetProfile:
    if engines < 1:
        raise ConfigError(f"engines: {engines} are too few; give at least 1")
    return FleetProfile(engines=engines, engine=load_profile(profile))


def read_ratios(text: str) -> tuple[Ratio, ...]:
    return tuple(_ratio(word) for word in listed(text))


def read_seeds(count: int, first: int) -> tuple[int, ...]:
    if count < 1:
        raise ConfigError(f"seeds: {count} are too few; give at least 1")
    if first < 0:
        raise ConfigError(f"first-seed: {first} is below 0; give 0 or more")
    return tuple(range(first, first + count))


def listed(text: str) -> list[str]:
    """Words with commas between."""
    return [word.strip() for word in text.split(",") if word.strip()]


def told(sweep: Sweep) -> dict[str, str]:
    """The sweep for people: what reports say of how they came about."""
    source = sweep.sources[0]
    return {
        "workload": ", ".join(source.name for source in sweep.sources),
        **source.settings,
        "policies": ", ".join(sweep.policies),
        "engines": f"{sweep.fleet.engines} x {sweep.fleet.engine.name}",
        "working set / KV pool": ", ".join(_shown(sweep.ratios)),
        "seeds": ", ".join(map(str, sweep.seeds)),
    }


def _shown(ratios: Sequence[Ratio]) -> list[str]:
    return [ratio.value if isinstance(ratio, Pool) else f"{ratio:g}" for ratio in ratios]


def _ratio(word: str) -> Ratio:
    if word in list(Pool):
        return Pool(word)
    try:
        return float(word)
    except ValueError:
        known = ", ".join(pool.value for pool in Pool)
        raise ConfigError(f"ratio: {word!r} is none; give a number above 0, or one of: {known}") from None
