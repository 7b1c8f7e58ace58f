"""The sending side of a publication: what every transport does for the trainer."""

from pathlib import Path
from typing import Protocol

from sostenuto.trainer.publication.broadcast import BroadcastSender
from sostenuto.trainer.publication.disk import DiskSender
from sostenuto.trainer.publication.disk_delta import DiskDeltaSender
from sostenuto.trainer.publication.manifest import Manifest, Selector
from sostenuto.trainer.publication.point_to_point import PointToPointSender
from sostenuto.trainer.publication.shared_memory import SharedMemorySender
from sostenuto.trainer.publication.snapshot import Named
from sostenuto.trainer.ranks import ALONE, Ranks
from sostenuto.trainer.settings import PublicationSettings
from sostenuto.types import Version


class Sender(Protocol):
    """Publishes the versions of one trainer."""

    def publish(self, version: Version, tensors: Named, *, selector: Selector = "target") -> Manifest:
        """Make all tensors available as `version`, and describe them; they may change afterwards.

        Those of a drafter are named with `DRAFT_PREFIX`.  TrainerError says what it lacks.
        """
        ...

    def close(self) -> None:
        """Take back everything that was published.  Idempotent."""
        ...


def open_sender(settings: PublicationSettings, ranks: Ranks = ALONE) -> Sender:
    """`ranks`: those that publish together, where each sends its share.

    TrainerError for a place that cannot be used.
    """
    directory = None if settings.directory is None else Path(settings.directory)
    if settings.transport == "shared_memory":
        return SharedMemorySender(directory)
    if settings.transport == "point_to_point":
        return PointToPointSender(settings.host, deadline_s=settings.deadline_s, gather=ranks.gather)
    if settings.transport == "broadcast":
        return BroadcastSender(
            settings.host, gather_s=settings.gather_s, deadline_s=settings.deadline_s,
            expected=settings.engines.count,
        )  # fmt: skip
    assert directory is not None, "the settings require one"
    if settings.transport == "disk_delta":
        return DiskDeltaSender(directory, keep=settings.keep, deltas=settings.deltas)
    return DiskSender(directory, keep=settings.keep)
