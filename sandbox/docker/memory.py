"""The memory of a container, moved to swap while it is paused: through its cgroup, which the daemon has made.

The daemon has no call for that.  So this needs a daemon on this machine and the right to write its cgroups.
"""

from pathlib import Path

from sostenuto.errors import Unsupported
from sostenuto.sandbox.cgroup_files import Memory, memory_of
from sostenuto.sandbox.cgroup_tree import Mount, Tree, find_mounts
from sostenuto.sandbox.cgroups import check_swap

_CANNOT = "memory cannot be moved out"


def memory_of_container(tree: Tree, container: str, limit_bytes: int) -> Memory:
    """Of the cgroup that `tree` shows a process of the container in.

    Raises Unsupported where that is not the container's, has no memory controller or cannot be written.
    """
    check_swap()
    try:
        return find_memory(tree, container, limit_bytes)
    except OSError as error:
        raise Unsupported(f"{_CANNOT}: {error}; the daemon's processes are not seen from here") from error


def find_memory(tree: Tree, container: str, limit_bytes: int) -> Memory:
    """`memory_of_container`, whether or not there is swap."""
    for mount in find_mounts(tree):
        file = _file(tree, mount)
        if file is None:
            continue
        if container not in str(mount.own):
            raise Unsupported(f"{_CANNOT}: its cgroup is not seen from here, only {mount.own}")
        if not tree.can_write(file):
            raise Unsupported(f"{_CANNOT}: no right to write {file}; run this as root")
        return memory_of(tree, mount.version, mount.own, limit_bytes)
    raise Unsupported(f"{_CANNOT}: no memory cgroup of container {container} is seen from here")


def _file(tree: Tree, mount: Mount) -> Path | None:
    """What has to be written; None where this hierarchy does not hold the memory."""
    if mount.version == 1:
        return mount.own / "memory.force_empty" if "memory" in mount.controllers else None
    held = tree.has(mount.own / "memory.current")
    return mount.own / "memory.high" if held else None
