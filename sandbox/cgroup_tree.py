"""Where this process may make cgroups, found out by making one and moving a process into it.

- v1 has a hierarchy for each controller, or few together; a group is made below the one we are in.
- v2 has one hierarchy.  A group that holds processes cannot hand controllers on to groups below it, and we do
  not move processes that others started, ourselves included: so a group is made in the nearest group above
  that hands its memory controller on and can be written.
- Both may be there at once, with each controller in one of them.

Nothing that exists is changed, except that v2 controllers are handed on where the group that is chosen did
not yet do so.
"""

import os
import re
import secrets
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sostenuto.sandbox import processes

WANTED = frozenset({"cpu", "cpuacct", "memory", "pids"})
_NAME = re.compile(r"sostenuto\.(\d+)\.(\d+)\.(\d+)\.[0-9a-f]{16}")
_ENTER = 'while [ "$1" != -- ]; do echo 0 >"$1/cgroup.procs" || exit; shift; done; shift; exec "$@"'
_TRIAL_S = 10
_CHUNK_BYTES = 1 << 16


class Tree:
    """The cgroup file systems, as the kernel shows them; memberships are those of one process."""

    def __init__(self, process: int | None = None) -> None:
        """None: this process."""
        self._process = "self" if process is None else process

    def mounts(self) -> str:
        return Path("/proc/self/mountinfo").read_text()

    def memberships(self) -> str:
        return Path(f"/proc/{self._process}/cgroup").read_text()

    def make(self, path: Path) -> None:
        path.mkdir()

    def remove(self, path: Path) -> None:
        """Raises OSError (EBUSY) while a process is in it."""
        path.rmdir()

    def read(self, path: Path) -> str:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # after each command: the fastest way
        try:
            return b"".join(iter(lambda: os.read(fd, _CHUNK_BYTES), b"")).decode()
        finally:
            os.close(fd)

    def write(self, path: Path, text: str) -> None:
        # In one call and without O_CREAT or O_TRUNC: a kernel that lacks the file says so.
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def has(self, path: Path) -> bool:
        return path.exists()

    def can_write(self, path: Path) -> bool:
        return os.access(path, os.W_OK)

    def groups(self, path: Path) -> list[Path]:
        """Those directly below `path`; none when it is gone."""
        with suppress(FileNotFoundError):
            return sorted(Path(entry.path) for entry in os.scandir(path) if entry.is_dir())
        return []

    def can_enter(self, path: Path) -> bool:
        """Whether a process that we start can be in the group `path`."""
        with suppress(OSError, subprocess.TimeoutExpired):
            return not subprocess.run(
                [*entering([path]), "/bin/true"], capture_output=True, timeout=_TRIAL_S, check=False
            ).returncode
        return False


