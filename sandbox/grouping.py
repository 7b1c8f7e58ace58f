"""What holds the processes of a sandbox together: its cgroup where one can be made, else their tree alone."""

import signal

from sostenuto.errors import SandboxError, Unsupported
from sostenuto.sandbox import processes, usage
from sostenuto.sandbox.cgroups import REMEDY, Bounds, Cell, Cgroup, find_cgroups
from sostenuto.sandbox.protocol import SandboxLimits

_LAUNCHER_TASKS = 8
"""What stands above the shells of a sandbox, which its limit on processes is not about."""


class Grouping:
    """Of one sandbox.  Made before its launcher, removed after its last process; `remove` is idempotent."""

    def __init__(self, limits: SandboxLimits) -> None:
        """Raises SandboxError when the system refuses a cgroup."""
        cgroups = find_cgroups()
        tasks = limits.processes + _LAUNCHER_TASKS
        bounds = Bounds(limits.memory_bytes, tasks, limits.cpus)
        self._group: Cgroup | None = cgroups.create(bounds, divided=True) if cgroups else None
        self._call_bytes = limits.call_memory_bytes
        self._peak_bytes = 0
        self._is_out = False

    @property
    def entering(self) -> list[str]:
        """What comes before the command line of the launcher."""
        return self._group.entering() if self._group else []

    def cell(self) -> Cell | None:
        """For the processes of one call; None where cgroups do not bound memory."""
        return self._group.cell(self._call_bytes) if self._group else None

    def out_of_memory_kills(self) -> int:
        return self._group.out_of_memory_kills() if self._group else 0

    def stop(self, launcher: int) -> None:
        """Stop what is below the launcher; SandboxError when it forks faster and nothing freezes it."""
        try:
            processes.freeze(launcher)
        except TimeoutError as exc:
            if self._group is None or not self._group.can_freeze:
                raise SandboxError(str(exc)) from exc
            self._stop_frozen(self._group, launcher)

    def _stop_frozen(self, group: Cgroup, launcher: int) -> None:
        """Nothing forks while it is frozen, and what was told to stop does so before it runs again.

        It stays stopped, not frozen, so that a single process can be let go to end a command.
        """
        group.freeze()
        try:
            processes.send(processes.descendants(launcher), signal.SIGSTOP)
        finally:
            group.thaw()

    def check_moves_out(self) -> None:
        """Raise Unsupported, with what is missing, where memory cannot be moved out."""
        if self._group is None:
            raise Unsupported(f"memory cannot be moved out: {REMEDY}")
        self._group.check_moves_out()

    def move_out(self) -> None:
        """Move the memory of stopped processes to swap; blocks while that is written."""
        if self._group is not None:
            self._group.move_out()
            self._is_out = True

    def let_back(self) -> None:
        """Undo `move_out`, if it was called."""
        if self._group is not None and self._is_out:
            self._is_out = False
            self._group.let_back()

    def memory_bytes(self, tree: list[int]) -> tuple[int, int]:
        """Now, and at the most; without a cgroup, of those times when this was asked."""
        counted = self._group.memory_bytes() if self._group else None
        if counted is not None:
            return counted
        used_bytes = usage.memory_bytes(tree)
        self._peak_bytes = max(self._peak_bytes, used_bytes)
        return used_bytes, self._peak_bytes

    def cpu_s(self, tree: list[int]) -> float:
        counted_s = self._group.cpu_s() if self._group else None
        return usage.cpu_s(tree) if counted_s is None else counted_s

    def remove(self) -> None:
        """SandboxError when a process cannot be ended."""
        if self._group is not None:
            self._group.remove()
            self._group = None
