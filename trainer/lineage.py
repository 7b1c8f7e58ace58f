"""Which versions the present weights descend from, and how far back, over the deaths of a run.

A run that is taken up again goes on from the weights of a checkpoint under a number beyond any that was used.
So numbers alone say neither whether a record is of these weights' past nor how old it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sostenuto.types import Version


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a run was taken up."""

    last: Version
    """Of the epoch before: what the checkpoint was of."""
    first: Version
    """What the same weights are called since."""
    twins: tuple[Version, ...] = ()
    """What they were called in epochs that left no checkpoint."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Of the present weights."""

    branches: tuple[Branch, ...] = ()
    """The last one is the newest."""

    def went_on(self, last: Version, first: Version, twins: Sequence[Version] = ()) -> "Lineage":
        """With one more branch."""
        return Lineage((*self.branches, Branch(last, first, tuple(twins))))

    def distance(self, version: Version, deployed: Version) -> int | None:
        """Versions from the one to the other; None when `deployed` does not descend from `version`."""
        steps = 0
        for branch in reversed(self.branches):
            if version >= branch.first:
                break
            if version in branch.twins:
                version = branch.last
            steps += deployed.number - branch.first.number
            deployed = branch.last
        if version.epoch != deployed.epoch or version > deployed:
            return None
        return steps + deployed.number - version.number

    def staleness(self, version: Version, deployed: Version) -> int:
        """The distance; by the numbers alone where there is none."""
        distance = self.distance(version, deployed)
        return deployed.number - version.number if distance is None else distance


NO_BRANCHES = Lineage()
