"""What has changed of one tensor: gaps between changed elements, and their new values.

A gap takes one byte below 128, two below 16,384, and so on: seven bits a byte, the lowest first, the highest
bit set on all but the last.  A tensor of which so much has changed that this would be larger than itself is
sent whole.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Form = Literal["same", "gaps", "whole"]

_BITS = 7
_MORE = np.uint8(1 << _BITS)


class Encoded(NamedTuple):
    form: Form
    changed: int
    """Elements, counted also where the tensor is sent whole."""
    content: Bytes


def encode(old: Bytes, new: Bytes, itemsize: int) -> Encoded:
    """How to get from the bytes of `old` to those of `new`, for elements of `itemsize` bytes."""
    kind = np.dtype(f"u{itemsize}")
    was, is_now = old.view(kind), new.view(kind)
    differs = was != is_now
    count = int(np.count_nonzero(differs))
    if not count:
        return Encoded("same", 0, np.empty(0, np.uint8))
    if count * (1 + itemsize) >= new.nbytes:
        return Encoded("whole", count, new)
    changed = np.flatnonzero(differs)
    gaps = _pack(np.diff(changed, prepend=-1) - 1)
    if len(gaps) + count * itemsize >= new.nbytes:
        return Encoded("whole", count, new)
    return Encoded("gaps", count, np.concatenate([gaps, is_now[changed].view(np.uint8)]))


def apply(encoded: Encoded, content: Bytes, itemsize: int) -> None:
    """Make of the old bytes, in place, the new ones.  ValueError for what cannot be meant for them."""
    if encoded.form == "same":
        return
    if encoded.form == "whole":
        content[:] = encoded.content
        return
    values = encoded.changed * itemsize
    if values > len(encoded.content):
        raise ValueError("has fewer bytes than changed elements")
    cut = len(encoded.content) - values
    at = np.cumsum(_unpack(encoded.content[:cut]) + 1) - 1
    elements = content.view(f"u{itemsize}")
    if len(at) != encoded.changed or (len(at) and at[-1] >= len(elements)):
        raise ValueError("changes elements that the tensor does not have")
    elements[at] = np.frombuffer(encoded.content[cut:].tobytes(), dtype=elements.dtype)


def _pack(gaps: NDArray[np.int64]) -> Bytes:
    lengths = np.ones(len(gaps), dtype=np.int64)
    rest = gaps >> _BITS
    while rest.any():
        lengths += rest > 0
        rest >>= _BITS
    ends = np.cumsum(lengths)
    packed = np.empty(int(ends[-1]), dtype=np.uint8)
    starts = ends - lengths
    for place in range(int(lengths.max())):
        here = lengths > place
        low = ((gaps[here] >> (_BITS * place)) & (_MORE - 1)).astype(np.uint8)
        packed[starts[here] + place] = low | np.where(lengths[here] > place + 1, _MORE, np.uint8(0))
    return packed


def _unpack(packed: Bytes) -> NDArray[np.int64]:
    is_last = packed < _MORE
    if not len(packed) or not is_last[-1]:
        raise ValueError("its gaps are cut off")
    starts = np.concatenate([[0], np.flatnonzero(is_last)[:-1] + 1])
    lengths = np.diff(starts, append=len(packed))
    places = np.arange(len(packed)) - np.repeat(starts, lengths)
    if lengths.max() * _BITS > 62:
        raise ValueError("has a gap beyond any tensor")
    return np.add.reduceat((packed & (_MORE - 1)).astype(np.int64) << (_BITS * places), starts)
