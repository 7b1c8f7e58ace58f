"""The sending side of a publication: every tensor of a version in one file that the engines map.

- Each version is a new file, written under a temporary name and renamed; the one before it stays until
  the next publication.  A file that somebody has mapped is never written again: it is unlinked, and
  lives until the last reader lets go of it.
- Shared memory where it has room, else a directory; which one is said in the log.
- Names carry the owner's pid and start time.  The owner keeps a lock on each file, so a starting sender
  can tell what a killed one has left (the lock is free) from what belongs to a living one, also when pids
  mean nothing across containers.
"""

import fcntl
import logging
import os
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sostenuto.errors import TrainerError
from sostenuto.trainer.publication.manifest import Manifest, Selector, TensorEntry
from sostenuto.trainer.tensors import as_bytes
from sostenuto.types import Version

SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT_BYTES = 64
_PREFIX = "sostenuto-weights-"
_PART = ".part"
_KEPT = 2
# Others live in shared memory too; the last bytes of it are not ours.
_MARGIN_BYTES = 32 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Published:
    path: Path
    descriptor: int


class Sender:
    """Publishes the versions of one trainer process.  `close` removes what it has written."""

    def __init__(self, directory: Path | None = None, *, shared_memory: Path = SHARED_MEMORY) -> None:
        self._directories = (shared_memory, directory or Path(tempfile.gettempdir()))
        self._owner = f"{os.getpid()}-{_started_ticks()}"
        self._published: list[_Published] = []
        self._writing: Path | None = None
        self._crowded_out = False
        """Whether it was said that shared memory has no room."""
        self.removed = [path for place in self._directories for path in remove_orphans(place)]

    def publish(
        self, version: Version, tensors: Iterable[tuple[str, Tensor]], *, selector: Selector = "target"
    ) -> Manifest:
        """Write all tensors and describe them; those of a drafter are named with `DRAFT_PREFIX`.

        TrainerError names the path and the bytes needed.
        """
        arrays = [(name, tensor, as_bytes(tensor)) for name, tensor in tensors]
        entries: list[TensorEntry] = []
        end = 0
        for name, tensor, raw in arrays:
            offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            end = offset + raw.nbytes
            entries.append(
                TensorEntry(
                    name=name,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                    offset=offset,
                    nbytes=raw.nbytes,
                    checksum=zlib.crc32(raw.data),
                )
            )
        self._retire(_KEPT - 1)
        place = self._place(end)
        path = place / f"{_PREFIX}{self._owner}-{version}"
        chunks = [(entry.offset, raw) for entry, (_, _, raw) in zip(entries, arrays, strict=True)]
        self._writing = path.with_name(path.name + _PART)
        self._published.append(_write(self._writing, path, chunks, end))
        return Manifest(
            version=str(version), path=str(path), nbytes=end, tensors=tuple(entries), selector=selector
        )

    def close(self) -> None:
        """Unlink everything this sender has published, or is about to.  Idempotent."""
        self._retire(0)
        if self._writing:
            self._writing.unlink(missing_ok=True)

    def _retire(self, keep: int) -> None:
        while len(self._published) > keep:
            oldest = self._published.pop(0)
            oldest.path.unlink(missing_ok=True)
            os.close(oldest.descriptor)

    def _place(self, nbytes: int) -> Path:
        shared, directory = self._directories
        if _free_bytes(shared) >= nbytes + _MARGIN_BYTES:
            return shared
        free = _free_bytes(directory)
        if not self._crowded_out:
            self._crowded_out = True
            _log.warning(
                "publication: %s has %d bytes free, %d are needed; using %s",
                shared, _free_bytes(shared), nbytes + _MARGIN_BYTES, directory,
            )  # fmt: skip
        if free < nbytes:
            raise TrainerError(
                f"publication: {nbytes} bytes are needed; {shared} has {_free_bytes(shared)} free, "
                f"{directory} {free}; free some or set publication_directory to a larger disk"
            )
        return directory


def unique_tensors(state: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The tensors of a state dict; parameters that share storage appear once, under their first name."""
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    unique: list[tuple[str, Tensor]] = []
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        unique.append((name, tensor))
    return unique


def remove_orphans(place: Path) -> list[Path]:
    """Unlink files of senders that no longer live; leave alone what is locked or not ours."""
    removed: list[Path] = []
    for path in sorted(place.glob(f"{_PREFIX}*")):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, PermissionError):
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            path.unlink(missing_ok=True)
            removed.append(path)
        finally:
            os.close(descriptor)
    return removed


def _write(
    temporary: Path, path: Path, chunks: list[tuple[int, NDArray[np.uint8]]], nbytes: int
) -> _Published:
    descriptor = -1
    try:
        descriptor = _create_locked(temporary)
        if nbytes:
            os.posix_fallocate(descriptor, 0, nbytes)
        for offset, raw in chunks:
            _write_all(descriptor, raw, offset)
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if descriptor >= 0:
            os.close(descriptor)
        raise TrainerError(f"publication: {path}, {nbytes} bytes needed: {error.strerror}") from error
    return _Published(path, descriptor)


def _create_locked(path: Path) -> int:
    """A new file that carries our lock.  A sender that starts meanwhile may take it for an orphan once."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _write_all(descriptor: int, raw: NDArray[np.uint8], offset: int) -> None:
    view = raw.data
    while len(view):
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _free_bytes(place: Path) -> int:
    try:
        status = os.statvfs(place)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def _started_ticks() -> str:
    """When this process started, in clock ticks since boot; the name in /proc/self/stat may hold spaces."""
    return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
