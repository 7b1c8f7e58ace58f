"""Calls to the daemon that have to be repeated until it has caught up with itself."""

import time

from sostenuto.errors import SandboxError
from sostenuto.sandbox.docker.typed import Conflict, Daemon, Missing

_GONE_S = 20.0
_RESTORED_S = 20.0
_LOOK_AGAIN_S = 0.02


def remove_container(daemon: Daemon, container: str) -> None:
    """End and remove it; what is already gone is fine.  Blocks until it is gone; SandboxError if it stays."""
    give_up_s = time.monotonic() + _GONE_S
    while time.monotonic() < give_up_s:
        try:
            daemon.remove(container)
        except Missing:
            return
        except Conflict:  # its removal is in progress
            time.sleep(_LOOK_AGAIN_S)
    raise SandboxError(f"container {container} cannot be removed")


def restore_container(daemon: Daemon, container: str, checkpoint: str) -> None:
    """Start it from a checkpoint.  Blocks; SandboxError if it does not come up.

    The daemon keeps the content of a checkpoint twice for a moment after it was made, and refuses meanwhile.
    """
    give_up_s = time.monotonic() + _RESTORED_S
    while True:
        try:
            return daemon.restore(container, checkpoint)
        except SandboxError as error:
            if "already exists" not in str(error) or time.monotonic() > give_up_s:
                raise
            time.sleep(_LOOK_AGAIN_S)
