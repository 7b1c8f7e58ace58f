"""How fast this machine moves bytes, tried with a few megabytes at the start of a run."""

import os
import socket
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sostenuto.errors import TrainerError
from sostenuto.trainer.publication.costs import Bandwidths
from sostenuto.trainer.publication.listening import listening
from sostenuto.trainer.publication.shared_memory import SHARED_MEMORY

_BYTES = 32 << 20
_REPEATS = 3
_BUFFER_BYTES = 4 << 20


def measure(directory: Path | None, host: str) -> Bandwidths:
    """`directory`: the shared folder, if there is one; `host`: where engines call.

    TrainerError for one that cannot be used.
    """
    source = np.random.default_rng(0).integers(0, 256, _BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    write, read = (None, None) if directory is None else _disk(directory, source)
    return Bandwidths(
        copy=_rate(lambda: np.copyto(target, source)),
        checksum=_rate(lambda: zlib.crc32(source.data)),
        memory=_rate(lambda: _written(SHARED_MEMORY, source, sync=False)),
        write=write,
        read=read,
        network=_network(host, source),
    )


def _rate(act: Callable[[], object]) -> float:
    """Bytes per second of the fastest of a few."""
    act()
    took: list[float] = []
    for _ in range(_REPEATS):
        before_s = time.perf_counter()
        act()
        took.append(time.perf_counter() - before_s)
    return _BYTES / max(min(took), 1e-9)


def _written(place: Path, source: np.ndarray[tuple[int], np.dtype[np.uint8]], *, sync: bool) -> None:
    with tempfile.TemporaryFile(dir=place, buffering=0) as file:
        file.write(source.data)
        if sync:
            os.fsync(file.fileno())


def _disk(directory: Path, source: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> tuple[float, float]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write = _rate(lambda: _written(directory, source, sync=True))
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(source.data)
            buffer = bytearray(_BYTES)
            read = _rate(lambda: os.preadv(file.fileno(), [buffer], 0))
    except OSError as error:
        raise TrainerError(
            f"learner.publication.directory: {directory}: {error.strerror}; name a folder that trainer and "
            f"engines share, with room for {_BYTES} bytes"
        ) from error
    return write, read


def _network(host: str, source: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> float:
    """Through one connection of this machine to itself."""
    buffer = memoryview(bytearray(_BYTES))
    with listening(host) as listener, socket.create_connection(listener.getsockname()) as receiving:
        sending, _ = listener.accept()
        for connection, option in ((sending, socket.SO_SNDBUF), (receiving, socket.SO_RCVBUF)):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

        def once() -> None:
            sender = threading.Thread(target=sending.sendall, args=(source.data,))
            sender.start()
            at = 0
            while at < _BYTES:
                at += receiving.recv_into(buffer[at:])
            sender.join()

        with sending:
            return _rate(once)
