"""Where checkpoints live: one folder per version under a root, complete or not there.  No torch."""

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from sostenuto.errors import ConfigError
from sostenuto.trainer import checksums
from sostenuto.types import Version

JOB_NOTES = "job.json"
"""In a checkpoint: what its job remembers beside the weights."""
_PREFIX = "version-"
_PART = ".part-"


def checkpoint_path(root: Path, version: Version) -> Path:
    return root / f"{_PREFIX}{version}"


def checkpoints(root: Path) -> list[tuple[Version, Path]]:
    """The complete ones, oldest first."""
    found: list[tuple[Version, Path]] = []
    for path in root.glob(f"{_PREFIX}*"):
        try:
            found.append((Version.parse(path.name.removeprefix(_PREFIX)), path))
        except ValueError:
            continue
    return sorted(found)


def check_checkpoint(path: Path) -> None:
    """ConfigError for one that is not as it was written; it names the newest other one that is."""
    if fault := checksums.fault_of(path):
        others = [other for _, other in reversed(checkpoints(path.parent)) if other != path]
        good = next((other for other in others if not checksums.fault_of(other)), None)
        remedy = f"go on from {good}" if good else "there is no other one: restore the file, or begin anew"
        raise ConfigError(f"checkpoint {path}: {fault}; {remedy}")


@contextmanager
def held(root: Path) -> Generator[Path]:
    """Make the folder if need be, and keep every other job out of it; ConfigError when one is there."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / ".lock").open("a+")
    except OSError as error:
        raise ConfigError(f"checkpoints {root}: {error.strerror}; choose another run directory") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"checkpoints {root}: another job writes there; give the jobs different names"
            ) from None
        yield root


def retain(root: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep`, and what broken saves have left; return what was removed."""
    removed = [path for _, path in checkpoints(root)[:-keep]]
    removed += list(root.glob(f"{_PART}*"))
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return removed


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A new folder that takes the place of `path` when the block succeeds, and vanishes otherwise."""
    part = path.with_name(f"{_PART}{os.getpid()}-{path.name}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        _sync(part)
        old = path.with_name(f"{_PART}old-{path.name}")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        part.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _sync_directory(path.parent)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_directory(folder)


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
