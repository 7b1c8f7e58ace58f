"""Single files of a workspace, read and written from outside; see `walk` for what keeps that safe."""

import os
import secrets
import stat
from contextlib import suppress

from sostenuto.errors import PathError
from sostenuto.sandbox.walk import give, walking

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def read_file(workspace: int, path: str, max_bytes: int) -> bytes:
    """Content of a regular file; refuses one that is larger than `max_bytes`."""
    with walking(workspace, path) as walk:
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
    with walking(workspace, path, make=True, uid=uid) as walk:
        name = walk.to_last(follow=False)
        draft = f".{secrets.token_hex(8)}"
        fd = os.open(draft, _CREATE, 0o600, dir_fd=walk.here)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
                os.fchmod(fd, _mode(name, walk.here))
                give(fd, uid)
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
