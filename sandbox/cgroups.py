"""One cgroup for each sandbox or worker: limits on all of its processes together, and what they use.

- A group is named after its owner, so that what a dead one left is found and ended (`cgroup_end`).
- A process enters before its program starts (`Cgroup.entering`): nothing that it forks is ever outside.
- v1's freezer is not used: what it has frozen cannot be killed, so a sandbox would outlive its owner.
"""

import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sostenuto.errors import SandboxError, Unsupported
from sostenuto.sandbox.cgroup_end import end_group
from sostenuto.sandbox.cgroup_files import Memory, cpu_s, limit_cpus, memory_of
from sostenuto.sandbox.cgroup_tree import Hierarchy, Tree, entering, find_hierarchies, new_name

_FREEZE_S = 5.0
_POLL_S = 0.0002
_ATTEMPTS = 5
REMEDY = (
    "memory is bounded for each process, not for a sandbox or a call as a whole; to change that, start this "
    "as root or with 'systemd-run --user --scope -p Delegate=yes'"
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of all processes of a group together; None: not bounded."""

    memory_bytes: int | None = None
    processes: int | None = None
    cpus: float | None = None


class Cgroup:
    """One group.  Every method raises SandboxError, with the group's name, where a file refuses."""

    def __init__(self, tree: Tree, name: str, paths: dict[Hierarchy, Path]) -> None:
        self._tree = tree
        self._name = name
        self._paths = list(paths.values())
        self._entered = list(self._paths)
        self._of = {each: (one.version, path) for one, path in paths.items() for each in one.controllers}
        self._v2 = next((path for one, path in paths.items() if one.version == 2), None)
        memory = self._of.get("memory")
        self._memory: Memory | None = memory_of(tree, *memory) if memory else None
        self._own_memory = self._memory
        """Of what is in no cell."""
        self._home: Path | None = None
        """Where what is in no cell is, once there may be cells."""

    @contextmanager
    def _named(self) -> Generator[None]:
        try:
            yield
        except OSError as exc:
            raise SandboxError(f"cgroup {self._name}: {exc}") from exc

    @property
    def bounds_memory(self) -> bool:
        return self._memory is not None

    @property
    def bounds_cpus(self) -> bool:
        return "cpu" in self._of

    @property
    def can_freeze(self) -> bool:
        return self._v2 is not None

    def entering(self) -> list[str]:
        """What to put before the command line of a process that is to be in the group from its start."""
        return entering(self._entered)

    def divide(self) -> None:
        """Let it have cells, where memory is bound; before any process has entered."""
        if "memory" not in self._of:
            return
        version, path = self._of["memory"]
        self._home = path
        if version == 2:  # what hands a controller on holds no processes itself
            self._home = path / "home"
            with self._named():
                self._tree.make(self._home)
                self._tree.write(path / "cgroup.subtree_control", "+memory")
            self._own_memory = memory_of(self._tree, version, self._home)
            self._entered = [self._home if each == path else each for each in self._paths]

    def cell(self, memory_bytes: int | None) -> "Cell | None":
        """A new one, which may take so much; None where there are none."""
        if self._home is None:
            return None
        version, path = self._of["memory"]
        with self._named():
            return Cell.make(
                self._tree, version, path / f"call.{secrets.token_hex(8)}", self._home, memory_bytes
            )

    def bound(self, bounds: Bounds) -> None:
        """What no controller is there for is not bounded."""
        with self._named():
            if self._memory is not None and bounds.memory_bytes is not None:
                self._memory.limit(bounds.memory_bytes)
            if "pids" in self._of and bounds.processes is not None:
                self._tree.write(self._of["pids"][1] / "pids.max", str(bounds.processes))
            if "cpu" in self._of and bounds.cpus is not None:
                limit_cpus(self._tree, *self._of["cpu"], bounds.cpus)

    def out_of_memory_kills(self) -> int:
        """Processes in no cell that the kernel has ended because the group's memory was used up."""
        with self._named():
            return self._own_memory.kills() if self._own_memory is not None else 0

    def memory_bytes(self) -> tuple[int, int] | None:
        """Used now, page cache included, and at the most so far; None: not counted."""
        with self._named():
            return (self._memory.used_bytes(), self._memory.peak_bytes()) if self._memory else None

    def cpu_s(self) -> float | None:
        """CPU time of all that ever ran in it; None: not counted."""
        with self._named():
            return cpu_s(self._tree, *self._of["cpuacct"]) if "cpuacct" in self._of else None

    def freeze(self) -> None:
        """Stop every process where it stands, at once and unseen by them; needs `can_freeze`."""
        self._set_frozen("1")

    def thaw(self) -> None:
        self._set_frozen("0")

    def _set_frozen(self, state: str) -> None:
        if self._v2 is None:
            raise Unsupported(f"cgroup {self._name}: freezing needs cgroup v2")
        deadline_s = time.monotonic() + _FREEZE_S
        with self._named():
            self._tree.write(self._v2 / "cgroup.freeze", state)
            while f"frozen {state}" not in self._tree.read(self._v2 / "cgroup.events"):
                if time.monotonic() > deadline_s:
                    raise SandboxError(f"cgroup {self._name}: a process does not freeze")
                time.sleep(_POLL_S)

    def check_moves_out(self) -> None:
        """Raise Unsupported, with what is missing, where `move_out` can do nothing."""
        if self._memory is None:
            raise Unsupported(f"memory cannot be moved out: {REMEDY}")
        check_swap()

    def move_out(self) -> None:
        """Move its memory to swap; blocks while that is written."""
        self.check_moves_out()
        with self._named():
            if self._memory is not None:
                self._memory.move_out()

    def let_back(self) -> None:
        """Undo `move_out`: what the processes touch comes back."""
        with self._named():
            if self._memory is not None:
                self._memory.let_back()

    def remove(self) -> None:
        """End what is inside and remove the group; safe to call twice."""
        failed: SandboxError | None = None
        for path in self._paths:
            try:
                end_group(self._tree, path)
            except SandboxError as exc:
                failed = exc
        if failed is not None:
            raise failed


class Cell:
    """Processes of one call within a group: they share a bound on memory, and those it ends are counted."""

    def __init__(self, tree: Tree, version: int, path: Path, home: Path) -> None:
        self._tree = tree
        self._path = path
        self._home = home
        self._memory = memory_of(tree, version, path)

    @classmethod
    def make(cls, tree: Tree, version: int, path: Path, home: Path, memory_bytes: int | None) -> "Cell":
        """Raises OSError, and leaves nothing, when the system refuses."""
        tree.make(path)
        cell = cls(tree, version, path, home)
        if memory_bytes is not None:
            try:
                cell._memory.limit(memory_bytes)
            except OSError:
                cell.remove()
                raise
        return cell

    def take(self, pid: int) -> None:
        """Let the process be in it, with all that it starts from now on; one that is gone is fine."""
        try:
            self._tree.write(self._path / "cgroup.procs", str(pid))
        except ProcessLookupError:
            return
        except OSError as exc:
            raise SandboxError(f"cgroup {self._path}: {exc}") from exc

    def kills(self) -> int:
        """Processes of it that the kernel has ended for want of memory; 0 when its sandbox is gone."""
        with suppress(OSError):
            return self._memory.kills()
        return 0

    def remove(self) -> None:
        """What still runs in it goes on in its sandbox's own group.  What stays, goes with that."""
        for _ in range(_ATTEMPTS):
            with suppress(OSError):
                for pid in self._tree.read(self._path / "cgroup.procs").split():
                    self._tree.write(self._home / "cgroup.procs", pid)
                self._tree.remove(self._path)
                return


def check_swap() -> None:
    """Raise Unsupported on a system without swap."""
    with suppress(OSError):
        if len(Path("/proc/swaps").read_text().splitlines()) > 1:
            return
    raise Unsupported("memory cannot be moved out: this system has no swap; add some with swapon")


class Cgroups:
    """Makes groups where this process may."""

    def __init__(self, tree: Tree, hierarchies: list[Hierarchy]) -> None:
        self._tree = tree
        self._hierarchies = hierarchies

    def describe(self) -> str:
        """Such as "cgroup v2: freezer; cgroup v1: cpu, memory, pids"."""
        kinds: dict[int, set[str]] = {}
        for one in self._hierarchies:
            kinds.setdefault(one.version, set()).update(one.controllers - {"cpuacct"})
            if one.version == 2:
                kinds[2].add("freezer")
        return "; ".join(f"cgroup v{version}: {', '.join(sorted(names))}" for version, names in kinds.items())

    @property
    def bound_memory(self) -> bool:
        return any("memory" in one.controllers for one in self._hierarchies)

    def create(self, bounds: Bounds, *, divided: bool = False) -> Cgroup:
        """A new group, with or without cells; raises SandboxError, and leaves nothing, when it is refused."""
        name = new_name()
        group = Cgroup(self._tree, name, {one: one.base / name for one in self._hierarchies})
        try:
            for one in self._hierarchies:
                self._tree.make(one.base / name)
            group.bound(bounds)
            if divided:
                group.divide()
        except OSError as exc:
            group.remove()
            raise SandboxError(f"no cgroup could be made: {exc}") from exc
        except SandboxError:
            group.remove()
            raise
        return group


def look_for_cgroups(tree: Tree) -> Cgroups | None:
    """None where none can be made."""
    hierarchies = find_hierarchies(tree)
    return Cgroups(tree, hierarchies) if hierarchies else None


@cache
def find_cgroups() -> Cgroups | None:
    """Those of this process, looked for once."""
    return look_for_cgroups(Tree())


def describe_limits(cgroups: Cgroups | None) -> str:
    """For `sostenuto doctor`: what bounds a sandbox, and what to do where that is little."""
    if cgroups is None:
        return f"rlimits alone: {REMEDY}"
    return cgroups.describe() if cgroups.bound_memory else f"{cgroups.describe()}: {REMEDY}"
