"""Publication through a folder that trainer and engines share: each version is one safetensors file.

The file is on its disk, whole and under its name, before anybody hears of it.  It says of itself which
version it is and what checksum each tensor has.
"""

import json
from pathlib import Path

import numpy as np

from sostenuto.errors import TrainerError
from sostenuto.trainer.publication.files import Files, free_bytes, remove_orphans
from sostenuto.trainer.publication.formats import DTYPES
from sostenuto.trainer.publication.manifest import Manifest, Selector, TensorEntry
from sostenuto.trainer.publication.snapshot import Named, Snapshot
from sostenuto.types import Version

_ALIGNMENT_BYTES = 8


class DiskSender:
    """Publishes the versions of one trainer process into `directory`; the newest `keep` stay there."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self._directory = usable(directory)
        self._keep = keep
        self._files = Files()
        self.removed = remove_orphans(directory)

    def publish(self, version: Version, tensors: Named, *, selector: Selector = "target") -> Manifest:
        self._files.retire(self._keep - 1)
        snapshot = Snapshot.of(tensors, alignment=1)
        return write_full(self._files, self._directory, version, snapshot, selector)

    def close(self) -> None:
        self._files.close()


def write_full(
    files: Files, directory: Path, version: Version, snapshot: Snapshot, selector: Selector
) -> Manifest:
    """`snapshot`: without gaps, which the format does not allow.  TrainerError when there is no room."""
    head = np.frombuffer(_header(version, snapshot.entries), dtype=np.uint8)
    behind = snapshot.behind(head.nbytes)
    require_room(directory, behind.nbytes)
    chunks = ((0, head), *behind.chunks)
    path = files.write(directory, f"{version}.safetensors", chunks, behind.nbytes, sync=True)
    return Manifest(
        version=str(version),
        path=str(path),
        nbytes=behind.nbytes,
        tensors=behind.entries,
        selector=selector,
        transport="disk",
    )


def usable(directory: Path) -> Path:
    """The folder, which is there afterwards; TrainerError when it cannot be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainerError(
            f"learner.publication.directory: {directory}: {error.strerror}; name a folder that trainer "
            "and engines share and the trainer can write"
        ) from error
    return directory


def require_room(directory: Path, nbytes: int) -> None:
    """TrainerError unless there are so many bytes left."""
    if (free := free_bytes(directory)) < nbytes:
        raise TrainerError(
            f"publication: {nbytes} bytes are needed, {directory} has {free} free; free some, or set "
            "learner.publication.directory to a larger disk"
        )


def _header(version: Version, entries: tuple[TensorEntry, ...]) -> bytes:
    """What a safetensors file begins with."""
    checksums = {entry.name: entry.checksum for entry in entries}
    about: dict[str, object] = {
        "__metadata__": {"format": "pt", "version": str(version), "crc32": json.dumps(checksums)}
    }
    for entry in entries:
        about[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.offset, entry.offset + entry.nbytes],
        }
    encoded = json.dumps(about).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT_BYTES)
    return len(encoded).to_bytes(8, "little") + encoded
