"""What this process may use of its machine: the least of the hardware, its affinity and its cgroups."""

import os
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from pathlib import Path

import psutil

from sostenuto.sandbox.protocol import Backend
from sostenuto.tools.claims import Claim
from sostenuto.tools.config import ServerConfig
from sostenuto.tools.wire import Supply


def budget(config: ServerConfig) -> Claim:
    """What running calls may claim together: as configured, else all that there is."""
    cpus = config.cpus if config.cpus is not None else cpus_here()
    memory_bytes = config.memory_bytes if config.memory_bytes is not None else memory_here()
    return Claim(round(cpus * 1000), memory_bytes)


async def supply(config: ServerConfig, backend: Backend) -> Supply:
    """What the server has; its backend is tried anew."""
    claimable, probe = budget(config), await backend.probe()
    return Supply(
        backend=probe.backend,
        isolation=probe.isolation,
        cpus=claimable.millicpus / 1000,
        memory_bytes=claimable.memory_bytes,
        sandbox_memory_bytes=config.sandbox_memory_bytes,
        snapshot_idle_s=config.snapshot_idle_s,
    )


def cpus_here(proc: Path = Path("/proc/self"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Processors, as a number that may have a fraction."""
    quotas = [_quota(folder) for folder in _folders(proc, cgroups, "cpu")]
    return min(float(len(os.sched_getaffinity(0))), *quotas, inf)


def memory_here(proc: Path = Path("/proc/self"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes."""
    limits = [
        _number(folder / name)
        for folder in _folders(proc, cgroups, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    return int(min(psutil.virtual_memory().total, *limits, inf))


def _folders(proc: Path, cgroups: Path, controller: str) -> Iterator[Path]:
    """Of the groups that we are in, and of those above them: limits hold for all that is below."""
    with suppress(OSError):
        for line in (proc / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            # In a container the path may be one of the host; what is mounted is then our own group.
            root = cgroups / controller if controllers else cgroups
            group = root / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def _quota(folder: Path) -> float:
    """Processors that a group may use."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return inf if quota == "max" else int(quota) / int(period)
    quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota_us / period_us if 0 < quota_us < inf and period_us < inf else inf


def _number(path: Path) -> float:
    with suppress(OSError, ValueError):
        return float(int(path.read_text()))
    return inf
