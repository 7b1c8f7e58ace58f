"""The end of cgroups: of one that its owner no longer needs, and of those whose owner is dead."""

import errno
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sostenuto.errors import SandboxError
from sostenuto.sandbox import processes
from sostenuto.sandbox.cgroup_tree import Tree, find_mounts, is_named, is_orphan

_END_S = 5.0
_POLL_S = 0.0005


def end_group(tree: Tree, path: Path) -> None:
    """Remove a group and those in it; what still runs inside is killed.  A group that is gone is fine.

    Raises SandboxError when it is still there after some seconds.
    """
    deadline_s = time.monotonic() + _END_S
    while not _removed(tree, path):
        if time.monotonic() > deadline_s:
            raise SandboxError(f"cgroup {path} cannot be emptied")
        _kill(tree, path)
        time.sleep(_POLL_S)


def _removed(tree: Tree, path: Path) -> bool:
    try:
        if all(_removed(tree, inner) for inner in tree.groups(path)):
            tree.remove(path)
            return True
    except FileNotFoundError:
        return True
    except OSError as exc:
        if exc.errno != errno.EBUSY:
            raise SandboxError(f"cgroup {path}: {exc}") from exc
    return False


def _kill(tree: Tree, path: Path) -> None:
    try:
        tree.write(path / "cgroup.kill", "1")
    except OSError:  # v1, or Linux before 5.14
        with suppress(OSError):
            tree.write(path / "pids.max", "0")  # so that nothing forks faster than it is killed
        for group in (path, *_below(tree, path)):
            processes.send(_members(tree, group), signal.SIGKILL)


def _below(tree: Tree, path: Path) -> Iterator[Path]:
    for group in tree.groups(path):
        yield group
        yield from _below(tree, group)


def _members(tree: Tree, path: Path) -> list[int]:
    """A process of another pid namespace is listed as 0, which would mean us."""
    with suppress(OSError):
        return [pid for pid in map(int, tree.read(path / "cgroup.procs").split()) if pid]
    return []


def reclaim_cgroups(tree: Tree) -> list[str]:
    """End the groups whose owner is dead, wherever they are; returns their names.

    Groups of the living, of other pid namespaces and of others altogether are not touched.  One that cannot
    be ended is left for the next time.
    """
    ended: set[str] = set()
    for mount in find_mounts(tree):
        for path in list(_orphans(tree, mount.top)):
            with suppress(SandboxError):
                end_group(tree, path)
                ended.add(path.name)
    return sorted(ended)


def _orphans(tree: Tree, path: Path) -> Iterator[Path]:
    for group in tree.groups(path):
        if is_orphan(group.name):
            yield group
        elif not is_named(group.name):
            yield from _orphans(tree, group)
