"""What becomes of large memory that is free again."""

import ctypes
import sys
from functools import cache

_MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of glibc's malloc.h."""
_LARGE_BYTES = 1 << 20


@cache
def give_back_large_memory() -> None:
    """From now on it goes back to the system at once; elsewhere than with glibc nothing happens.

    glibc keeps what is below 32 MB on a heap.  What a layer leaves there for the backward pass parts the
    room that the next layer needs: a pass of 8,192 tokens took three times the memory that it held at any
    moment.  Asking anew costs such a pass a twelfth of its time.
    """
    if sys.platform != "linux":
        return
    malloc_options = getattr(ctypes.CDLL(None), "mallopt", None)
    if malloc_options is not None:
        malloc_options(_MMAP_THRESHOLD, _LARGE_BYTES)
