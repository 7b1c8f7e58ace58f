"""Publication on one machine: each version is a file in memory, which engines serve from where it lies.

Shared memory where it has room, else a directory; which one is said in the log.
"""

import logging
import tempfile
from pathlib import Path

from sostenuto.errors import TrainerError
from sostenuto.trainer.publication.files import Files, free_bytes, remove_orphans
from sostenuto.trainer.publication.manifest import Manifest, Selector
from sostenuto.trainer.publication.snapshot import Named, Snapshot
from sostenuto.types import Version

SHARED_MEMORY = Path("/dev/shm")
_KEPT = 2
# Others live in shared memory too; the last bytes of it are not ours.
_MARGIN_BYTES = 32 << 20

_log = logging.getLogger(__name__)


class SharedMemorySender:
    """Publishes the versions of one trainer process to engines on the same machine."""

    def __init__(self, directory: Path | None = None, *, shared_memory: Path = SHARED_MEMORY) -> None:
        """`directory`: for what shared memory has no room for; None: the system's temporary folder."""
        self._directories = (shared_memory, directory or Path(tempfile.gettempdir()))
        self._files = Files()
        self._crowded_out = False
        """Whether it was said that shared memory has no room."""
        self.removed = [path for place in self._directories for path in remove_orphans(place)]

    def publish(self, version: Version, tensors: Named, *, selector: Selector = "target") -> Manifest:
        snapshot = Snapshot.of(tensors)
        self._files.retire(_KEPT - 1)
        place = self._place(snapshot.nbytes)
        path = self._files.write(place, str(version), snapshot.chunks, snapshot.nbytes)
        return Manifest(
            version=str(version),
            path=str(path),
            nbytes=snapshot.nbytes,
            tensors=snapshot.entries,
            selector=selector,
            resident=place == self._directories[0],
        )

    def close(self) -> None:
        self._files.close()

    def _place(self, nbytes: int) -> Path:
        shared, directory = self._directories
        if free_bytes(shared) >= nbytes + _MARGIN_BYTES:
            return shared
        free = free_bytes(directory)
        if not self._crowded_out:
            self._crowded_out = True
            _log.warning(
                "publication: %s has %d bytes free, %d are needed; using %s",
                shared, free_bytes(shared), nbytes + _MARGIN_BYTES, directory,
            )  # fmt: skip
        if free < nbytes:
            raise TrainerError(
                f"publication: {nbytes} bytes are needed; {shared} has {free_bytes(shared)} free, "
                f"{directory} {free}; free some or set learner.publication.directory to a larger disk"
            )
        return directory
