"""The files of one sender in a folder: written whole, never again, and gone when nobody needs them.

- Each is written under a temporary name and renamed; the newest few stay.  A file that somebody has mapped
  is unlinked and lives until the last reader lets go of it.
- Names carry the owner's pid and start time.  The owner keeps a lock on each file, so a starting sender
  can tell what a killed one has left (the lock is free) from what belongs to a living one, also when pids
  mean nothing across containers.
"""

import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sostenuto.errors import TrainerError

PREFIX = "sostenuto-weights-"
_PART = ".part"

Chunks = Iterable[tuple[int, NDArray[np.uint8]]]
"""What is to be written, by its first byte in the file."""


@dataclass(frozen=True, slots=True)
class _Published:
    path: Path
    descriptor: int


class Files:
    """What one sender has written.  `close` removes it."""

    def __init__(self) -> None:
        self._owner = f"{os.getpid()}-{_started_ticks()}"
        self._published: list[_Published] = []
        self._writing: Path | None = None

    def write(self, place: Path, name: str, chunks: Chunks, nbytes: int, *, sync: bool = False) -> Path:
        """A new file in `place`; with `sync` its bytes are on the disk before it has its name.

        TrainerError names the path and the bytes needed.
        """
        path = place / f"{PREFIX}{self._owner}-{name}"
        self._writing = path.with_name(path.name + _PART)
        self._published.append(_write(self._writing, path, chunks, nbytes, sync=sync))
        return path

    def retire(self, keep: int, *, needed: frozenset[Path] = frozenset()) -> None:
        """Remove all but the newest `keep` and those that are `needed`."""
        old = self._published[: max(len(self._published) - keep, 0)]
        for published in old:
            if published.path not in needed:
                self._published.remove(published)
                published.path.unlink(missing_ok=True)
                os.close(published.descriptor)

    def close(self) -> None:
        """Remove everything that was written, or is about to be.  Idempotent."""
        self.retire(0)
        if self._writing:
            self._writing.unlink(missing_ok=True)


def remove_orphans(place: Path) -> list[Path]:
    """Unlink files of senders that no longer live; leave alone what is locked or not ours."""
    removed: list[Path] = []
    for path in sorted(place.glob(f"{PREFIX}*")):
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


def free_bytes(place: Path) -> int:
    """What may still be written there; 0 where nothing can."""
    try:
        status = os.statvfs(place)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def _write(temporary: Path, path: Path, chunks: Chunks, nbytes: int, *, sync: bool) -> _Published:
    descriptor = -1
    try:
        descriptor = _create_locked(temporary)
        for offset, raw in chunks:
            _write_all(descriptor, raw, offset)
        # What is empty at the end lies inside of the file, too.
        os.truncate(descriptor, nbytes)
        if sync:
            os.fsync(descriptor)
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if descriptor >= 0:
            os.close(descriptor)
        raise TrainerError(
            f"publication: {path}, {nbytes} bytes needed: {error.strerror}; free some, or set "
            "learner.publication.directory to a folder that can be written and has room"
        ) from error
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


def _started_ticks() -> str:
    """When this process started, in clock ticks since boot; the name in /proc/self/stat may hold spaces."""
    return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
