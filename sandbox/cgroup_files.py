"""The files of one cgroup: how v1 and v2 are told a limit, and how they say what is used."""

from contextlib import suppress
from pathlib import Path
from typing import Protocol

from sostenuto.sandbox.cgroup_tree import Tree

_PERIOD_US = 100_000
_THROTTLED = 32
"""v2 slows down whoever is in the last 1/32 of its memory: by up to 60 ms for each 64 pages that it asks for,
so that a short burst is survived and a hog reaches its end within seconds."""


class Memory(Protocol):
    def limit(self, limit_bytes: int) -> None: ...
    def used_bytes(self) -> int: ...
    def peak_bytes(self) -> int: ...

    def kills(self) -> int:
        """Processes that the kernel has ended because the memory was used up."""
        ...

    def move_out(self) -> None:
        """Move to swap what can be moved; takes as long as writing it does."""
        ...

    def let_back(self) -> None:
        """Undo what `move_out` set; pages come back as they are used."""
        ...


class MemoryV1:
    def __init__(self, tree: Tree, path: Path) -> None:
        self._tree = tree
        self._path = path
        self._kills = path / "memory.oom_control"

    def limit(self, limit_bytes: int) -> None:
        self._tree.write(self._path / "memory.limit_in_bytes", str(limit_bytes))
        with suppress(OSError):  # kernels without accounting of swap
            self._tree.write(self._path / "memory.memsw.limit_in_bytes", str(limit_bytes))

    def used_bytes(self) -> int:
        return int(self._tree.read(self._path / "memory.usage_in_bytes"))

    def peak_bytes(self) -> int:
        return int(self._tree.read(self._path / "memory.max_usage_in_bytes"))

    def kills(self) -> int:
        return _field(self._tree.read(self._kills), "oom_kill")

    def move_out(self) -> None:
        self._tree.write(self._path / "memory.force_empty", "0")

    def let_back(self) -> None:
        """Nothing was set."""


class MemoryV2:
    def __init__(self, tree: Tree, path: Path, limit_bytes: int = 0) -> None:
        """`limit_bytes`: what somebody else has set; else `limit` comes first."""
        self._tree = tree
        self._path = path
        self._kills = path / "memory.events"
        self._limit_bytes = limit_bytes
        self._peak_bytes = 0

    def limit(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._tree.write(self._path / "memory.max", str(limit_bytes))
        self._tree.write(self._path / "memory.high", str(limit_bytes - limit_bytes // _THROTTLED))
        self._swap("0")

    def _swap(self, limit: str) -> None:
        with suppress(OSError):  # kernels without swap
            self._tree.write(self._path / "memory.swap.max", limit)

    def used_bytes(self) -> int:
        return int(self._tree.read(self._path / "memory.current"))

    def peak_bytes(self) -> int:
        with suppress(FileNotFoundError):
            return int(self._tree.read(self._path / "memory.peak"))
        self._peak_bytes = max(self._peak_bytes, self.used_bytes())  # Linux before 5.19
        return self._peak_bytes

    def kills(self) -> int:
        return _field(self._tree.read(self._kills), "oom_kill")

    def move_out(self) -> None:
        self._swap(str(self._limit_bytes))
        try:
            # It says EAGAIN when it got less than was asked for, which is always so.
            with suppress(BlockingIOError):
                self._tree.write(self._path / "memory.reclaim", str(self.used_bytes()))
        except FileNotFoundError:  # Linux before 5.19
            self._tree.write(self._path / "memory.high", "0")

    def let_back(self) -> None:
        self._swap("0")
        self._tree.write(self._path / "memory.high", str(self._limit_bytes - self._limit_bytes // _THROTTLED))


def memory_of(tree: Tree, version: int, path: Path, limit_bytes: int = 0) -> Memory:
    """`limit_bytes`: that of a group which somebody else has made."""
    return MemoryV2(tree, path, limit_bytes) if version == 2 else MemoryV1(tree, path)


def limit_cpus(tree: Tree, version: int, path: Path, cpus: float) -> None:
    """Raises OSError for less than a hundredth of a core."""
    quota_us = int(cpus * _PERIOD_US)
    if version == 2:
        tree.write(path / "cpu.max", f"{quota_us} {_PERIOD_US}")
    else:
        tree.write(path / "cpu.cfs_period_us", str(_PERIOD_US))
        tree.write(path / "cpu.cfs_quota_us", str(quota_us))


def cpu_s(tree: Tree, version: int, path: Path) -> float:
    """CPU time of all processes that were ever in the group."""
    if version == 2:
        return _field(tree.read(path / "cpu.stat"), "usage_usec") / 1e6
    return int(tree.read(path / "cpuacct.usage")) / 1e9


def _field(text: str, name: str) -> int:
    """Of lines "name value"; 0 where the kernel is too old to count it."""
    for line in text.splitlines():
        word, _, value = line.partition(" ")
        if word == name:
            return int(value)
    return 0