def entering(groups: list[Path]) -> list[str]:
    """What to put before a command line, so that the process is in `groups` before its program starts."""
    return ["/bin/sh", "-c", _ENTER, "enter", *map(str, groups), "--"] if groups else []


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One in which groups can be made."""

    version: int
    base: Path
    """Groups are made directly in it."""
    controllers: frozenset[str]
    """Those of WANTED that bind the groups."""


@dataclass(frozen=True, slots=True)
class Mount:
    version: int
    top: Path
    own: Path
    """The group that this process is in."""
    controllers: frozenset[str]
    """On v1; what v2 has is written in its groups."""


def find_mounts(tree: Tree) -> list[Mount]:
    """What is mounted here of cgroups with controllers that we want, v2 first."""
    own = dict(_membership(line) for line in tree.memberships().splitlines())
    mounts = [_mount(line, own) for line in tree.mounts().splitlines()]
    return sorted(filter(None, mounts), key=lambda mount: -mount.version)


def _membership(line: str) -> tuple[frozenset[str], str]:
    """ "4:cpu,cpuacct:/a" or, of v2, "0::/a"."""
    _, controllers, path = line.split(":", 2)
    return frozenset(filter(None, controllers.split(","))), path


def _mount(line: str, own: dict[frozenset[str], str]) -> Mount | None:
    """Of a line of mountinfo: ID PARENT DEVICE ROOT MOUNTPOINT OPTIONS... - TYPE SOURCE SUPEROPTIONS."""
    fields, _, rest = line.partition(" - ")
    kind, _, options = rest.split(" ", 2)
    _, _, _, root, point, *_ = fields.split(" ")
    top = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), point))
    if kind == "cgroup2":
        return Mount(2, top, _inside(top, root, own.get(frozenset(), "/")), frozenset())
    held = WANTED.intersection(options.split(",")) if kind == "cgroup" else frozenset[str]()
    for controllers, path in own.items():
        if held and held <= controllers:
            return Mount(1, top, _inside(top, root, path), held)
    return None


def _inside(top: Path, root: str, path: str) -> Path:
    """Where the group `path` is below `top`, which shows the hierarchy from `root` on."""
    with suppress(ValueError):
        below = Path(path).relative_to(root)
        return top if ".." in below.parts else top / below
    return top


def find_hierarchies(tree: Tree) -> list[Hierarchy]:
    """Those in which we can make groups; of v1, only what v2 does not have."""
    found: list[Hierarchy] = []
    for mount in find_mounts(tree):
        known = frozenset[str]().union(*(hierarchy.controllers for hierarchy in found))
        if mount.version == 1 and mount.controllers <= known:
            continue
        hierarchy = _try_v2(tree, mount) if mount.version == 2 else _try_v1(tree, mount)
        if hierarchy is not None:
            found.append(hierarchy)
    return found


def _try_v1(tree: Tree, mount: Mount) -> Hierarchy | None:
    return Hierarchy(1, mount.own, mount.controllers) if _usable(tree, mount.own) else None


def _try_v2(tree: Tree, mount: Mount) -> Hierarchy | None:
    """The nearest group that hands on memory; without one, the nearest for what needs no controller."""
    nearest: Hierarchy | None = None
    above = [group for group in mount.own.parents if group.is_relative_to(mount.top)]
    for base in (mount.own, *above):
        asked = _hand_on(tree, base)
        controllers = WANTED & _words(tree, base / "cgroup.subtree_control")
        if ("memory" in controllers or nearest is None) and _usable(tree, base):
            nearest = Hierarchy(2, base, controllers | {"cpuacct"})
            if "memory" in controllers:
                break
        else:
            _tell(tree, base, "-", asked)
    return nearest


def _hand_on(tree: Tree, base: Path) -> list[str]:
    """Let groups in `base` have its controllers; returns those that they did not yet have."""
    missing = WANTED & _words(tree, base / "cgroup.controllers")
    missing -= _words(tree, base / "cgroup.subtree_control")
    return _tell(tree, base, "+", sorted(missing))


def _tell(tree: Tree, base: Path, sign: str, controllers: list[str]) -> list[str]:
    done: list[str] = []
    for controller in controllers:
        with suppress(OSError):
            tree.write(base / "cgroup.subtree_control", f"{sign}{controller}")
            done.append(controller)
    return done


def _words(tree: Tree, path: Path) -> frozenset[str]:
    with suppress(OSError):
        return frozenset(tree.read(path).split())
    return frozenset()


def _usable(tree: Tree, base: Path) -> bool:
    trial = base / new_name()
    try:
        tree.make(trial)
    except OSError:
        return False
    try:
        return tree.can_enter(trial)
    finally:
        with suppress(OSError):
            tree.remove(trial)


def new_name() -> str:
    """Of a group of this process; says who owns it, and in which pid namespace that pid is one."""
    return f"{_owned(os.getpid())}.{secrets.token_hex(8)}"


@cache
def _owned(pid: int) -> str:
    return f"sostenuto.{_pid_namespace()}.{pid}.{processes.start_ticks(pid) or 0}"


def is_named(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def is_orphan(name: str) -> bool:
    """Whether `name` is one that a process of this pid namespace made which is dead."""
    match = _NAME.fullmatch(name)
    if match is None or int(match[1]) != _pid_namespace():
        return False
    return not processes.is_alive(int(match[2]), int(match[3]))


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
