"""Backend `landlock`: for systems that refuse namespaces.

Landlock lets a sandbox write in its workspace and its own temporary folder alone and read the system
alone; a seccomp filter takes sockets, tracing, mounting and System V IPC away; a supervisor ends every
descendant.  What it does not separate is part of `isolation`: other processes can be seen, paths are the
host's, and on kernels before 6.12 processes of the same user can be signalled.
"""

import os
from functools import partial
from pathlib import Path

import anyio.to_thread
import landlockpy
from landlockpy import AccessFS, Ruleset, Scope

from sostenuto.errors import SandboxError, Unsupported
from sostenuto.sandbox import seccomp, system
from sostenuto.sandbox.checks import check_blueprint, check_no_network
from sostenuto.sandbox.folders import Folder
from sostenuto.sandbox.launch import Launch
from sostenuto.sandbox.local import LocalSandbox, start_local
from sostenuto.sandbox.protocol import Blueprint, Probe, Snapshot
from sostenuto.sandbox.snapshots import Snapshots
from sostenuto.sandbox.supervised import Confinement, supervised_launch
from sostenuto.sandbox.trial import try_out

OLDEST_ABI = 3
"""The first that governs truncation (Linux 6.2); before it, readable files could be emptied."""
_SIGNAL_ABI = 6
_READ = AccessFS.READ_FILE | AccessFS.READ_DIR
_RUN = _READ | AccessFS.EXECUTE
_DEVICE = AccessFS.READ_FILE | AccessFS.WRITE_FILE
_NOT_OWN = AccessFS.MAKE_CHAR | AccessFS.MAKE_BLOCK | AccessFS.IOCTL_DEV
"""Rights that not even the workspace grants."""


class LandlockBackend:
    """See `sostenuto.sandbox.protocol.Backend`.  Sandboxes live under `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._snapshots = Snapshots(self._root, self.name)

    @property
    def name(self) -> str:
        return "landlock"

    @property
    def isolation(self) -> str:
        kinds = ["Landlock, seccomp without sockets, rlimits; no namespaces: other processes can be seen"]
        if landlockpy.abi_version() < _SIGNAL_ABI:
            kinds.append("those of the same user can be signalled")
        if _changes_user():
            kinds.append("a user of its own")
        else:
            kinds.append("chmod and chown are refused")
            bound = "not limited: they are root" if os.geteuid() == 0 else "limited for the user as a whole"
            kinds.append(f"the number of processes is {bound}")
        return ", ".join(kinds)

    async def probe(self) -> Probe:
        return await try_out(self, self.isolation, _remedy)

    async def start(
        self, name: str, blueprint: Blueprint, *, snapshot: Snapshot | None = None
    ) -> LocalSandbox:
        check_blueprint(name, blueprint)
        check_no_network(name, blueprint)
        origin = self._snapshots.origin(blueprint, snapshot)
        _check_abi()
        uid = system.sandbox_uid()
        if uid is not None:
            _check_reachable(self._root)
        folder = Folder.create(self._root, name, self.name, uid=uid, own_tmp=True)
        return await start_local(folder, name, blueprint, origin, self._snapshots, partial(_plan, blueprint))

    async def forget(self, snapshot: Snapshot) -> None:
        await anyio.to_thread.run_sync(self._snapshots.forget, snapshot)


def _changes_user() -> bool:
    return system.sandbox_uid() is not None


def _check_abi() -> None:
    abi = landlockpy.abi_version()
    if abi < OLDEST_ABI:
        raise Unsupported(f"Landlock ABI {abi}, needed {OLDEST_ABI}")


def _check_reachable(root: Path) -> None:
    """The sandbox's user must be able to walk to its workspace, as there is no mount to put it elsewhere."""
    for folder in (root, *root.parents):
        if folder.exists() and not folder.stat().st_mode & 0o001:
            raise Unsupported(
                f"sandbox root {root}: other users cannot enter {folder}; chmod o+x it, or move it"
            )


def _remedy(said: str) -> str:
    if "sandbox root" in said or "libseccomp" in said:
        return said
    return "boot a Linux of 6.2 or newer with 'landlock' among its lsm= modules, or allow user namespaces"


def _plan(blueprint: Blueprint, folder: Folder) -> Launch:
    code = seccomp.program(bare=True, shared_user=folder.uid is None)
    try:
        landlock_fd = _rules(folder)
    except (OSError, landlockpy.LandlockError) as exc:
        raise SandboxError(f"Landlock: {exc}") from exc
    return supervised_launch(blueprint, folder, Confinement(landlock_fd, seccomp.descriptor(code)))


def _rules(folder: Folder) -> int:
    """A ruleset's descriptor, to be closed by whoever launches."""
    with Ruleset(scoped=Scope.SIGNAL | Scope.ABSTRACT_UNIX_SOCKET) as rules:
        prefix = system.interpreter_prefix()
        programs = [*system.PROGRAMS, *([str(prefix)] if prefix else [])]
        for paths, access in ((programs, _RUN), (system.SETTINGS, _READ), (system.DEVICES, _DEVICE)):
            for path in filter(os.path.exists, paths):
                rules.allow_path(path, access if Path(path).is_dir() else access & ~AccessFS.READ_DIR)
        rules.allow_path("/proc", _READ)
        rules.allow_path(folder.pipes, AccessFS.READ_FILE | AccessFS.WRITE_FILE)
        for own in (folder.workspace, folder.tmp):
            rules.allow_path(own, rules.handled_fs & ~_NOT_OWN)
        return os.dup(rules.fileno())
