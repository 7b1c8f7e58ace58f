"""What one step takes."""

from dataclasses import dataclass

from sostenuto.records import Trajectory
from sostenuto.trainer.groups import ReadyGroup
from sostenuto.trainer.lineage import Lineage
from sostenuto.types import Version


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step takes."""

    groups: tuple[ReadyGroup, ...]
    skipped: tuple[ReadyGroup, ...]
    """Equal rewards, nothing to learn."""
    lineage: Lineage

    def staleness(self, deployed: Version) -> list[int]:
        """Of each member, when `deployed` is."""
        oldest = [member.oldest_version or deployed for member in self.members]
        return [self.lineage.staleness(version, deployed) for version in oldest]

    @property
    def members(self) -> list[Trajectory]:
        """Of all groups, the skipped ones included."""
        return [member for group in (*self.groups, *self.skipped) for member in group.members]
