"""The way to a file of a workspace, from outside, while processes of the sandbox may be changing it.

Every step goes through a directory descriptor and follows no link by itself: a link is read and its
target walked from where it stands, so nothing that the sandbox renames or links in the meantime can
lead out of the workspace.  A path that leads to no file is a PathError, a disk that refuses a SandboxError;
both name the path.
"""

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress

from sostenuto.errors import PathError, SandboxError

INSIDE = "/workspace"
"""The workspace's path as a sandbox with its own mounts sees it."""
_STEP = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OF_PATHS = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.ENAMETOOLONG, errno.ENXIO}
)
"""Of a system call that was given a path which leads to no file."""
_LINKS = 16
_DEPTH = 200


class Walk:
    """Descriptors from the workspace down to the present folder; `..` goes back up this list."""

    def __init__(self, workspace: int, path: str, *, make: bool, uid: int | None, links: bool) -> None:
        self._fds = [os.dup(workspace)]
        self._todo = parts(path, path)
        self._path = path
        self._links = 0
        self._make = make
        self._uid = uid
        self._may_follow = links

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

    def to_end(self) -> None:
        """Walk into the last part, too, which is a folder."""
        while self._todo:
            self._step(self._todo.pop(0))

    def to_any(self) -> str | None:
        """Walk to the end: the name of what is no folder there, or None when the walk now stands in one."""
        while self._todo:
            part = self._todo.pop(0)
            if not self._todo and part != ".." and not self._is_link(part) and not self._is_folder(part):
                return part
            self._step(part)
        return None

    def _step(self, part: str) -> None:
        if part == "..":
            self._up()
        else:
            self._down(part)

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
                give(part, self._uid, self.here)
        self._fds.append(os.open(part, _STEP, dir_fd=self.here))

    def _is_link(self, part: str) -> bool:
        return stat.S_ISLNK(self._mode(part))

    def _is_folder(self, part: str) -> bool:
        return stat.S_ISDIR(self._mode(part))

    def _mode(self, part: str) -> int:
        """0 when there is nothing of that name."""
        try:
            return os.stat(part, dir_fd=self.here, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return 0

    def _follow(self, part: str) -> None:
        if not self._may_follow:
            raise PathError(f"{self._path!r} leads through a link")
        self._links += 1
        if self._links > _LINKS:
            raise PathError(f"{self._path!r} has more than {_LINKS} links")
        target = self._target(part)
        if target.startswith("/"):
            while len(self._fds) > 1:
                self._up()
        self._todo = parts(target, self._path) + self._todo

    def _target(self, part: str) -> str:
        try:
            return os.readlink(part, dir_fd=self.here)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            raise PathError(f"{self._path!r}: changed while it was opened") from exc


def parts(path: str, named: str) -> list[str]:
    if "\0" in path:
        raise PathError(f"{named!r} has a zero byte")
    if path.startswith("/"):
        inside = path == INSIDE or path.startswith(f"{INSIDE}/")
        if not inside:
            raise PathError(f"{named!r} leaves the workspace")
        path = path[len(INSIDE) :]
    return [part for part in path.split("/") if part not in {"", "."}]


def give(name: str | int, uid: int | None, dir_fd: int | None = None) -> None:
    """Make `uid` the owner of an entry or an open file; None: it is already."""
    if uid is not None:
        os.chown(
            name, uid, uid, dir_fd=dir_fd, **({} if isinstance(name, int) else {"follow_symlinks": False})
        )


@contextmanager
def walking(
    workspace: int, path: str, *, make: bool = False, uid: int | None = None, links: bool = True
) -> Generator[Walk]:
    """A walk to `path`.  `make`: missing folders are made, for `uid`; `links`: they are followed inside."""
    walk = Walk(workspace, path, make=make, uid=uid, links=links)
    try:
        yield walk
    except OSError as exc:
        # ELOOP and ENOTDIR: the sandbox put a link where a folder had just been
        reason = "changed while it was opened" if exc.errno == errno.ELOOP else exc.strerror
        kind = PathError if exc.errno in _OF_PATHS else SandboxError
        raise kind(f"{path!r}: {reason}") from exc
    finally:
        walk.close()
