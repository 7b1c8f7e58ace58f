"""Where sandboxes and snapshots live on disk, and who owns them.

    ROOT/PID.STARTTICKS.TOKEN/        one sandbox of the process PID that started at STARTTICKS
        owner.json                    name, backend, pid, start time, boot, for people and for `reclaim`
        workspace/                    what the sandbox writes, and sees where nothing is mounted below it
        work/                         of the kernel, where the workspace is the upper layer of an overlay
        below0/ below1/               where the layers below it are shown, see `idmapped`
        tmp/                          its private temporary folder, where the backend has no tmpfs
        pipes/                        of programs that run beside the shell, see `execution`
    ROOT/snapshot.TOKEN/              one snapshot; its owner.json alone says who owns it, see `snapshots`

- A sandbox's folder says by its name who owns it, so there is no moment at which it belongs to nobody.
- A folder is removed once and for good: whoever still fills it notices and stops first.
- ROOT lies on a local disk and is used by processes of one pid namespace.
"""

import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from sostenuto.errors import PathError, SandboxError, Unsupported
from sostenuto.sandbox import processes
from sostenuto.sandbox.copying import Copying, copy_tree
from sostenuto.sandbox.removal import remove_tree
from sostenuto.sandbox.workspace import write_file

_NAME = re.compile(r"(\d+)\.(\d+)\.[0-9a-f]{16}")
SNAPSHOT = re.compile(r"snapshot\.[0-9a-f]{16}")
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
        return _process(os.getpid())

    def is_alive(self) -> bool:
        return self.boot_id == processes.boot_id() and processes.is_alive(self.pid, self.start_ticks)

    def write(self, folder: Path, record: Mapping[str, object]) -> None:
        """Replace what the folder says of its owner, in one step."""
        whole = {**record, "pid": self.pid, "start_ticks": self.start_ticks, "boot_id": self.boot_id}
        draft = folder / "owner.json.new"
        draft.write_text(json.dumps(whole))
        draft.rename(folder / "owner.json")


@cache
def _process(pid: int) -> Owner:
    return Owner(pid, processes.start_ticks(pid) or 0, processes.boot_id())


@dataclass(frozen=True, slots=True)
class Origin:
    """What a workspace starts with: the template, over it the snapshot, over that the files."""

    template: Path | None = None
    snapshot: Path | None = None
    """Content of a snapshot."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    layered: bool = False
    """Template and snapshot are mounted below the workspace; else they are copied into it."""

    @property
    def lowers(self) -> list[Path]:
        """The layers below the workspace, the lowest first."""
        return [path for path in (self.template, self.snapshot) if path is not None]


class Folder:
    """The folder of one sandbox.  `fill` and `remove` may run in different threads."""

    def __init__(self, path: Path, uid: int | None) -> None:
        self.path = path
        self.workspace = path / "workspace"
        self.work = path / "work"
        self.lowers = [path / "below0", path / "below1"]
        self.tmp = path / "tmp"
        self.pipes = path / "pipes"
        self.token = secrets.token_hex(16)
        """Of the spawner, see `execution`."""
        self.uid = uid
        """Who owns the files; None: the user that this process runs as."""
        self._view: int | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.on_removed: Callable[[], None] = lambda: None

    @classmethod
    def create(
        cls, root: Path, name: str, backend: str, *, uid: int | None = None, own_tmp: bool = False
    ) -> "Folder":
        """A new folder owned by this process; raises SandboxError when the disk refuses."""
        folder = cls(new_path(root), uid)
        parts = [folder.workspace, folder.work, *([folder.tmp] if own_tmp else [])]
        try:
            make_owned(folder.path, {"name": name, "backend": backend})
            for part in parts:
                part.mkdir(mode=0o700)
                if uid is not None:
                    os.chown(part, uid, uid)
            for part in folder.lowers if uid is not None else []:
                part.mkdir()
            folder.pipes.mkdir(mode=0o311)
        except OSError as exc:
            folder.remove()
            raise SandboxError(f"sandbox {name!r}: no folder under {root}: {exc}") from exc
        return folder

    def fill(self, origin: Origin) -> None:
        """Put what is not mounted into the workspace; stops early when the folder is being removed."""
        with self._lock:
            for source in origin.lowers:
                self._check_outside(source)
            for source in () if origin.layered else origin.lowers:
                how = Copying(self.uid, template=source == origin.template, stop=lambda: self._closed)
                copy_tree(source, self.workspace, how)
            if not origin.layered:
                self._place(origin.files)

    def _check_outside(self, template: Path) -> None:
        if self.path.resolve().is_relative_to(template.resolve()):
            raise SandboxError(f"template {template} holds the sandboxes themselves; move one of the two")

    def _place(self, files: Mapping[str, bytes]) -> None:
        with self.open_workspace() as workspace:
            for path, content in files.items():
                if self._closed:
                    return
                try:
                    write_file(workspace, path, content, uid=self.uid)
                except PathError as error:
                    raise SandboxError(f"a file that the workspace starts with: {error}") from error

    def enter(self, pid: int, inside: str, files: Mapping[str, bytes]) -> None:
        """From now on the workspace is what process `pid` sees at `inside`; write the files into that.

        Called before any command has run, so that it is still what was mounted there.  The descriptor stays
        with that mount, whatever the sandbox does.
        """
        with self._lock:
            if self._closed:
                return
            try:
                self._view = os.open(f"/proc/{pid}/root{inside}", _DIRECTORY)
                if os.fstat(self._view).st_dev == self.workspace.stat().st_dev:
                    raise SandboxError("the layers below the workspace were not mounted")
            except OSError as exc:
                raise SandboxError(f"the workspace cannot be reached from outside: {exc}") from exc
            self._place(files)

    @contextmanager
    def open_workspace(self) -> Generator[int]:
        """A descriptor of the workspace, from which files are reached without leaving it."""
        try:
            view = self._view
            fd = os.open(self.workspace, _DIRECTORY) if view is None else os.dup(view)
        except OSError as exc:
            raise SandboxError(f"the workspace is gone: {exc}") from exc
        try:
            yield fd
        finally:
            os.close(fd)

    def leave(self) -> None:
        """Let go of the mounts of a sandbox that has ended.  Safe to call twice."""
        view, self._view = self._view, None
        if view is not None:
            os.close(view)

    def remove(self) -> None:
        """Remove everything, whatever modes its owner set.  Safe to call twice."""
        self._closed = True
        with self._lock:
            self.leave()
            remove_tree(self.path)
        self.on_removed()


def new_path(root: Path) -> Path:
    """Of a folder that belongs to this process."""
    owner = Owner.me()
    return root / f"{owner.pid}.{owner.start_ticks}.{secrets.token_hex(8)}"


def make_owned(path: Path, record: Mapping[str, object]) -> None:
    """Make the folder `path`, which says that it belongs to this process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o711)
    Owner.me().write(path, record)


