"""Snapshots of workspaces on this machine.

    ROOT/snapshot.TOKEN/
        owner.json    who owns it; the template that it lies over; whether its content is a layer
        content/      what the workspace differs from the template in, as an overlay keeps that; or all of it

- A snapshot lies over at most a template, never over another snapshot: each can be forgotten by itself.
- One that sandboxes of this process are mounted over is removed when the last of them is.
- It is published by a rename, so that half of one is never seen; until then it belongs to its maker by name.
"""

import secrets
import threading
from pathlib import Path

from sostenuto.errors import SandboxError
from sostenuto.sandbox.copying import Copying, copy_tree
from sostenuto.sandbox.fingerprint import fingerprint
from sostenuto.sandbox.folders import SNAPSHOT, Folder, Origin, make_owned, new_path, read_record
from sostenuto.sandbox.protocol import Blueprint, Snapshot
from sostenuto.sandbox.removal import remove_tree
from sostenuto.sandbox.usage import disk_bytes


class Snapshots:
    """Those of one backend; its methods may be called from any thread."""

    def __init__(self, root: Path, backend: str) -> None:
        self._root = root
        self._backend = backend
        self._users: dict[Path, set[Path]] = {}
        """Folders of sandboxes that are mounted over each."""
        self._forgotten: set[Path] = set()
        self._lock = threading.Lock()

    def begin(self, name: str, folder: Folder, origin: Origin) -> "Taking":
        """A snapshot of the sandbox `name`, which stands still until it is taken or given up."""
        record: dict[str, object] = {
            "name": f"snapshot of {name}",
            "backend": self._backend,
            "template": str(origin.template) if origin.layered and origin.template else None,
            "layer": origin.layered,
        }
        return Taking(self._root, self._backend, record, folder, origin)

    def origin(self, blueprint: Blueprint, snapshot: Snapshot | None) -> Origin:
        """What a workspace starts with; raises SandboxError for a snapshot that is not there any more."""
        if snapshot is None:
            template = Path(blueprint.template).resolve() if blueprint.template is not None else None
            return Origin(template, files=blueprint.files)
        path = self._path(snapshot)
        record = read_record(path)
        if path in self._forgotten or not record:
            raise SandboxError(f"snapshot {snapshot.reference} is gone")
        template = record.get("template")
        if isinstance(template, str) and not Path(template).is_dir():
            raise SandboxError(f"snapshot {snapshot.reference} lies over {template}, which is gone")
        return Origin(
            Path(template) if isinstance(template, str) else None,
            path / "content",
            layered=record.get("layer") is True,
        )

    def borrow(self, origin: Origin, folder: Folder) -> None:
        """Keep the origin's snapshot until `folder` is removed; SandboxError when it was just forgotten."""
        if origin.snapshot is None:
            return
        path = origin.snapshot.parent
        with self._lock:
            if path in self._forgotten or not path.is_dir():
                raise SandboxError(f"snapshot {path} is gone")
            self._users.setdefault(path, set()).add(folder.path)
        folder.on_removed = lambda: self._give_back(path, folder.path)

    def _give_back(self, path: Path, user: Path) -> None:
        with self._lock:
            users = self._users.get(path, set())
            users.discard(user)
            if users:
                return
            self._users.pop(path, None)
            if path not in self._forgotten:
                return
        self._remove(path)

    def forget(self, snapshot: Snapshot) -> None:
        path = self._path(snapshot)
        with self._lock:
            self._forgotten.add(path)
            if path in self._users:
                return
        self._remove(path)

    def _remove(self, path: Path) -> None:
        remove_tree(path)
        self._forgotten.discard(path)

    def _path(self, snapshot: Snapshot) -> Path:
        path = Path(snapshot.reference)
        ours = path.parent == self._root and SNAPSHOT.fullmatch(path.name)
        if snapshot.backend != self._backend or not ours:
            raise SandboxError(
                f"{snapshot.reference} is no snapshot of backend {self._backend!r} under {self._root}"
            )
        return path


def seal_of(snapshot: Snapshot) -> str:
    """Changes with whatever is changed in it; empty for one that is no folder of this machine, or is gone."""
    try:
        return fingerprint(Path(snapshot.reference) / "content")
    except OSError:
        return ""


class Taking:
    """One snapshot in the making.  `run` and `give_up` may be called in different threads."""

    def __init__(
        self, root: Path, backend: str, record: dict[str, object], folder: Folder, origin: Origin
    ) -> None:
        self._path = new_path(root)
        self._published = root / f"snapshot.{secrets.token_hex(8)}"
        self._backend = backend
        self._record = record
        self._folder = folder
        self._origin = origin
        self._given_up = False
        self._lock = threading.Lock()

    def run(self) -> Snapshot:
        """Raises SandboxError, and leaves nothing, when the disk refuses or it was given up."""
        try:
            make_owned(self._path, self._record)
            self._copy(self._path / "content")
            size_bytes = disk_bytes(self._path / "content")
            self._publish()
        except BaseException as exc:
            remove_tree(self._path)
            if isinstance(exc, OSError):
                raise SandboxError(f"{self._record['name']}: {exc}") from exc
            raise
        return Snapshot(self._backend, str(self._published), size_bytes)

    def _copy(self, content: Path) -> None:
        content.mkdir(mode=0o700)
        how = Copying(layer=self._origin.layered, stop=lambda: self._given_up)
        if self._origin.layered and self._origin.snapshot is not None:
            copy_tree(self._origin.snapshot, content, how)
        copy_tree(self._folder.workspace, content, how)

    def _publish(self) -> None:
        with self._lock:
            if self._given_up:
                raise SandboxError(f"{self._record['name']} was given up")
            self._path.rename(self._published)

    def give_up(self) -> None:
        """Nobody waits for it any more: it is removed, now or when `run` notices."""
        with self._lock:
            self._given_up = True
            remove_tree(self._published)
