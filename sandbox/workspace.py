"""Files of a workspace, reached from outside while its processes may be changing it.

Every step goes through a directory descriptor and follows no link by itself: a link is read and its
target walked from where it stands, so nothing that the sandbox renames or links in the meantime can
lead out of the workspace.  A path that leads to no file is a PathError, a disk that refuses a SandboxError;
both name the path.
"""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from sostenuto.errors import PathError, SandboxError

INSIDE = "/workspace"
"""The workspace's path as a sandbox with its own mounts sees it."""
_STEP = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OF_PATHS = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.ENAMETOOLONG, errno.ENXIO}
)
"""Of a system call that was given a path which leads to no file."""
_LINKS = 16
_DEPTH = 200


class _Walk:
    """Descriptors from the workspace down to the present folder; `..` goes back up this list."""

    def __init__(self, workspace: int, path: str, *, make: bool, uid: int | None) -> None:
        self._fds = [os.dup(workspace)]
        self._todo = _parts(path, path)
        self._path = path
        self._links = 0
        self._make = make
        self._uid = uid

    @property
    def here(self) -> int:
        return self._fds[-1]

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def to_last(self, *, follow: bool) -> str:
        """Walk to the folder of the last part and return that part; `follow`: also when it is a link."""
        while self._todo:
            part = self._todo.pop(0)
            if part == "..":
                self._up()
            elif not self._todo and not (follow and self._is_link(part)):
                return part
            else:
                self._down(part)
        raise PathError(f"{self._path!r} is a folder, not a file")

    def _up(self) -> None:
        if len(self._fds) == 1:
            raise PathError(f"{self._path!r} leaves the workspace")
        os.close(self._fds.pop())

    def _down(self, part: str) -> None:
        if len(self._fds) > _DEPTH:
            raise PathError(f"{self._path!r} is nested deeper than {_DEPTH} folders")
        if self._is_link(part):
            self._follow(part)
            return
        if self._make:
            with suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=self.here)
                _give(part, self._uid, self.here)
        self._fds.append(os.open(part, _STEP, dir_fd=self.here))

    def _is_link(self, part: str) -> bool:
        try:
            return stat.S_ISLNK(os.stat(part, dir_fd=self.here, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False

    def _follow(self, part: str) -> None:
        self._links += 1
        if self._links > _LINKS:
            raise PathError(f"{self._path!r} has more than {_LINKS} links")
        target = os.readlink(part, dir_fd=self.here)
        if target.startswith("/"):
            while len(self._fds) > 1:
                self._up()
        self._todo = _parts(target, self._path) + self._todo


def _parts(path: str, named: str) -> list[str]:
    if "\0" in path:
        raise PathError(f"{named!r} has a zero byte")
    if path.startswith("/"):
        inside = path == INSIDE or path.startswith(f"{INSIDE}/")
        if not inside:
            raise PathError(f"{named!r} leaves the workspace")
        path = path[len(INSIDE) :]
    return [part for part in path.split("/") if part not in {"", "."}]


def _give(name: str | int, uid: int | None, dir_fd: int | None = None) -> None:
    if uid is not None:
        os.chown(
            name, uid, uid, dir_fd=dir_fd, **({} if isinstance(name, int) else {"follow_symlinks": False})
        )


@contextmanager
def _walking(workspace: int, path: str, *, make: bool = False, uid: int | None = None) -> Generator[_Walk]:
    walk = _Walk(workspace, path, make=make, uid=uid)
    try:
        yield walk
    except OSError as exc:
        # ELOOP and ENOTDIR: the sandbox put a link where a folder had just been
        reason = "changed while it was opened" if exc.errno == errno.ELOOP else exc.strerror
        kind = PathError if exc.errno in _OF_PATHS else SandboxError
        raise kind(f"{path!r}: {reason}") from exc
    finally:
        walk.close()


def read_file(workspace: int, path: str, max_bytes: int) -> bytes:
    """Content of a regular file; refuses one that is larger than `max_bytes`."""
    with _walking(workspace, path) as walk:
        name = walk.to_last(follow=True)
        fd = os.open(name, _READ, dir_fd=walk.here)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise PathError(f"{path!r} is not a regular file")
            content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise PathError(f"{path!r} is larger than {max_bytes} bytes; read a part of it in the shell")
    return content


def write_file(workspace: int, path: str, content: bytes, *, uid: int | None = None) -> None:
    """Create or replace a file in one step, folders included; a link at `path` is itself replaced."""
    with _walking(workspace, path, make=True, uid=uid) as walk:
        name = walk.to_last(follow=False)
        draft = f".{secrets.token_hex(8)}"
        fd = os.open(draft, _CREATE, 0o600, dir_fd=walk.here)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
                os.fchmod(fd, _mode(name, walk.here))
                _give(fd, uid)
            os.rename(draft, name, src_dir_fd=walk.here, dst_dir_fd=walk.here)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=walk.here)
            raise


def _mode(name: str, dir_fd: int) -> int:
    """Of the file that is replaced, so that a program stays executable."""
    try:
        present = os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0o644
    return present & 0o777 if stat.S_ISREG(present) else 0o644


def copy_tree(source: Path, target: int, *, uid: int | None, stop: Callable[[], bool]) -> None:
    """Copy a trusted folder into the folder open as `target`; links stay links, modes are kept."""
    try:
        _copy_into(source, target, uid, stop)
    except OSError as exc:
        raise SandboxError(f"template {source}: {exc}") from exc


def _copy_into(source: Path, target: int, uid: int | None, stop: Callable[[], bool]) -> None:
    with os.scandir(source) as entries:
        for entry in entries:
            if stop():
                return
            if entry.is_symlink():
                os.symlink(Path(entry.path).readlink(), entry.name, dir_fd=target)
                _give(entry.name, uid, target)
            elif entry.is_dir():
                _copy_folder(entry, target, uid, stop)
            elif entry.is_file():
                _copy_file(entry, target, uid)
            else:
                raise SandboxError(f"template {entry.path}: only files, folders and links can be copied")


def _copy_folder(entry: "os.DirEntry[str]", target: int, uid: int | None, stop: Callable[[], bool]) -> None:
    os.mkdir(entry.name, 0o700, dir_fd=target)
    fd = os.open(entry.name, _STEP, dir_fd=target)
    try:
        _copy_into(Path(entry.path), fd, uid, stop)
        _give(fd, uid)
        os.fchmod(fd, entry.stat().st_mode & 0o777 | 0o700)
    finally:
        os.close(fd)


def _copy_file(entry: "os.DirEntry[str]", target: int, uid: int | None) -> None:
    fd = os.open(entry.name, _CREATE, 0o600, dir_fd=target)
    try:
        with Path(entry.path).open("rb", buffering=0) as file:
            copied = 0
            while count := os.sendfile(fd, file.fileno(), copied, 1 << 24):
                copied += count
        _give(fd, uid)
        os.fchmod(fd, entry.stat().st_mode & 0o777 | 0o600)
    finally:
        os.close(fd)
