"""Which transport is the fastest: conversion, transfer and application from measured bandwidths.  Pure.

- Conversion is what the trainer does before anybody hears of a version, application what engines do with
  bytes that have arrived; the swap itself takes no time that depends on the weights.
- Engines of one machine work at the same time, as far as it has processors.
"""

from dataclasses import dataclass
from math import ceil, log2

from sostenuto.trainer.publication.manifest import Transport

_DELTA_BYTES = 3.5
"""Of a changed bfloat16 element, against two of the whole."""


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes per second; None for what there is nothing to measure of."""

    copy: float
    checksum: float
    memory: float
    """Into new shared memory."""
    write: float | None
    """Onto the disk of the shared folder, until they are there."""
    read: float | None
    network: float
    """Through one connection."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Who publishes what to whom."""

    nbytes: int
    ranks: int
    engines: int
    processors: int
    """What engines and trainer share."""
    is_local: bool
    """All engines are on the trainer's machine."""
    has_room: bool
    """In shared memory, for two versions."""
    reads_files: bool
    """An engine can take weights from files alone."""
    quantized: bool
    changed: float
    """Share of the elements that a step changes."""
    deltas: int
    """Between two full versions."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds from the trainer's weights to all engines being ready."""

    transport: Transport
    conversion_s: float
    transfer_s: float
    apply_s: float

    @property
    def total_s(self) -> float:
        return self.conversion_s + self.transfer_s + self.apply_s

    def __str__(self) -> str:
        parts = f"{self.conversion_s:.3f} + {self.transfer_s:.3f} + {self.apply_s:.3f}"
        return f"{self.transport} {self.total_s:.3f} s ({parts})"


def estimates(fleet: Fleet, speed: Bandwidths) -> list[Estimate]:
    """Of every transport that is possible, the fastest first; what is equally fast, the simplest first."""
    possible = [
        _shared_memory(fleet, speed) if fleet.is_local and fleet.has_room else None,
        *_disk(fleet, speed),
        None if fleet.reads_files else _broadcast(fleet, speed),
        None if fleet.reads_files else _point_to_point(fleet, speed),
    ]
    return sorted((found for found in possible if found is not None), key=lambda found: found.total_s)


def _shared_memory(fleet: Fleet, speed: Bandwidths) -> Estimate:
    size = fleet.nbytes
    # To map pages that are there takes about as long as to copy them.
    mapped = _together(fleet) * size / speed.copy
    return Estimate(
        "shared_memory", size / speed.checksum, size / speed.memory + mapped, _in_place(fleet, speed)
    )


def _disk(fleet: Fleet, speed: Bandwidths) -> list[Estimate]:
    if speed.write is None or speed.read is None:
        return []
    size, applied = fleet.nbytes, _applied(fleet, speed)
    moved = size / speed.write + _together(fleet) * size / speed.read
    share = min(fleet.changed * _DELTA_BYTES / 2, 1.0)
    # Some are full, and every one is compared with the one before, which is kept and patched.
    mean = (1 + share * fleet.deltas) / (1 + fleet.deltas)
    patched = _together(fleet) * size / speed.copy
    return [
        Estimate("disk", size / speed.checksum, moved, applied),
        Estimate(
            "disk_delta", size / speed.checksum + 2 * size / speed.copy, moved * mean, applied + patched
        ),
    ]


def _broadcast(fleet: Fleet, speed: Bandwidths) -> Estimate:
    size = fleet.nbytes
    # Members hand on what they have: after each turn twice as many have it.
    turns = ceil(log2(fleet.engines + 1))
    return Estimate(
        "broadcast",
        size / speed.checksum + size / speed.copy,
        turns * size / speed.network,
        _in_place(fleet, speed),
    )


def _point_to_point(fleet: Fleet, speed: Bandwidths) -> Estimate:
    own = fleet.nbytes / fleet.ranks
    lanes = min(fleet.engines, fleet.processors) if fleet.is_local else fleet.ranks
    return Estimate(
        "point_to_point",
        own / speed.checksum + own / speed.copy,
        fleet.nbytes * fleet.engines / lanes / speed.network,
        _in_place(fleet, speed),
    )


def _in_place(fleet: Fleet, speed: Bandwidths) -> float:
    """Verified and served from where it has arrived, but for what is kept in few bits."""
    copied = fleet.nbytes if fleet.quantized else 0
    return _together(fleet) * (fleet.nbytes / speed.checksum + copied / speed.copy)


def _applied(fleet: Fleet, speed: Bandwidths) -> float:
    """Copied beside the weights that are served, and verified."""
    return _together(fleet) * (fleet.nbytes / speed.copy + fleet.nbytes / speed.checksum)


def _together(fleet: Fleet) -> float:
    """How much longer all engines take than one."""
    return max(fleet.engines / fleet.processors, 1.0) if fleet.is_local else 1.0
