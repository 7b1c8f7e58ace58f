"""The memory of ranks that are on this machine, read instead of having it sent."""

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sostenuto.runtime.engines.embedded.receiving.mapped import fault_in
from sostenuto.runtime.engines.embedded.receiving.receiver import Bytes


class Near:
    """Keeps what it has mapped, since ranks use their memory again."""

    def __init__(self) -> None:
        self._mapped: dict[str, Bytes] = {}

    def memory(self, said: Mapping[str, Any]) -> Bytes | None:
        """That of the rank which `said` where it is; None: it is elsewhere, or we may not read it."""
        name = str(said["name"])
        path = Path(f"/proc/{said['pid']}/fd/{said['descriptor']}")
        try:
            # A process of the same number may be another one: elsewhere, or later.
            if name not in str(path.readlink()):
                return None
            if name not in self._mapped:
                with path.open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                fault_in(mapped)
                self._mapped[name] = np.frombuffer(mapped, dtype=np.uint8)
        except (OSError, ValueError):
            return None
        return self._mapped[name]

    def keep(self, most: int) -> None:
        """Let go of all but those that were mapped last."""
        for name in list(self._mapped)[:-most]:
            del self._mapped[name]
