"""What one worker may use: memory and processors, of its process and all that it starts.

A cgroup holds it to that where one can be made.  Elsewhere its memory is looked at a few times a second, and
it is pinned to as many cores as its share, rounded up.  Limits on address space would hit libraries that
reserve more than they use.
"""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from sostenuto.errors import ConfigError
from sostenuto.sandbox import processes
from sostenuto.sandbox.cgroups import Bounds, Cgroup, Cgroups

_LOOK_S = 0.2
_LEAST_CPUS = 0.01
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class WorkerBounds:
    """Of each worker; None: as much as there is."""

    memory_bytes: int | None = None
    cpus: float | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ConfigError(f"worker: memory_bytes is {self.memory_bytes}; give a positive number, or None")
        if self.cpus is not None and not self.cpus >= _LEAST_CPUS:
            raise ConfigError(f"worker: cpus is {self.cpus}; give at least {_LEAST_CPUS} cores, or None")


UNBOUNDED = WorkerBounds()


class Bounding:
    """Holds one worker to its bounds.  `remove` is idempotent and ends what the worker left behind."""

    def __init__(self, bounds: WorkerBounds, cgroups: Cgroups | None) -> None:
        """Raises SandboxError when the system refuses a cgroup."""
        self._bounds = bounds
        self._group: Cgroup | None = None
        self._removed = False
        if cgroups is not None and cgroups.bound_memory and bounds != UNBOUNDED:
            self._group = cgroups.create(Bounds(memory_bytes=bounds.memory_bytes, cpus=bounds.cpus))

    @property
    def entering(self) -> Sequence[str]:
        """What comes before the command line of the worker."""
        return self._group.entering() if self._group else ()

    def pin(self, pid: int, number: int) -> None:
        """Give the worker, the `number`-th of its kind, cores of its own where no cgroup shares them out."""
        if self._bounds.cpus is None or (self._group is not None and self._group.bounds_cpus):
            return
        cores = sorted(os.sched_getaffinity(0))
        count = min(len(cores), math.ceil(self._bounds.cpus))
        with suppress(ProcessLookupError):
            os.sched_setaffinity(pid, {cores[(number * count + n) % len(cores)] for n in range(count)})

    @property
    def memory_bytes(self) -> int | None:
        return self._bounds.memory_bytes

    async def until_exceeded(self, pid: int) -> None:
        """Wait until the worker has used more memory than it may."""
        while not self.is_exceeded(pid):  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(_LOOK_S)

    def is_exceeded(self, pid: int) -> bool:
        """Whether it uses more memory than it may or, where the kernel sees to that, has ever tried to."""
        if self._bounds.memory_bytes is None or self._removed:
            return False
        if self._group is not None:
            return self._group.out_of_memory_kills() > 0
        tree = [pid, *processes.descendants(pid)]
        # What is shared counts for everyone who shares it; only who then is above is counted precisely.
        return all(
            sum(map(count, tree)) > self._bounds.memory_bytes for count in (_resident_bytes, _own_bytes)
        )

    def remove(self) -> None:
        self._removed = True  # first: who looks at it meanwhile finds nothing to be read
        if self._group is not None:
            self._group.remove()


def _resident_bytes(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE_BYTES
    return 0


def _own_bytes(pid: int) -> int:
    """Resident memory, with what is shared divided among those who share it."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return _resident_bytes(pid)
