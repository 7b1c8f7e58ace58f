"""Who owns what the daemon holds, written on each container and image, and the end of what a dead one left.

Owners are compared within one root folder, which processes of one machine and one pid namespace share:
what carries another root is not ours to judge.
"""

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from pathlib import Path

from sostenuto.sandbox.docker.typed import Conflict, Daemon, Found, Missing
from sostenuto.sandbox.folders import Owner

ROOT, OWNER, NAME = "sostenuto.root", "sostenuto.owner", "sostenuto.name"
_OWNER = re.compile(r"(\d+)\.(\d+)\.(.+)")


def labels_of(root: Path, name: str) -> dict[str, str]:
    """Of something that this process owns."""
    owner = Owner.me()
    return {ROOT: str(root), OWNER: f"{owner.pid}.{owner.start_ticks}.{owner.boot_id}", NAME: name}


def reclaim_containers(daemon: Daemon, root: Path) -> list[str]:
    """Remove the containers and images under `root` whose owner is dead; returns their names.

    What belongs to a living process, or to another root, is not touched.
    """
    mine = {ROOT: str(root)}
    removed = [
        *_removed(daemon.remove, daemon.containers(mine)),
        *_removed(daemon.remove_image, daemon.images(mine)),
    ]
    return [found.labels.get(NAME, found.identity) for found in removed]


def _is_orphan(labels: Mapping[str, str]) -> bool:
    match = _OWNER.fullmatch(labels.get(OWNER, ""))
    return match is not None and not Owner(int(match[1]), int(match[2]), match[3]).is_alive()


def _removed(remove: Callable[[str], None], found: list[Found]) -> Generator[Found]:
    """What is still in use, such as the image of somebody else's container, stays."""
    for one in found:
        if _is_orphan(one.labels):
            with suppress(Missing, Conflict):
                remove(one.identity)
                yield one
