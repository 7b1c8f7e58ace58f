"""Process groups of torch that belong to a publication: made when members meet, dropped when one fails.

They are apart from the group in which ranks train, and from each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed
from torch import Tensor

from sostenuto.trainer.publication.listening import listening

_distributed = cast("Any", torch.distributed)


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in a group."""

    generation: int
    rank: int
    size: int
    port: int
    """Of the store where its members meet."""
    backend: str


class Work(Protocol):
    def wait(self) -> object:
        """Return when it is done; RuntimeError when a member is gone or late."""
        ...


class Store:
    """Where members tell each other their addresses."""

    def __init__(self, host: str) -> None:
        """Open one on `host`."""
        socket = listening(host)
        self.port: int = socket.getsockname()[1]
        self.store: Any = _distributed.TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=socket.detach()
        )


class Group:
    """A process group.  RuntimeError from whatever has to wait for a member that is gone or late."""

    def __init__(self, store: object, seat: Seat, host: str, deadline_s: float) -> None:
        """`host`: the own address, where others connect to.  Returns when all members are there."""
        self.generation = seat.generation
        self.size = seat.size
        self.device = "cuda" if seat.backend == "nccl" else "cpu"
        meeting = _distributed.PrefixStore(f"group-{seat.generation}", store)
        make = _nccl if seat.backend == "nccl" else _gloo
        self._group: Any = make(meeting, seat, host, timedelta(seconds=deadline_s))

    def broadcast(self, tensor: Tensor) -> Work:
        """From rank 0 into `tensor` of everybody else."""
        return self._group.broadcast([tensor], _distributed.BroadcastOptions())


def reach_store(host: str, port: int, deadline_s: float) -> object:
    """The store that a sender has opened."""
    return _distributed.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=deadline_s)
    )


def has_nccl() -> bool:
    return bool(_distributed.is_nccl_available()) and torch.cuda.is_available()


def buckets(nbytes: int, most: int) -> Iterator[tuple[int, int]]:
    """First byte, and byte behind the last, of what is sent at a time."""
    for begin in range(0, nbytes, most):
        yield begin, min(begin + most, nbytes)


def _gloo(store: object, seat: Seat, host: str, timeout: timedelta) -> object:
    # By default gloo looks the machine's own name up, which others may not reach.
    options = _distributed.ProcessGroupGloo._Options()  # noqa: SLF001 - torch has no other name for it
    options._devices = [_distributed.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    return _distributed.ProcessGroupGloo(store, seat.rank, seat.size, options)


def _nccl(store: object, seat: Seat, _host: str, timeout: timedelta) -> object:
    options = _distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001
    return _distributed.ProcessGroupNCCL(store, seat.rank, seat.size, options)
