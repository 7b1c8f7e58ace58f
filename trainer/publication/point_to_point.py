"""Publication from every rank that trains to every engine at once, each part straight from who has it.

- No rank gathers the weights: each holds a copy of its own share in memory, and engines call for the parts
  that they want, of all ranks at the same time.
- The first rank describes everything: where each rank listens, which box of each tensor it has, and the
  checksums of the whole tensors, which follow from those of the parts.
- Who is on the same machine reads the memory itself, while its call lasts; to others the kernel sends from
  there.
- Every call is served on its own, so an engine that is gone or late holds up nobody.
"""

import mmap
import os
import secrets
import socket
import struct
import threading
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from torch import Tensor

from sostenuto.errors import TrainerError
from sostenuto.trainer.publication.checksums import Run, combined, runs_of
from sostenuto.trainer.publication.listening import Listener, read_line, send_line
from sostenuto.trainer.publication.manifest import Manifest, Selector, Shard, Source, TensorEntry
from sostenuto.trainer.publication.plan import Box, common, inside
from sostenuto.trainer.publication.snapshot import Named
from sostenuto.trainer.ranks import box_of, local
from sostenuto.trainer.tensors import as_bytes
from sostenuto.types import Version

Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole."""
    box: Box
    content: NDArray[np.uint8]
    """The bytes of the part alone."""


class PointToPointSender:
    """One rank's side.  All ranks call `publish` alike, and get the same manifest."""

    def __init__(self, host: str, *, deadline_s: float, gather: Gather = lambda own: [own]) -> None:
        """`host`: where engines reach this rank.  `deadline_s`: how long an engine may take no bytes.

        `gather`: what every rank gives it, first rank first.
        """
        self._gather = gather
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._held: _Held | None = None
        self._spare: _Memory | None = None
        """Of the version before, which may still be on its way."""
        self._listener = Listener(host, self._called)
        self._source = Source(
            host=host, port=self._listener.port, key=self._listener.key, deadline_s=deadline_s
        )

    def publish(self, version: Version, tensors: Named, *, selector: Selector = "target") -> Manifest:
        return self.publish_parts(
            version, [_part(name, tensor) for name, tensor in tensors], selector=selector
        )

    def publish_parts(
        self, version: Version, parts: list[Part], *, selector: Selector = "target"
    ) -> Manifest:
        held = _Held(str(version), parts, self._room(sum(part.content.nbytes for part in parts)))
        boxes = {part.name: part.box for part in parts if part.content.nbytes}
        told = _Told(
            Shard(source=self._source, boxes=boxes),
            [(part.name, part.dtype, part.shape) for part in parts],
            {part.name: list(runs_of(part.box, part.shape, part.content)) for part in parts},
        )
        # Nobody is told of a version before every rank has it.
        everybody: list[_Told] = self._gather(told)
        with self._lock:
            self._spare, self._held = self._held and self._held.memory, held
        self._gather(None)
        entries = _entries(everybody)
        return Manifest(
            version=str(version),
            path="",
            nbytes=sum(entry.nbytes for entry in entries),
            tensors=entries,
            selector=selector,
            transport="point_to_point",
            shards=tuple(one.shard for one in everybody),
        )

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            self._held = None

    def _called(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        wanted = _Asked.model_validate(asked)
        with self._lock:
            held = self._held
            if held is not None:
                held.memory.calls += 1
        try:
            self._send(connection, wanted, held)
        finally:
            if held is not None:
                with self._lock:
                    held.memory.calls -= 1

    def _room(self, nbytes: int) -> "_Memory":
        """For a version: that of the one before the last, unless it is still on its way."""
        with self._lock:
            spare = self._spare
            if spare is not None and spare.nbytes == nbytes and not spare.calls:
                return spare
        return _Memory(nbytes)

    def _send(self, connection: socket.socket, wanted: "_Asked", held: "_Held | None") -> None:
        if held is None or wanted.version != held.version:
            holds = held and held.version
            send_line(connection, {"refused": f"version {wanted.version} is not held any more, {holds} is"})
            return
        if strange := [name for name, box in wanted.pieces if not held.has(name, box)]:
            send_line(connection, {"refused": f"{strange[0]!r} is not all here"})
            return
        _never_wait_for_ever(connection, self._deadline_s)
        send_line(connection, held.where(wanted.pieces))
        if read_line(connection)["send"]:
            for name, box in wanted.pieces:
                held.send(connection, name, box)
        else:
            # The memory stays as it is until the other side is done with it.
            read_line(connection)
        checksums = [held.checksum(name, box) for name, box in wanted.pieces] if wanted.checked else []
        send_line(connection, {"checksums": checksums})


class _Asked(BaseModel):
    """What an engine wants of this rank."""

    version: str
    pieces: list[tuple[str, Box]]
    checked: bool


@dataclass(frozen=True, slots=True)
class _Told:
    """What ranks tell each other about a version."""

    shard: Shard
    tensors: list[tuple[str, str, tuple[int, ...]]]
    runs: dict[str, list[Run]]


class _Memory:
    """Memory that has a descriptor: the kernel sends from there."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.calls = 0
        """That send from here."""
        self.name = f"sostenuto-weights-{secrets.token_hex(16)}"
        self.descriptor = os.memfd_create(self.name)
        weakref.finalize(self, os.close, self.descriptor)
        os.truncate(self.descriptor, nbytes)
        mapped: mmap.mmap | bytes = mmap.mmap(self.descriptor, nbytes) if nbytes else b""
        self.content = np.frombuffer(mapped, dtype=np.uint8)


class _Held:
    """A copy of a rank's share."""

    def __init__(self, version: str, parts: list[Part], memory: _Memory) -> None:
        self.version = version
        self.memory = memory
        self._parts: dict[str, tuple[Box, NDArray[np.uint8]]] = {}
        self._checksums: dict[tuple[str, Box], int] = {}
        at = 0
        for part in parts:
            held = memory.content[at : at + part.content.nbytes]
            at += held.nbytes
            if held.nbytes:
                np.copyto(held, part.content)
                lengths = [end - start for start, end in part.box]
                self._parts[part.name] = part.box, held.reshape(*lengths, -1)

    def where(self, pieces: list[tuple[str, Box]]) -> dict[str, object]:
        """For who is on the same machine: the memory, and where in it the parts begin."""
        start = _address(self.memory.content)
        return {
            "pid": os.getpid(),
            "descriptor": self.memory.descriptor,
            "name": self.memory.name,
            "begins": {name: _address(self._parts[name][1]) - start for name, _ in pieces},
        }

    def has(self, name: str, box: Box) -> bool:
        return name in self._parts and common(box, self._parts[name][0]) == box

    def send(self, connection: socket.socket, name: str, box: Box) -> None:
        """OSError when the receiver is gone or late."""
        part = self._piece(name, box)
        if not part.flags.c_contiguous:
            connection.sendall(np.ascontiguousarray(part).data)
            return
        at, left = _address(part) - _address(self.memory.content), part.nbytes
        while left:
            sent = os.sendfile(connection.fileno(), self.memory.descriptor, at, left)
            at, left = at + sent, left - sent

    def checksum(self, name: str, box: Box) -> int:
        key = name, box
        if key not in self._checksums:
            self._checksums[key] = zlib.crc32(np.ascontiguousarray(self._piece(name, box)).data)
        return self._checksums[key]

    def _piece(self, name: str, box: Box) -> NDArray[np.uint8]:
        held, content = self._parts[name]
        return content[tuple(slice(start, end) for start, end in inside(box, held))]


def _part(name: str, tensor: Tensor) -> Part:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Part(name, dtype, tuple(tensor.shape), box_of(tensor), as_bytes(local(tensor)))


def _entries(everybody: list[_Told]) -> tuple[TensorEntry, ...]:
    """Every tensor once, with the checksum of the whole."""
    known = {name: (dtype, shape) for one in everybody for name, dtype, shape in one.tensors}
    entries: list[TensorEntry] = []
    for name, (dtype, shape) in known.items():
        # Ranks that have the same part tell the same of it.
        runs = {at: (at, nbytes, own) for one in everybody for at, nbytes, own in one.runs.get(name, ())}
        nbytes = _joined(name, sorted(runs.values()))
        entries.append(
            TensorEntry(
                name=name, dtype=dtype, shape=shape, offset=0, nbytes=nbytes, checksum=combined(runs.values())
            )
        )
    return tuple(entries)


def _joined(name: str, runs: list[Run]) -> int:
    """How long the whole is; TrainerError unless the runs make one."""
    end = 0
    for at, nbytes, _ in runs:
        if at != end:
            raise TrainerError(
                f"publication: {name!r}: ranks have byte {min(at, end)} twice or not at all; give parts that "
                "are the same on two ranks, or apart"
            )
        end += nbytes
    return end


def _never_wait_for_ever(connection: socket.socket, deadline_s: float) -> None:
    """A deadline for each read and write that the kernel keeps, since Python's would need a call for each."""
    connection.settimeout(None)
    whole_s, rest_s = divmod(deadline_s, 1)
    told = struct.pack("ll", int(whole_s), int(rest_s * 1_000_000))
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, told)


def _address(array: NDArray[np.uint8]) -> int:
    return array.__array_interface__["data"][0]
