"""Copies of folders, made through descriptors: templates, workspaces and layers of an overlay.

- No link is followed.  The source stands still, or is trusted to: what is swapped all the same ends in an
  error and never in a copy of something outside.
- Holes of a file stay holes, so that a copy takes no more of the disk than its source.
- Modes are kept without set-user-id and its like; owners become the one that is asked for.
"""

import errno
import os
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sostenuto.errors import SandboxError
from sostenuto.sandbox.removal import remove_entry

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK_BYTES = 1 << 24
_DEPTH = 400
"""Each level takes two descriptors and a frame of the interpreter."""
_OPAQUE = "user.overlay.opaque"
"""An attribute of an overlay's folder that hides what lies below it."""
_NO_RANGES = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


@dataclass(frozen=True, slots=True)
class Copying:
    """How one tree is copied."""

    uid: int | None = None
    """Owner of the copy; None: who copies."""
    template: bool = False
    """Refuse what is no file, folder or link, and let the owner read and write all of it."""
    layer: bool = False
    """The source is the upper layer of an overlay; it is laid over what the target holds."""
    stop: Callable[[], bool] = lambda: False
    """Asked before each entry; the copy ends early when it says so."""


def copy_tree(source: Path, target: Path, how: Copying) -> None:
    """Copy the content of one folder into another; raises SandboxError that names the source."""
    try:
        with _opened(source, _FOLDER) as below, _opened(target, _FOLDER) as into:
            _copy_into(below, into, how, 0)
    except OSError as exc:
        raise SandboxError(f"copy of {source}: {exc}") from exc
    except SandboxError as exc:
        raise SandboxError(f"copy of {source}: {exc}") from exc


def _copy_into(source: int, target: int, how: Copying, depth: int) -> None:
    if depth > _DEPTH:
        raise SandboxError(f"folders are nested deeper than {_DEPTH}")
    with os.scandir(source) as entries:
        for entry in entries:
            if how.stop():
                return
            facts = entry.stat(follow_symlinks=False)
            if how.layer:
                _make_way(entry.name, facts, source, target)
            _copy_entry(entry.name, facts, source, target, how, depth)


def _copy_entry(name: str, facts: os.stat_result, source: int, target: int, how: Copying, depth: int) -> None:
    if stat.S_ISDIR(facts.st_mode):
        _copy_folder(name, facts, source, target, how, depth)
    elif stat.S_ISREG(facts.st_mode):
        _copy_file(name, facts, source, target, how)
    elif stat.S_ISLNK(facts.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        _give(name, how.uid, target)
    elif how.template:
        raise SandboxError(f"{name}: only files, folders and links can be copied")
    elif stat.S_ISFIFO(facts.st_mode):
        os.mkfifo(name, facts.st_mode & 0o777, dir_fd=target)
        _give(name, how.uid, target)
    elif how.layer and is_whiteout(facts):
        os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=target)
    elif not stat.S_ISSOCK(facts.st_mode):  # a socket is nothing without its process
        raise SandboxError(f"{name}: devices are not copied")


def is_whiteout(facts: os.stat_result) -> bool:
    """Whether an entry of an upper layer says that the layers below have none of this name."""
    return stat.S_ISCHR(facts.st_mode) and facts.st_rdev == 0


def _make_way(name: str, facts: os.stat_result, source: int, target: int) -> None:
    """Remove what a layer replaces; a folder that is not opaque is merged with the one below it."""
    try:
        present = os.stat(name, dir_fd=target, follow_symlinks=False)
    except FileNotFoundError:
        return
    both_folders = stat.S_ISDIR(facts.st_mode) and stat.S_ISDIR(present.st_mode)
    if both_folders:
        with _opened(name, _FOLDER, source) as fd:
            if not _is_opaque(fd):
                return
    remove_entry(target, name)


def _copy_folder(
    name: str, facts: os.stat_result, source: int, target: int, how: Copying, depth: int
) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=target)
    except FileExistsError:
        os.chmod(name, 0o700, dir_fd=target)
    with _opened(name, _FOLDER, source) as below, _opened(name, _FOLDER, target) as into:
        _copy_into(below, into, how, depth + 1)
        if how.layer and _is_opaque(below):
            os.setxattr(into, _OPAQUE, b"y")
        _give(into, how.uid)
        os.fchmod(into, facts.st_mode & 0o777 | (0o700 if how.template else 0))


def _is_opaque(fd: int) -> bool:
    try:
        return os.getxattr(fd, _OPAQUE) == b"y"
    except OSError as exc:
        if exc.errno in {errno.ENODATA, errno.EOPNOTSUPP}:
            return False
        raise


def _copy_file(name: str, facts: os.stat_result, source: int, target: int, how: Copying) -> None:
    fd = os.open(name, _CREATE, 0o600, dir_fd=target)
    try:
        with _opened(name, _READ, source) as below:
            if not stat.S_ISREG(os.fstat(below).st_mode):
                raise SandboxError(f"{name} changed while it was copied")
            copy_data(below, fd)
        _give(fd, how.uid)
        os.fchmod(fd, facts.st_mode & 0o777 | (0o600 if how.template else 0))
    finally:
        os.close(fd)


def copy_data(source: int, target: int) -> None:
    """The content of one open file into an empty one, with its holes."""
    size = os.fstat(source).st_size
    for start, end in _extents(source, size):
        offset = start
        while offset < end:
            count = _copy_range(source, target, min(end - offset, _CHUNK_BYTES), offset)
            if count == 0:
                break
            offset += count
    os.ftruncate(target, size)


def _extents(fd: int, size: int) -> Generator[tuple[int, int]]:
    """Where the file has data, in order."""
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno != errno.ENXIO:  # only holes follow
                raise
            return
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end


def _copy_range(source: int, target: int, count: int, offset: int) -> int:
    try:
        return os.copy_file_range(source, target, count, offset, offset)
    except OSError as exc:
        if exc.errno not in _NO_RANGES:
            raise
    os.lseek(target, offset, os.SEEK_SET)
    return os.sendfile(target, source, offset, count)


@contextmanager
def _opened(name: str | Path, flags: int, folder: int | None = None) -> Generator[int]:
    """A descriptor of a file or folder that is ours, whatever its mode, which is the same afterwards."""
    try:
        fd = os.open(name, flags, dir_fd=folder)
    except PermissionError:
        with _unlocked(name, folder) as itself:
            fd = os.open(itself, flags & ~os.O_NOFOLLOW)
            try:
                yield fd
            finally:
                os.close(fd)
        return
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _unlocked(name: str | Path, folder: int | None) -> Generator[str]:
    """Its path in /proc, by which the very thing that was found is reached and no other, with a mode of 7."""
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    itself = f"/proc/self/fd/{handle}"
    try:
        mode = stat.S_IMODE(os.fstat(handle).st_mode)
        Path(itself).chmod(mode | 0o700)
        try:
            yield itself
        finally:
            Path(itself).chmod(mode)
    finally:
        os.close(handle)


def _give(name: str | int, uid: int | None, folder: int | None = None) -> None:
    if uid is None:
        return
    if isinstance(name, int):
        os.chown(name, uid, uid)
    else:
        os.chown(name, uid, uid, dir_fd=folder, follow_symlinks=False)
