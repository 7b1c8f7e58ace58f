"""Memory for what arrives beside what is served: two buffers that take turns.

New memory costs more than the transfer into it, so a buffer that is not served any more is
used again.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sostenuto.types import Version

Bytes = NDArray[np.uint8]


class Base(Protocol):
    """What an engine serves."""

    @property
    def version(self) -> Version: ...

    @property
    def digest(self) -> int | None:
        """Of its publication; None: not known."""
        ...

    def served(self, name: str) -> Bytes | None:
        """The bytes of a tensor as it was published; None where they are not kept so."""
        ...


class Room:
    """Of one engine."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._buffers: list[Bytes] = []

    def beside(self, nbytes: int, names: Iterable[str]) -> Bytes:
        """So many bytes in which none of the served tensors of these names lies."""
        served = [_address(held) for name in names if (held := self._base.served(name)) is not None]
        self._buffers = [buffer for buffer in self._buffers if buffer.nbytes == nbytes]
        for buffer in self._buffers:
            start = _address(buffer)
            if not any(start <= address < start + nbytes for address in served):
                return buffer
        self._buffers.append(np.empty(nbytes, dtype=np.uint8))
        return self._buffers[-1]


def _address(array: Bytes) -> int:
    return array.__array_interface__["data"][0]
