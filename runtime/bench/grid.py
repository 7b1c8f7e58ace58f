"""What a sweep runs: every policy at every ratio with every seed, and the references beside them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sostenuto.errors import ConfigError
from sostenuto.runtime.bench.cells import CLAIRVOYANT, Cell, Pool, Ratio, check_that_programs_fit, policy_of
from sostenuto.runtime.bench.comparison import ENDLESS_POOL, REFERENCE, SWEPT
from sostenuto.runtime.bench.source import Source, expected_concurrency
from sostenuto.runtime.simulation.profile import FleetProfile

CAP = "cap"
"""Without a number: tried at several values, of which the best is reported."""
_CAPS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1)
"""Of the programs in the system at one time."""
_ON_AN_ENDLESS_POOL = "request-sticky"
"""The policy of that reference: without pressure there is nothing to decide but where."""


@dataclass(frozen=True, slots=True)
class Sweep:
    sources: tuple[Source, ...]
    policies: tuple[str, ...]
    fleet: FleetProfile
    ratios: tuple[Ratio, ...]
    seeds: tuple[int, ...]
    references: bool = True
    """Whether the clairvoyant policy and the endless pool are run, too."""

    def cells(self) -> list[Cell]:
        """ConfigError, before anything runs, when one of them could not."""
        self._check()
        cells = [cell for source in self.sources for cell in self._of_source(source)]
        tried = {(cell.source, cell.ratio, cell.seed): cell for cell in cells}
        for cell in tried.values():
            check_that_programs_fit(cell)
        return cells

    def _check(self) -> None:
        lists = {"workload": self.sources, "policies": self.policies, "ratio": self.ratios}
        for name, values in lists.items():
            if not values:
                raise ConfigError(f"{name}: none is given; give at least one")
        if not self.seeds:
            raise ConfigError("seeds: there is none; give at least 1")
        for ratio in self.ratios:
            if not isinstance(ratio, Pool) and not 0 < ratio < float("inf"):
                raise ConfigError(
                    f"ratio: {ratio:g} is no ratio of working set and pool; give a number above 0"
                )

    def _of_source(self, source: Source) -> Iterator[Cell]:
        policies = [noted for policy in dict.fromkeys(self.policies) for noted in self._noted(policy, source)]
        if self.references and CLAIRVOYANT not in self.policies:
            policies += self._noted(CLAIRVOYANT, source)
        for seed in self.seeds:
            first = seed == self.seeds[0]
            for ratio in dict.fromkeys(self.ratios):
                for policy, notes in policies:
                    yield Cell(source, policy, self.fleet, ratio, seed, notes, timeline=first)
            if self.references:
                notes = {REFERENCE: ENDLESS_POOL}
                policy = _ON_AN_ENDLESS_POOL
                yield Cell(source, policy, self.fleet, Pool.ENDLESS, seed, notes, timeline=first)

    def _noted(self, policy: str, source: Source) -> list[tuple[str, dict[str, str]]]:
        """The policies to run for a name, with what their settings note."""
        if policy == CLAIRVOYANT:
            return [(policy, {REFERENCE: CLAIRVOYANT})]
        workload = source.load(self.seeds[0])
        if policy != CAP:
            policy_of(policy, workload)
            return [(policy, {})]
        live = min(expected_concurrency(workload, self.fleet), len(workload.programs))
        return [(f"{CAP}:{cap}", {SWEPT: CAP}) for cap in _caps(live)]


def _caps(live: int) -> Sequence[int]:
    return sorted({max(1, round(share * live)) for share in _CAPS})
