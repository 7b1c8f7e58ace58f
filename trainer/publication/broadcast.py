"""Publication through a process group: the trainer sends once, all engines receive together.

- An engine that is given the manifest calls, and waits for a seat.  A round begins when as many have called
  as took part the last time, or `gather_s` after the first one; who comes later gets a round of its own.
- The group lives on while the same members come.  When one is gone or late the round fails for those who
  wait for it, at the deadline; they call again, and the next round goes without it.
- What is sent is a copy, so the trainer goes on; the newest version alone is held.
"""

import logging
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from sostenuto.trainer.publication.groups import Group, Seat, Store, buckets, has_nccl
from sostenuto.trainer.publication.listening import Listener, send_line
from sostenuto.trainer.publication.manifest import Manifest, Selector, Source
from sostenuto.trainer.publication.snapshot import Named, Snapshot
from sostenuto.trainer.tensors import as_array
from sostenuto.types import Version

_log = logging.getLogger(__name__)


class _Asked(BaseModel):
    """What a receiver says of itself."""

    version: str
    member: str
    generation: int
    device: str


@dataclass(slots=True)
class _Caller:
    """A receiver that waits for a seat."""

    connection: socket.socket
    member: str
    generation: int
    """Of the group that it still has; 0: none."""
    device: str
    answered: threading.Event

    @property
    def is_there(self) -> bool:
        """It says nothing while it waits: whatever can be read is that it has hung up."""
        return not select.select([self.connection], [], [], 0)[0]


@dataclass(slots=True)
class _Held:
    """The version that is sent."""

    manifest: Manifest
    content: Tensor
    device: str


