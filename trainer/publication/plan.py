"""Which part of each tensor goes from which rank to which, computed from both layouts.  Pure.

A layout says for each tensor which box of it a rank has: a range in each dimension.  Ranks may be cut by
rows, by columns, unevenly, may have the same parts or nothing of a tensor; sources and destinations need not
be cut alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from sostenuto.errors import EngineError

Box = tuple[tuple[int, int], ...]
"""First index and the one behind the last, in each dimension."""
Layout = Mapping[str, Box]
"""A tensor that a rank has nothing of is missing."""


@dataclass(frozen=True, slots=True)
class Move:
    """A part of a tensor that one source sends."""

    source: int
    name: str
    box: Box


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def count(box: Box) -> int:
    """Elements."""
    return prod(end - start for start, end in box)


def inside(box: Box, outer: Box) -> Box:
    """`box` by the indices of a part of the tensor that begins where `outer` does."""
    return tuple((start - first, end - first) for (start, end), (first, _) in zip(box, outer, strict=True))


def plan(sources: Sequence[Layout], wanted: Layout) -> list[Move]:
    """Every wanted element once; of several ranks that have it, from the one that sends the least so far.

    EngineError for a tensor of which no rank has a part.
    """
    loads = [0] * len(sources)
    moves: list[Move] = []
    for name, box in wanted.items():
        left = [box] if count(box) else []
        for source in sorted(range(len(sources)), key=lambda rank: (loads[rank], rank)):
            held = sources[source].get(name)
            if held is None:
                continue
            rest: list[Box] = []
            for part in left:
                found = common(part, held)
                if found is None:
                    rest.append(part)
                    continue
                moves.append(Move(source, name, found))
                loads[source] += count(found)
                rest += _without(part, found)
            left = rest
        if left:
            raise EngineError(f"{name!r}: no rank has {_told(left[0])} of it; publish with all ranks")
    return moves


def common(one: Box, other: Box) -> Box | None:
    """What both have; None for nothing."""
    if len(one) != len(other):
        return None
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < end for start, end in common) else None


def _without(box: Box, part: Box) -> list[Box]:
    """What is left of `box`, as boxes that do not overlap."""
    left: list[Box] = []
    for axis, (start, end) in enumerate(part):
        first, last = box[axis]
        cuts = [cut for cut in ((first, start), (end, last)) if cut[0] < cut[1]]
        left += [(*part[:axis], cut, *box[axis + 1 :]) for cut in cuts]
    return left


def _told(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{end}" for start, end in box) + "]"
