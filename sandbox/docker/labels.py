"""Who owns what the daemon holds, written on each container and image, and the end of what a dead one left.

An owner is judged by pid and start.  That says something within one boot and one pid namespace, and within
one root folder, which only processes of one machine and of one namespace after the other use.
"""

import os
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from sostenuto.sandbox.docker.typed import Conflict, Daemon, Found, Missing
from sostenuto.sandbox.folders import Owner

ROOT, OWNER, NAME, NAMESPACE = (f"sostenuto.{word}" for word in ("root", "owner", "name", "pids"))
_HAS_PROC = Path("/proc/self/stat").exists()
_NO_BOOT = "none"
_OWNER = re.compile(r"(\d+)\.(\d+)\.(.+)")


def labels_of(root: Path, name: str) -> dict[str, str]:
    """Of something that this process owns."""
    return {ROOT: str(root), OWNER: _me(), NAME: name, NAMESPACE: _namespace()}


def _me() -> str:
    if not _HAS_PROC:
        return f"{os.getpid()}.{_started_ms(os.getpid())}.{_NO_BOOT}"
    owner = Owner.me()
    return f"{owner.pid}.{owner.start_ticks}.{owner.boot_id}"


def _namespace() -> str:
    """Of the pids that this process sees."""
    return os.readlink("/proc/self/ns/pid") if _HAS_PROC else "none"  # noqa: PTH115 - no path


def reclaim_containers(daemon: Daemon, root: Path) -> list[str]:
    """Remove the containers and images whose owner is dead; returns their names.

    What belongs to a living process, or to one that cannot be judged from here, is not touched.
    """
    removed = [
        *_removed(daemon.remove, daemon.containers(OWNER), root),
        *_removed(daemon.remove_image, daemon.images(OWNER), root),
    ]
    return [found.labels.get(NAME, found.identity) for found in removed]


def remove_own_images(daemon: Daemon, root: Path) -> None:
    """Remove the images that this process has made for `root` and that no container uses."""
    for one in daemon.images(OWNER):
        if one.labels.get(OWNER) == _me() and one.labels.get(ROOT) == str(root):
            with suppress(Missing, Conflict):
                daemon.remove_image(one.identity)


def is_orphan(labels: Mapping[str, str], root: Path) -> bool:
    match = _OWNER.fullmatch(labels.get(OWNER, ""))
    if match is None:
        return False
    pid, started, boot = int(match[1]), int(match[2]), match[3]
    seen_from_here = labels.get(NAMESPACE) == _namespace() and _me().endswith(f".{boot}")
    if labels.get(ROOT) != str(root) and not seen_from_here:
        return False
    if boot == _NO_BOOT:
        return _started_ms(pid) != started
    return not Owner(pid, started, boot).is_alive()


def _started_ms(pid: int) -> int | None:
    """Where there is no /proc the start is a time, which no reboot repeats."""
    with suppress(psutil.NoSuchProcess):
        return round(psutil.Process(pid).create_time() * 1000)
    return None


def _removed(remove: Callable[[str], None], found: list[Found], root: Path) -> Generator[Found]:
    """What is still in use, such as the image of somebody else's container, stays."""
    for one in found:
        if is_orphan(one.labels, root):
            with suppress(Missing, Conflict):
                remove(one.identity)
                yield one
