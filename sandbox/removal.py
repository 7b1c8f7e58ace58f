"""Removing what an untrusted process has filled: whatever its modes, its depth and its names."""

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: Path) -> None:
    """Remove a folder that an untrusted process has filled; what is already gone is fine.

    Works with modes of 000 and with folders nested deeper than a path can be long: each level is
    moved up to the top before it is entered.
    """
    try:
        _open_modes(path)
        top = os.open(path, _DIRECTORY)
    except FileNotFoundError:
        return
    try:
        while names := os.listdir(top):  # noqa: PTH208 - of a descriptor
            for name in names:
                _flatten(top, name)
    finally:
        os.close(top)
    with suppress(FileNotFoundError):
        path.rmdir()


def remove_entry(folder: int, name: str) -> None:
    """Remove one entry of the open `folder`, which nobody else changes, with all that is below it."""
    top = f".{secrets.token_hex(8)}"
    os.mkdir(top, 0o700, dir_fd=folder)
    fd = os.open(top, _DIRECTORY, dir_fd=folder)
    try:
        with suppress(FileNotFoundError):
            _open_modes(name, folder)  # only who may write a folder may move it into another
            os.rename(name, name, src_dir_fd=folder, dst_dir_fd=fd)
        while names := os.listdir(fd):  # noqa: PTH208 - of a descriptor
            for inner in names:
                _flatten(fd, inner)
    finally:
        os.close(fd)
    os.rmdir(top, dir_fd=folder)


def _open_modes(path: Path | str, dir_fd: int | None = None) -> None:
    mode = os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode
    if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
        os.chmod(path, 0o700, dir_fd=dir_fd)


def _flatten(top: int, name: str) -> None:
    """Remove one entry of `top`; its own folders end up in `top` under new names."""
    try:
        os.unlink(name, dir_fd=top)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        with suppress(FileNotFoundError):
            _empty_into(top, name)
            os.rmdir(name, dir_fd=top)


def _empty_into(top: int, name: str) -> None:
    _open_modes(name, top)
    fd = os.open(name, _DIRECTORY, dir_fd=top)
    try:
        for entry in os.scandir(fd):
            if entry.is_dir(follow_symlinks=False):
                _open_modes(entry.name, fd)
                os.rename(entry.name, f"_{secrets.token_hex(8)}", src_dir_fd=fd, dst_dir_fd=top)
            else:
                os.unlink(entry.name, dir_fd=fd)
    finally:
        os.close(fd)
