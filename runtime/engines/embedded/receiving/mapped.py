"""From a file that the sender has written: shared memory, or a disk that both reach."""

import mmap
from collections.abc import Collection, Generator
from contextlib import suppress
from pathlib import Path

import numpy as np

from sostenuto.runtime.engines.embedded.receiving.receiver import PUBLISH_AGAIN, Incoming, wrong
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.trainer.publication.manifest import Manifest

_POPULATE_READ = 22
"""Of linux/mman.h; Python has no name for it."""
_FAULT_BYTES = 16 << 20
"""The interpreter stands still for so many."""
_WHERE = {
    "shared_memory": "start the engine on the trainer's machine, or publish with transport disk",
    "disk": "let the engine reach learner.publication.directory under the same path",
}


class MappedReceiver:
    """Maps the manifest's file.  What is resident lasts as long as somebody refers to it."""

    def receive(self, manifest: Manifest, wanted: Collection[str]) -> Generator[Incoming]:
        content = np.frombuffer(_map(manifest), dtype=np.uint8)
        for entry in manifest.tensors:
            if entry.name not in wanted:
                continue
            end = entry.offset + entry.nbytes
            if end > len(content):
                raise wrong(entry.name, f"ends after the file's {len(content)} bytes")
            yield Incoming(entry, content[entry.offset : end], manifest.resident)


def _map(manifest: Manifest) -> mmap.mmap:
    """Private: what were written there would stay in this process."""
    path = Path(manifest.path)
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
    except (OSError, ValueError) as exc:
        is_here = not isinstance(exc, FileNotFoundError)
        remedy = PUBLISH_AGAIN if is_here else f"{_WHERE[manifest.transport]}; {PUBLISH_AGAIN}"
        raise Refusal(422, "manifest", f"path: {path} cannot be mapped: {exc}", remedy) from exc
    if manifest.resident:
        fault_in(mapped)
    return mapped


def fault_in(mapped: mmap.mmap) -> None:
    """All pages at once, several times quicker than one by one; kernels before 5.14 refuse."""
    with suppress(OSError):
        for at in range(0, len(mapped), _FAULT_BYTES):
            mapped.madvise(_POPULATE_READ, at, min(_FAULT_BYTES, len(mapped) - at))
