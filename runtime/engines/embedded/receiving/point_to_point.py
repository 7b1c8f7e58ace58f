"""From every rank of the trainer at once: each part of a tensor from a rank that has it, into its place."""

import socket
import zlib
from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.embedded.receiving.near import Near
from sostenuto.runtime.engines.embedded.receiving.receiver import PUBLISH_AGAIN, Bytes, Incoming
from sostenuto.runtime.engines.embedded.receiving.room import Room
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.trainer.publication.listening import read_line, send_line
from sostenuto.trainer.publication.manifest import Manifest, Shard, TensorEntry
from sostenuto.trainer.publication.plan import Layout, Move, count, inside, plan, whole

_BUFFER_BYTES = 4 << 20
_ALIGNMENT_BYTES = 64


class PointToPointReceiver:
    """An engine that has all of the weights, whatever the trainer's ranks have."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._near = Near()

    def receive(self, manifest: Manifest, wanted: Collection[str]) -> Generator[Incoming]:
        entries = [entry for entry in manifest.tensors if entry.name in wanted]
        room = self._room.beside(sum(_aligned(entry.nbytes) for entry in entries), wanted)
        # What is whole is verified as such, by who takes it.
        layout = {entry.name: whole(entry.shape) for entry in entries}
        found = fetch(manifest, layout, room=room, checked=False, near=self._near)
        # Each rank has two memories that take turns.
        self._near.keep(2 * len(manifest.shards))
        for entry in entries:
            yield Incoming(entry, found[entry.name], is_lasting=True)


def fetch(
    manifest: Manifest,
    layout: Layout,
    *,
    room: Bytes | None = None,
    checked: bool = True,
    near: Near | None = None,
) -> dict[str, Bytes]:
    """The bytes of an engine rank's part of each tensor, in `room`.  Refusal when one cannot be had.

    `checked`: verify every piece against the checksum that its sender has of it.  `near`: for ranks on
    this machine; None: they send, too.
    """
    entries = {entry.name: entry for entry in manifest.tensors}
    try:
        moves = plan([shard.boxes for shard in manifest.shards], layout)
    except EngineError as error:
        raise Refusal(422, "manifest", str(error), PUBLISH_AGAIN) from error
    sizes = {name: _nbytes(entries[name], layout) for name in layout}
    if room is None:
        room = np.empty(sum(map(_aligned, sizes.values())), dtype=np.uint8)
    ends = accumulate(map(_aligned, sizes.values()))
    starts = (end - _aligned(size) for end, size in zip(ends, sizes.values(), strict=True))
    found = {name: room[at : at + sizes[name]] for name, at in zip(layout, starts, strict=True)}
    places = {name: found[name].reshape(*_lengths(layout, name), -1) for name in layout if found[name].nbytes}
    calls = [
        (shard, part)
        for rank, shard in enumerate(manifest.shards)
        if (part := [move for move in moves if move.source == rank])
    ]
    with ThreadPoolExecutor(max(len(calls), 1)) as pool:
        running = [
            pool.submit(_call, manifest.version, *call, layout, places, checked, near) for call in calls
        ]
        for call in running:
            call.result()
    return found


def _call(
    version: str,
    shard: Shard,
    moves: Sequence[Move],
    layout: Layout,
    places: Mapping[str, Bytes],
    checked: bool,
    near: Near | None,
) -> None:
    """Ask one rank for its moves, and put each where it belongs."""
    source = shard.source
    where = f"{source.host}:{source.port}"
    try:
        with socket.create_connection((source.host, source.port), source.deadline_s) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            pieces = [(move.name, move.box) for move in moves]
            asked = {"key": source.key, "version": version, "pieces": pieces, "checked": checked}
            send_line(connection, asked)
            said = read_line(connection)
            if "refused" in said:
                raise Refusal(
                    409, "point_to_point", f"version: {said['refused']}", "prepare the newest version"
                )
            memory = near and near.memory(said)
            send_line(connection, {"send": memory is None})
            if memory is None:
                own = [_receive(connection, move, layout, places, checked) for move in moves]
            else:
                own = [_copy(memory, said["begins"], shard, move, layout, places, checked) for move in moves]
                send_line(connection, {})
            told = read_line(connection)["checksums"]
    except (OSError, ValueError) as error:
        raise Refusal(504, "point_to_point", f"rank at {where}: {error}", PUBLISH_AGAIN) from error
    if checked and told != own:
        wrong = next(move for move, one, other in zip(moves, own, told, strict=True) if one != other)
        message = f"tensor {wrong.name!r}: what arrived from {where} does not have its sender's checksum"
        raise Refusal(422, "tensor", message, PUBLISH_AGAIN)


def _copy(
    memory: Bytes, begins: Mapping[str, int], shard: Shard, move: Move, layout: Layout,
    places: Mapping[str, Bytes], checked: bool,
) -> int:  # fmt: skip
    """The checksum of a piece that was copied; 0 where nobody asks."""
    held, place = shard.boxes[move.name], _place(move, layout, places)
    itemsize = place.shape[-1]
    there = memory[begins[move.name] : begins[move.name] + count(held) * itemsize]
    part = there.reshape(*(end - start for start, end in held), itemsize)
    place[...] = part[tuple(slice(start, end) for start, end in inside(move.box, held))]
    return zlib.crc32(np.ascontiguousarray(place).data) if checked else 0


def _receive(
    connection: socket.socket, move: Move, layout: Layout, places: Mapping[str, Bytes], checked: bool
) -> int:
    """The checksum of a piece that has arrived; 0 where nobody asks."""
    place = _place(move, layout, places)
    piece = place if place.flags.c_contiguous else np.empty(place.shape, dtype=np.uint8)
    view = piece.reshape(-1).data
    while view:
        count_bytes = connection.recv_into(view)
        if not count_bytes:
            raise ConnectionError("it hung up")
        view = view[count_bytes:]
    if piece is not place:
        place[...] = piece
    return zlib.crc32(piece.reshape(-1).data) if checked else 0


def _place(move: Move, layout: Layout, places: Mapping[str, Bytes]) -> Bytes:
    box = inside(move.box, layout[move.name])
    return places[move.name][tuple(slice(start, end) for start, end in box)]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _lengths(layout: Layout, name: str) -> list[int]:
    return [end - start for start, end in layout[name]]


def _nbytes(entry: TensorEntry, layout: Layout) -> int:
    elements = count(whole(entry.shape))
    return entry.nbytes // elements * count(layout[entry.name]) if elements else 0
