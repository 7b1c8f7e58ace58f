"""The tensors of a version, in the order and with the checksums in which they are published."""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sostenuto.trainer.publication.manifest import TensorEntry
from sostenuto.trainer.tensors import as_bytes

ALIGNMENT_BYTES = 64

Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is to be published.  The bytes are the tensors' own where those lie in one piece on the CPU."""

    entries: tuple[TensorEntry, ...]
    chunks: tuple[tuple[int, NDArray[np.uint8]], ...]
    """The bytes of each entry, by its offset."""
    nbytes: int

    @classmethod
    def of(cls, tensors: Named, *, alignment: int = ALIGNMENT_BYTES) -> "Snapshot":
        """Each tensor begins at a multiple of `alignment`."""
        entries: list[TensorEntry] = []
        chunks: list[tuple[int, NDArray[np.uint8]]] = []
        end = 0
        for name, tensor in tensors:
            raw = as_bytes(tensor)
            offset = -(-end // alignment) * alignment
            end = offset + raw.nbytes
            entries.append(
                TensorEntry(
                    name=name,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                    offset=offset,
                    nbytes=raw.nbytes,
                    checksum=zlib.crc32(raw.data),
                )
            )
            chunks.append((offset, raw))
        return cls(tuple(entries), tuple(chunks), end)

    def behind(self, nbytes: int) -> "Snapshot":
        """The same with so many bytes before it."""
        return Snapshot(
            tuple(entry.model_copy(update={"offset": entry.offset + nbytes}) for entry in self.entries),
            tuple((offset + nbytes, raw) for offset, raw in self.chunks),
            self.nbytes + nbytes,
        )


def unique_tensors(state: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The tensors of a state dict; parameters that share storage appear once, under their first name."""
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    unique: list[tuple[str, Tensor]] = []
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        unique.append((name, tensor))
    return unique