def check_root(root: Path) -> None:
    """Raise Unsupported when sandboxes cannot live under `root`."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{secrets.token_hex(4)}"
        probe.mkdir()
        probe.rmdir()
    except OSError as exc:
        raise Unsupported(f"sandbox root {root}: {exc}; name a folder that can be written") from exc


def reclaim(root: Path, *, keep: Collection[str] = ()) -> list[str]:
    """End and remove the sandboxes and snapshots under `root` whose owner is dead; returns their names.

    What belongs to a living process, or is neither, is not touched.  Snapshots whose reference is in `keep`
    become this process's own instead: how a server takes over those that its predecessor wrote down.
    """
    reclaimed: list[str] = []
    entries = sorted(root.iterdir()) if root.is_dir() else []
    for path in entries:
        owner = _owner(path)
        if owner is None or owner.is_alive():
            continue
        record = read_record(path)
        if SNAPSHOT.fullmatch(path.name) and str(path) in keep:
            Owner.me().write(path, record)
            continue
        end_marked(path)
        remove_tree(path)
        reclaimed.append(str(record.get("name", path.name)))
    return reclaimed


def _owner(path: Path) -> Owner | None:
    """None: this is no folder of ours."""
    match = _NAME.fullmatch(path.name)
    if not path.is_dir() or not (match or SNAPSHOT.fullmatch(path.name)):
        return None
    record = read_record(path)
    boot_id = str(record.get("boot_id", processes.boot_id()))
    if match:
        return Owner(int(match[1]), int(match[2]), boot_id)
    return Owner(_number(record, "pid"), _number(record, "start_ticks"), boot_id)


def _number(record: Mapping[str, object], name: str) -> int:
    value = record.get(name)
    return value if isinstance(value, int) else 0


def end_marked(path: Path) -> None:
    """End every process tree that was launched for the sandbox in `path`."""
    for pid in processes.with_environment(f"{MARKER}={path}".encode()):
        processes.end_tree(pid)


def read_record(path: Path) -> dict[str, object]:
    """What owner.json says; empty when it cannot be read."""
    with suppress(OSError, ValueError):
        return dict(json.loads((path / "owner.json").read_text()))
    return {}
