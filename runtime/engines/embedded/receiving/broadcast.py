"""From a process group: buckets of tensors that the sender broadcasts to all engines together.

A round that fails, since a member is gone or late, is asked for again, from the beginning.
"""

import socket
from collections import deque
from collections.abc import Collection, Generator
from contextlib import closing
from typing import Any, cast
from uuid import uuid4

from torch import Tensor

from sostenuto.runtime.engines.embedded.receiving.receiver import PUBLISH_AGAIN, Bytes, Incoming
from sostenuto.runtime.engines.embedded.receiving.room import Room
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.trainer.publication.groups import Group, Seat, Work, buckets, has_nccl, reach_store
from sostenuto.trainer.publication.listening import read_line, send_line
from sostenuto.trainer.publication.manifest import Manifest, Source, TensorEntry
from sostenuto.trainer.tensors import as_tensor

_ROUNDS = 3
"""Of one publication, before an engine gives up."""
_AHEAD = 2
"""Buckets that are under way while one is taken."""


class BroadcastReceiver:
    """A member of the sender's group."""

    def __init__(self, device: str, room: Room) -> None:
        self._room = room
        self._member = uuid4().hex
        self._device = "cuda" if device.startswith("cuda") and has_nccl() else "cpu"
        self._group: Group | None = None
        self._source: Source | None = None

    def receive(self, manifest: Manifest, wanted: Collection[str]) -> Generator[Incoming]:
        source = manifest.source
        if source is None:
            raise Refusal(422, "manifest", "source: is missing", "send the manifest as the sender made it")
        if self._source is None or self._source.key != source.key:
            self._group, self._source = None, source
        for number in range(1, _ROUNDS + 1):
            try:
                with closing(self._round(manifest, source, wanted)) as arriving:
                    yield from arriving
                break
            except (RuntimeError, OSError) as error:
                self._group = None
                if number == _ROUNDS:
                    message = f"broadcast from {source.host}:{source.port}: {error}"
                    raise Refusal(504, "broadcast", message, PUBLISH_AGAIN) from error

    def _round(self, manifest: Manifest, source: Source, wanted: Collection[str]) -> Generator[Incoming]:
        """All tensors once.  Who leaves early receives the rest all the same: others wait for it."""
        content = self._room.beside(manifest.nbytes, wanted)
        group, self._group = self._seated(manifest, source), None
        left = False
        with closing(_buckets(group, manifest, source, content)) as arriving:
            for entry in arriving:
                if not left:
                    try:
                        yield Incoming(entry, content[entry.offset : entry.offset + entry.nbytes], True)
                    except GeneratorExit:
                        left = True
        self._group = group

    def _seated(self, manifest: Manifest, source: Source) -> Group:
        """The group of this round."""
        with socket.create_connection((source.host, source.port), source.deadline_s) as connection:
            own: str = connection.getsockname()[0]
            connection.settimeout(2 * source.deadline_s + source.gather_s)
            asked = {
                "key": source.key,
                "version": manifest.version,
                "member": self._member,
                "generation": self._group.generation if self._group else 0,
                "device": self._device,
            }
            send_line(connection, asked)
            said = read_line(connection)
        if "refused" in said:
            raise Refusal(409, "broadcast", f"version: {said['refused']}", "prepare the newest version")
        seat = Seat(**cast("Any", said))
        if self._group is not None and self._group.generation == seat.generation:
            return self._group
        store = reach_store(source.host, seat.port, source.deadline_s)
        return Group(store, seat, own, source.deadline_s)


def _buckets(group: Group, manifest: Manifest, source: Source, content: Bytes) -> Generator[TensorEntry]:
    """Each tensor when it has arrived in `content`; the next buckets are under way."""
    there = as_tensor(content)
    waiting: deque[tuple[Work, int, Tensor]] = deque()
    ahead = buckets(manifest.nbytes, source.bucket_bytes)
    entries = deque(manifest.tensors)
    while True:
        while len(waiting) <= _AHEAD and (following := next(ahead, None)) is not None:
            begin, end = following
            buffer = there[begin:end].to(group.device)
            waiting.append((group.broadcast(buffer), begin, buffer))
        if not waiting:
            break
        work, begin, buffer = waiting.popleft()
        work.wait()
        end = begin + len(buffer)
        if group.device != "cpu":
            there[begin:end] = buffer.cpu()
        while entries and entries[0].offset + entries[0].nbytes <= end:
            yield entries.popleft()
    yield from entries