class BroadcastSender:
    """Sends the versions of one trainer process."""

    def __init__(
        self,
        host: str,
        *,
        gather_s: float,
        deadline_s: float,
        expected: int = 1,
        bucket_bytes: int = 16 << 20,
    ) -> None:
        """`deadline_s`: how long one member may keep the others waiting.

        `expected`: how many engines call for the first version.
        """
        self._gather_s = gather_s
        self._deadline_s = deadline_s
        self._listener = Listener(host, self._called)
        self._source = Source(
            host=host, port=self._listener.port, key=self._listener.key, deadline_s=deadline_s,
            gather_s=gather_s, bucket_bytes=bucket_bytes,
        )  # fmt: skip
        self._store = Store(host)
        self._changed = threading.Condition()
        self._callers: list[_Caller] = []
        self._expected = expected
        self._served: set[str] = set()
        """Members that have the version, or are being sent it."""
        self._held: _Held | None = None
        self._spare: Tensor | None = None
        """Memory of the version before."""
        self._sending: Tensor | None = None
        self._closed = False
        self._group: Group | None = None
        self._members: list[str] = []
        self._generation = 0
        threading.Thread(target=self._rounds, name="broadcast", daemon=True).start()

    def publish(self, version: Version, tensors: Named, *, selector: Selector = "target") -> Manifest:
        named = list(tensors)
        snapshot = Snapshot.of(named)
        content = self._room(snapshot.nbytes)
        whole = as_array(content)
        for offset, raw in snapshot.chunks:
            np.copyto(whole[offset : offset + raw.nbytes], raw)
        manifest = Manifest(
            version=str(version),
            path="",
            nbytes=snapshot.nbytes,
            tensors=snapshot.entries,
            selector=selector,
            transport="broadcast",
            source=self._source,
        )
        device = "cuda" if has_nccl() and all(tensor.is_cuda for _, tensor in named) else "cpu"
        with self._changed:
            self._held = _Held(manifest, content, device)
            if self._served:
                self._expected = len(self._served)
            self._served = set()
        return manifest

    @property
    def generation(self) -> int:
        """How many groups there have been."""
        return self._generation

    def expect(self, receivers: int) -> None:
        """So many will call for the version; a round waits for them, for `gather_s` at most."""
        with self._changed:
            self._expected = receivers
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._listener.close()

    def _room(self, nbytes: int) -> Tensor:
        """For a version: the memory of the one before the last, unless that is still being sent."""
        with self._changed:
            spare, self._spare = self._spare, self._held and self._held.content
            if spare is not None and spare.nbytes == nbytes and spare is not self._sending:
                return spare
        return torch.empty(nbytes, dtype=torch.uint8)

    def _called(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        """Wait for a seat; the connection is closed when this returns."""
        told = _Asked.model_validate(asked)
        caller = _Caller(connection, told.member, told.generation, told.device, threading.Event())
        with self._changed:
            held = None if self._held is None else self._held.manifest.version
            if told.version == held:
                self._callers.append(caller)
                self._changed.notify_all()
        if told.version != held:
            send_line(connection, {"refused": f"version {told.version} is not held any more, {held} is"})
            return
        caller.answered.wait()

    def _rounds(self) -> None:
        while True:
            with self._changed:
                callers = self._gathered()
                held = self._held
                self._sending = held and held.content
            if callers is None or held is None:
                return
            try:
                if there := _still_there(callers):
                    self._round(there, held)
            finally:
                self._sending = None
                for caller in callers:
                    caller.answered.set()

    def _gathered(self) -> list[_Caller] | None:
        """Those of the next round; None at the end."""
        first_s: float | None = None
        while not self._closed:
            if self._callers and first_s is None:
                first_s = time.monotonic()
            left_s = None if first_s is None else first_s + self._gather_s - time.monotonic()
            missing = self._expected - len(self._served) - len(self._callers)
            if self._callers and (missing <= 0 or (left_s or 0.0) <= 0):
                gathered, self._callers = self._callers, []
                return gathered
            self._changed.wait(left_s)
        return None

    def _round(self, callers: Sequence[_Caller], held: _Held) -> None:
        members = {caller.member for caller in callers}
        with self._changed:
            # Now, since they may have all of it, and ask for the next one, before this side knows.
            if self._held is held:
                self._served |= members
        try:
            group = self._seated(callers, held)
            content = held.content.to(group.device)
            for begin, end in buckets(held.manifest.nbytes, self._source.bucket_bytes):
                group.broadcast(content[begin:end]).wait()
        except (RuntimeError, OSError) as error:
            # Who was waiting calls again, and does not wait for who is gone.
            self._group = None
            with self._changed:
                if self._held is held:
                    self._served -= members
                    self._expected = len(self._served) + max(len(callers) - 1, 1)
            _log.warning(
                "publication: version %s: a round of %d engines failed: %s",
                held.manifest.version, len(callers), error,
            )  # fmt: skip

    def _seated(self, callers: Sequence[_Caller], held: _Held) -> Group:
        """The group of the callers: the one they have, or a new one."""
        members = [caller.member for caller in callers]
        group = self._group
        has = {caller.generation for caller in callers}
        if group is not None and members == self._members and has == {group.generation}:
            self._tell(callers, group.generation, group.device)
            return group
        self._group = None
        self._generation += 1
        device = "cuda" if {held.device, *(caller.device for caller in callers)} == {"cuda"} else "cpu"
        seat = self._tell(callers, self._generation, device)
        group = Group(self._store.store, seat, self._listener.host, self._deadline_s)
        self._group, self._members = group, members
        return group

    def _tell(self, callers: Sequence[_Caller], generation: int, device: str) -> Seat:
        """Everybody's seat; the own one is returned."""
        backend = "nccl" if device == "cuda" else "gloo"
        seats = [
            Seat(generation, rank, len(callers) + 1, self._store.port, backend)
            for rank in range(len(callers) + 1)
        ]
        for caller, seat in zip(callers, seats[1:], strict=True):
            send_line(caller.connection, asdict(seat))
        return seats[0]


def _still_there(callers: Sequence[_Caller]) -> list[_Caller]:
    """Without those that hung up; of a member that called twice, the last call."""
    last = {caller.member: caller for caller in callers if caller.is_there}
    return sorted(last.values(), key=lambda caller: caller.member)
