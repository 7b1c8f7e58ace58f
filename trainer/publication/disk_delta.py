"""Publication of changes through a shared folder: a full version now and then, deltas between.

- The first version is full, so is one after `deltas` deltas, and one that has changed so much that a delta
  would save little.
- The files that lead to the newest `keep` versions stay: an engine that joins begins at the full one.
"""

import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sostenuto.trainer.publication.chain import Header, Part
from sostenuto.trainer.publication.deltas import Encoded, encode
from sostenuto.trainer.publication.disk import require_room, usable, write_full
from sostenuto.trainer.publication.files import Files, remove_orphans
from sostenuto.trainer.publication.manifest import Delta, Manifest, Selector, TensorEntry
from sostenuto.trainer.publication.snapshot import Named, Snapshot
from sostenuto.types import Version

_WORTH = 0.9
"""Of a full version: a delta beyond it is not written."""


class DiskDeltaSender:
    """Publishes the versions of one trainer process into `directory`."""

    def __init__(self, directory: Path, *, keep: int, deltas: int) -> None:
        """`deltas`: how many there are between two full versions, at most."""
        self._directory = usable(directory)
        self._keep = keep
        self._most = deltas
        self._files = Files()
        self._last: Manifest | None = None
        self._held: dict[str, NDArray[np.uint8]] = {}
        """The bytes of the last version."""
        self._chains: list[tuple[Path, ...]] = []
        """The files that lead to each version that stays, the full one first."""
        self.removed = remove_orphans(directory)

    def publish(self, version: Version, tensors: Named, *, selector: Selector = "target") -> Manifest:
        snapshot = Snapshot.of(tensors, alignment=1)
        self._chains = self._chains[-(self._keep - 1) :]
        self._files.retire(0, needed=frozenset(path for chain in self._chains for path in chain))
        manifest = self._delta(version, snapshot, selector)
        if manifest is None:
            manifest = write_full(self._files, self._directory, version, snapshot, selector)
            self._chains.append((Path(manifest.path),))
        for entry, (_, raw) in zip(snapshot.entries, snapshot.chunks, strict=True):
            held = self._held.get(entry.name)
            if held is None or held.nbytes != raw.nbytes:
                self._held[entry.name] = np.array(raw)
            else:
                np.copyto(held, raw)
        self._last = manifest
        return manifest

    def close(self) -> None:
        self._files.close()

    def _delta(self, version: Version, snapshot: Snapshot, selector: Selector) -> Manifest | None:
        """None where a full version is due."""
        last = self._last
        if last is None or len(self._chains[-1]) > self._most or _forms(last) != _forms(snapshot):
            return None
        encoded = [
            encode(self._held[entry.name], raw, _itemsize(entry))
            for entry, (_, raw) in zip(snapshot.entries, snapshot.chunks, strict=True)
        ]
        nbytes = sum(part.content.nbytes for part in encoded)
        if nbytes > _WORTH * snapshot.nbytes:
            return None
        manifest = Manifest(
            version=str(version),
            path="",
            nbytes=nbytes,
            tensors=snapshot.entries,
            selector=selector,
            transport="disk_delta",
        )
        path = self._write(manifest, last, encoded)
        chain = (*self._chains[-1], path)
        self._chains.append(chain)
        full, *deltas = map(str, chain)
        delta = Delta(
            base=last.version,
            base_digest=last.digest,
            changed=sum(part.changed for part in encoded),
            full=full,
            deltas=tuple(deltas),
        )
        return manifest.model_copy(update={"path": str(path), "delta": delta})

    def _write(self, manifest: Manifest, base: Manifest, encoded: list[Encoded]) -> Path:
        parts = [
            Part(
                name=entry.name,
                form=part.form,
                changed=part.changed,
                itemsize=_itemsize(entry),
                nbytes=part.content.nbytes,
                checksum=zlib.crc32(part.content.data),
            )
            for entry, part in zip(manifest.tensors, encoded, strict=True)
        ]
        header = Header(
            version=manifest.version,
            digest=manifest.digest,
            base=base.version,
            base_digest=base.digest,
            parts=tuple(parts),
        )
        chunks = [(0, np.frombuffer(header.encoded(), dtype=np.uint8))]
        for part in encoded:
            at, before = chunks[-1]
            chunks.append((at + before.nbytes, part.content))
        nbytes = chunks[-1][0] + chunks[-1][1].nbytes
        require_room(self._directory, nbytes)
        return self._files.write(self._directory, f"{manifest.version}.delta", chunks, nbytes, sync=True)


def _forms(of: Manifest | Snapshot) -> list[tuple[str, str, tuple[int, ...]]]:
    entries = of.tensors if isinstance(of, Manifest) else of.entries
    return [(entry.name, entry.dtype, entry.shape) for entry in entries]


def _itemsize(entry: TensorEntry) -> int:
    count = int(np.prod(entry.shape, dtype=np.int64))
    return entry.nbytes // count if count else 1
