"""What a sandbox takes, read from /proc and from its folders: for systems on which no cgroup counts it."""

import os
import stat
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

from sostenuto.sandbox import processes

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK_BYTES = 512
_DEPTH = 400


def memory_bytes(tree: list[int]) -> int:
    """What the processes hold, what they share divided among them; where that is hidden, all of it each."""
    return sum(map(_memory_of, tree))


def _memory_of(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def cpu_s(tree: list[int]) -> float:
    """CPU time of the processes and of the children that they have waited for."""
    return sum(map(processes.cpu_ticks, tree)) / os.sysconf("SC_CLK_TCK")


def disk_bytes(folder: Path) -> int:
    """What is in a folder takes on the disk, down to 400 levels; what goes away meanwhile is not counted."""
    with suppress(OSError):
        fd = os.open(folder, _FOLDER)
        try:
            return sum(_blocks(fd, 0)) * _BLOCK_BYTES
        finally:
            os.close(fd)
    return 0


def _blocks(folder: int, depth: int) -> Generator[int]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                yield facts.st_blocks
                if stat.S_ISDIR(facts.st_mode) and depth < _DEPTH:
                    yield from _below(entry.name, folder, depth + 1)


def _below(name: str, folder: int, depth: int) -> Generator[int]:
    fd = os.open(name, _FOLDER, dir_fd=folder)
    try:
        yield from _blocks(fd, depth)
    finally:
        os.close(fd)
