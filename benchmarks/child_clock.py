"""The processor time of a process's children, to the nanosecond and however they end.

A parent's account misses the sandboxes: their init is killed, and the kernel then reaps without counting.
The kernel's software counter `task-clock` is inherited at every fork and does not depend on who waits.
"""

import ctypes
import os
import platform
import struct
from types import TracebackType
from typing import Self

from sostenuto.errors import Unsupported

_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_ATTRIBUTE_BYTES = 128
_SOFTWARE, _TASK_CLOCK = 1, 1
_INHERIT, _EXCLUDE_KERNEL = 1 << 1, 1 << 5
"""Without the second, only root may count; a software clock runs on in the kernel all the same."""
_CLOSE_ON_EXEC = 8


class ChildClock:
    """Counts what the main thread of `pid` starts from now on, their children included.

    Unsupported where the kernel refuses to count.
    """

    def __init__(self, pid: int) -> None:
        self._own = _open(pid, _EXCLUDE_KERNEL)
        self._with_children = _open(pid, _EXCLUDE_KERNEL | _INHERIT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._own)
        os.close(self._with_children)

    def seconds(self) -> float:
        """So far, of the living and of the dead."""
        return (_read_ns(self._with_children) - _read_ns(self._own)) * 1e-9


def _open(pid: int, flags: int) -> int:
    number = _PERF_EVENT_OPEN.get(platform.machine())
    if number is None:
        raise Unsupported(f"no counter of children's time on {platform.machine()}; measure on x86_64")
    attribute = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
    struct.pack_into("=IIQ", attribute, 0, _SOFTWARE, _ATTRIBUTE_BYTES, _TASK_CLOCK)
    struct.pack_into("=Q", attribute, 40, flags)
    library = ctypes.CDLL(None, use_errno=True)
    descriptor: int = library.syscall(number, attribute, pid, -1, -1, _CLOSE_ON_EXEC)
    if descriptor < 0:
        why = os.strerror(ctypes.get_errno())
        raise Unsupported(f"perf_event_open: {why}; allow it with: sysctl kernel.perf_event_paranoid=2")
    return descriptor


def _read_ns(descriptor: int) -> int:
    return int.from_bytes(os.read(descriptor, 8), "little")
