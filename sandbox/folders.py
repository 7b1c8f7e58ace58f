"""Where sandboxes live on disk, and who owns them.

    ROOT/PID.STARTTICKS.TOKEN/        one sandbox of the process PID that started at STARTTICKS
        owner.json                    name, backend, pid, start time, boot, for people and for `reclaim`
        workspace/                    what the sandbox sees and writes
        tmp/                          its private temporary folder, where the backend has no tmpfs

- The folder's name alone says who owns it, so there is no moment at which it belongs to nobody.
- A folder is removed once and for good: whoever still fills it notices and stops first.
- ROOT lies on a local disk and is used by processes of one pid namespace.
"""

import json
import os
import re
import secrets
import stat
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sostenuto.errors import PathError, SandboxError, Unsupported
from sostenuto.sandbox import processes
from sostenuto.sandbox.protocol import Blueprint
from sostenuto.sandbox.workspace import copy_tree, write_file

_NAME = re.compile(r"(\d+)\.(\d+)\.[0-9a-f]{16}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MARKER = "SOSTENUTO_SANDBOX"
"""Environment variable of every launcher: the folder it works for."""


@dataclass(frozen=True, slots=True)
class Owner:
    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def me(cls) -> "Owner":
        pid = os.getpid()
        return cls(pid, processes.start_ticks(pid) or 0, processes.boot_id())

    def is_alive(self) -> bool:
        return self.boot_id == processes.boot_id() and processes.is_alive(self.pid, self.start_ticks)


class Folder:
    """The folder of one sandbox.  `fill` and `remove` may run in different threads."""

    def __init__(self, path: Path, uid: int | None) -> None:
        self.path = path
        self.workspace = path / "workspace"
        self.tmp = path / "tmp"
        self.uid = uid
        """Who owns the files; None: the user that this process runs as."""
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def create(
        cls, root: Path, name: str, backend: str, *, uid: int | None = None, own_tmp: bool = False
    ) -> "Folder":
        """A new folder owned by this process; raises SandboxError when the disk refuses."""
        owner = Owner.me()
        path = root / f"{owner.pid}.{owner.start_ticks}.{secrets.token_hex(8)}"
        record = {"name": name, "backend": backend, "pid": owner.pid, "start_ticks": owner.start_ticks}
        folder = cls(path, uid)
        try:
            root.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o711)
            (path / "owner.json").write_text(json.dumps(record | {"boot_id": owner.boot_id}))
            for part in (folder.workspace, folder.tmp)[: 1 + own_tmp]:
                part.mkdir(mode=0o700)
                if uid is not None:
                    os.chown(part, uid, uid)
        except OSError as exc:
            folder.remove()
            raise SandboxError(f"sandbox {name!r}: no folder under {root}: {exc}") from exc
        return folder

    def fill(self, blueprint: Blueprint) -> None:
        """Put template and files into the workspace; stops early when the folder is being removed."""
        with self._lock, self.open_workspace() as workspace:
            if blueprint.template is not None:
                template = Path(blueprint.template).resolve()
                if self.path.resolve().is_relative_to(template):
                    raise SandboxError(
                        f"template {template} holds the sandboxes themselves; move one of the two"
                    )
                copy_tree(template, workspace, uid=self.uid, stop=lambda: self._closed)
            for path, content in blueprint.files.items():
                if self._closed:
                    return
                _place(workspace, path, content, self.uid)

    @contextmanager
    def open_workspace(self) -> Generator[int]:
        """A descriptor of the workspace, from which files are reached without leaving it."""
        try:
            fd = os.open(self.workspace, _DIRECTORY)
        except OSError as exc:
            raise SandboxError(f"the workspace is gone: {exc}") from exc
        try:
            yield fd
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Remove everything, whatever modes its owner set.  Safe to call twice."""
        self._closed = True
        with self._lock:
            remove_tree(self.path)


def _place(workspace: int, path: str, content: bytes, uid: int | None) -> None:
    try:
        write_file(workspace, path, content, uid=uid)
    except PathError as error:
        raise SandboxError(f"a file that the workspace starts with: {error}") from error


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


def check_root(root: Path) -> None:
    """Raise Unsupported when sandboxes cannot live under `root`."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{secrets.token_hex(4)}"
        probe.mkdir()
        probe.rmdir()
    except OSError as exc:
        raise Unsupported(f"sandbox root {root}: {exc}; name a folder that can be written") from exc


def reclaim(root: Path) -> list[str]:
    """End and remove the sandboxes under `root` whose owner is dead; returns their names.

    What belongs to a living process, or is no sandbox, is not touched.
    """
    reclaimed: list[str] = []
    entries = sorted(root.iterdir()) if root.is_dir() else []
    for path in entries:
        match = _NAME.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        record = _record(path)
        boot_id = str(record.get("boot_id", processes.boot_id()))
        if Owner(int(match[1]), int(match[2]), boot_id).is_alive():
            continue
        end_marked(path)
        remove_tree(path)
        reclaimed.append(str(record.get("name", path.name)))
    return reclaimed


def end_marked(path: Path) -> None:
    """End every process tree that was launched for the sandbox in `path`."""
    for pid in processes.with_environment(f"{MARKER}={path}".encode()):
        processes.end_tree(pid)


def _record(path: Path) -> dict[str, object]:
    with suppress(OSError, ValueError):
        return dict(json.loads((path / "owner.json").read_text()))
    return {}
