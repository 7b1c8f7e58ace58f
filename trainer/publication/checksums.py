"""The checksum of a whole from those of its parts, so that no rank needs the whole.

A CRC is linear: that of two strings, one after the other, follows from both and the length of the second.
"""

import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sostenuto.trainer.publication.plan import Box

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31

Run = tuple[int, int, int]
"""First byte in the whole, bytes, checksum."""


def combined(runs: Iterable[Run]) -> int:
    """The checksum of what the runs make together, in the order of their first bytes, without gaps."""
    checksum = 0
    for _, nbytes, own in sorted(runs):
        low, second, third, high = _shift(nbytes)
        checksum = (
            low[checksum & 255]
            ^ second[checksum >> 8 & 255]
            ^ third[checksum >> 16 & 255]
            ^ high[checksum >> 24]
        ) ^ own
    return checksum


def runs_of(box: Box, shape: tuple[int, ...], content: NDArray[np.uint8]) -> Iterator[Run]:
    """What of a part lies in one piece in the whole.  `content`: of the part alone."""
    if not content.nbytes:
        return
    # Dimensions behind the last that is cut are whole in every run.
    cut = max((axis for axis, (start, end) in enumerate(box) if (start, end) != (0, shape[axis])), default=0)
    lengths = [end - start for start, end in box]
    itemsize = content.nbytes // int(np.prod(lengths, dtype=np.int64))
    inner = itemsize * int(np.prod(shape[cut + 1 :], dtype=np.int64))
    nbytes = inner * (lengths[cut] if lengths else 1)
    strides = [itemsize * int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
    base = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    for number, index in enumerate(np.ndindex(*lengths[:cut])):
        at = base + sum(i * strides[axis] for axis, i in enumerate(index))
        yield at, nbytes, zlib.crc32(content[number * nbytes : (number + 1) * nbytes].data)


@lru_cache(maxsize=4096)
def _shift(nbytes: int) -> tuple[tuple[int, ...], ...]:
    """What becomes of each byte of a checksum when so many zero bytes follow."""
    power = _power(nbytes)
    bits = [_times(power, 1 << bit) for bit in range(32)]
    tables: list[tuple[int, ...]] = []
    for place in range(4):
        table = [0]
        for bit in bits[8 * place : 8 * place + 8]:
            table += [bit ^ value for value in table]
        tables.append(tuple(table))
    return tuple(tables)


def _power(nbytes: int) -> int:
    """x to the 8 * nbytes, modulo the polynomial."""
    found, square, exponent = _ONE, _ONE >> 1, 8 * nbytes
    while exponent:
        if exponent & 1:
            found = _times(square, found)
        square = _times(square, square)
        exponent >>= 1
    return found


def _times(one: int, other: int) -> int:
    """The product of two polynomials of which the highest bit is the lowest power."""
    found, bit = 0, _ONE
    while one:
        if one & bit:
            found ^= other
            one ^= bit
        bit >>= 1
        other = other >> 1 ^ _POLYNOMIAL if other & 1 else other >> 1
    return found
