"""Where KV lies.  Requests that run have a row in a lane; programs that are held, a copy of exact size.

- A lane is one tensor of rows of equal width; widths double, so a row is at least half used, except in
  the narrowest lane, and attention pads a row at most to the longest of its lane.
- Rows 0 .. decoding-1 of a lane decode, the rows after them still prefill; no row between is free.

Suffixes as in `attention`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

_NARROWEST = 256


@dataclass(frozen=True, slots=True)
class KvShape:
    """Of one token's KV, the same in each layer."""

    layers: int
    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device
    added_layers: int = 0
    """Behind those of the model, in the keys alone; see `routes`."""

    @property
    def token_bytes(self) -> int:
        keys = (self.layers + self.added_layers) * self.key_size
        return self.heads * (keys + self.layers * self.value_size) * self.dtype.itemsize

    def empty(self, width: int, rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Uninitialised keys and values: (layers, [rows,] K, width, D); keys have the added layers, too."""
        lead = (self.heads,) if rows is None else (rows, self.heads)
        keys = (self.layers + self.added_layers, *lead, width, self.key_size)
        values = (self.layers, *lead, width, self.value_size)
        key = torch.empty(keys, dtype=self.dtype, device=self.device)
        value = torch.empty(values, dtype=self.dtype, device=self.device)
        return key, value


class Occupant(Protocol):
    """What lies in a row."""

    lane: "Lane | None"
    row: int
    computed: int
    """Its leading tokens whose KV is there."""


@dataclass(slots=True, eq=False)
class Lane:
    """Rows of one width.  `Lanes` alone changes it."""

    width: int
    keys: torch.Tensor
    values: torch.Tensor
    occupants: list[Occupant] = field(default_factory=list[Occupant])
    decoding: int = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]

    def prefix(self, row: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first `tokens` of a row: (layers, K, tokens, D)."""
        return self.keys[:, row, :, :tokens], self.values[:, row, :, :tokens]

    def swap(self, one: int, other: int) -> None:
        if one == other:
            return
        first, second = self.occupants[one], self.occupants[other]
        kept = [view.clone() for view in self.prefix(one, first.computed)]
        self._copy(other, one, second.computed)
        for view, copy in zip(self.prefix(other, first.computed), kept, strict=True):
            view.copy_(copy)
        self.occupants[one], self.occupants[other] = second, first
        second.row, first.row = one, other

    def move(self, source: int, target: int) -> None:
        """Put the occupant of `source` where nobody is any more."""
        if source == target:
            return
        occupant = self.occupants[source]
        self._copy(source, target, occupant.computed)
        self.occupants[target] = occupant
        occupant.row = target

    def _copy(self, source: int, target: int, tokens: int) -> None:
        for view, copy in zip(self.prefix(target, tokens), self.prefix(source, tokens), strict=True):
            view.copy_(copy)


class Lanes:
    """All lanes, narrowest first."""

    def __init__(self, shape: KvShape, *, widest: int, rows: int) -> None:
        self.shape = shape
        self._widest = widest
        self._rows = rows
        self._lanes: dict[int, Lane] = {}

    def __iter__(self) -> Iterator[Lane]:
        return (self._lanes[width] for width in sorted(self._lanes) if self._lanes[width].occupants)

    def add(self, occupant: Occupant, width: int) -> None:
        """Give `occupant` a row for at least `width` tokens, its KV not there yet."""
        lane = self._with_room(self._fitting(width))
        occupant.lane, occupant.row, occupant.computed = lane, len(lane.occupants), 0
        lane.occupants.append(occupant)

    def remove(self, occupant: Occupant) -> None:
        """Take `occupant` out; the rows after it close up."""
        lane, row = _lane_of(occupant), occupant.row
        if row < lane.decoding:
            lane.decoding -= 1
            lane.move(lane.decoding, row)
            row = lane.decoding
        lane.move(len(lane.occupants) - 1, row)
        lane.occupants.pop()
        occupant.lane = None

    def start_decoding(self, occupant: Occupant) -> None:
        lane = _lane_of(occupant)
        lane.swap(occupant.row, lane.decoding)
        lane.decoding += 1

    def restart(self) -> None:
        """Every occupant prefills again, where it is."""
        for lane in self:
            lane.decoding = 0
            for occupant in lane.occupants:
                occupant.computed = 0

    def widen(self, occupant: Occupant, width: int) -> None:
        """Move `occupant` to a lane for at least `width` tokens, if its own is too narrow."""
        lane = _lane_of(occupant)
        if width <= lane.width:
            return
        computed, decodes = occupant.computed, occupant.row < lane.decoding
        kept = [view.clone() for view in lane.prefix(occupant.row, computed)]
        self.remove(occupant)
        self.add(occupant, width)
        self.fill(occupant, kept[0], kept[1])
        if decodes:
            self.start_decoding(occupant)

    def fill(self, occupant: Occupant, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy KV (layers, K, tokens, D) into the occupant's row, after what is there."""
        lane, start = _lane_of(occupant), occupant.computed
        occupant.computed += keys.shape[2]
        for view, copy in zip(lane.prefix(occupant.row, occupant.computed), (keys, values), strict=True):
            view[:, :, start:].copy_(copy)

    def _fitting(self, width: int) -> int:
        fitting = _NARROWEST
        while fitting < width:
            fitting *= 2
        return min(fitting, self._widest)

    def _with_room(self, width: int) -> Lane:
        lane = self._lanes.get(width)
        if lane is not None and len(lane.occupants) < lane.capacity:
            return lane
        self._lanes = {w: kept for w, kept in self._lanes.items() if kept.occupants}
        rows = min(self._rows, 4 if lane is None else lane.capacity * 3 // 2)
        grown = Lane(width, *self.shape.empty(width, rows))
        # Attention multiplies what it masks by zero, and zero times garbage may be NaN.
        grown.keys.zero_()
        grown.values.zero_()
        if lane is not None:
            used = len(lane.occupants)
            grown.keys[:, :used].copy_(lane.keys[:, :used])
            grown.values[:, :used].copy_(lane.values[:, :used])
            grown.occupants, grown.decoding = lane.occupants, lane.decoding
            for occupant in grown.occupants:
                occupant.lane = grown
        self._lanes[width] = grown
        return grown


def _lane_of(occupant: Occupant) -> Lane:
    if occupant.lane is None:
        raise AssertionError("the request has no row")
    return occupant.lane
