"""A model folder's weights as a publication, without a trainer."""

import json
import zlib
from pathlib import Path
from typing import Any

from sostenuto.trainer.publication.manifest import Manifest, TensorEntry

_DTYPES = {"F32": "float32", "BF16": "bfloat16"}


def manifest_of(folder: Path, version: str) -> Manifest:
    """The folder's weights as a publication; its file is the one that is mapped."""
    path = folder / "model.safetensors"
    header, data = safetensors_parts(folder)
    begin = path.stat().st_size - len(data)
    entries: list[TensorEntry] = []
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            entries.append(
                TensorEntry(
                    name=name,
                    dtype=_DTYPES[entry["dtype"]],
                    shape=tuple(entry["shape"]),
                    offset=begin + start,
                    nbytes=end - start,
                    checksum=zlib.crc32(data[start:end]),
                )
            )
    return Manifest(version=version, path=str(path), nbytes=path.stat().st_size, tensors=tuple(entries))


def safetensors_parts(folder: Path) -> tuple[dict[str, dict[str, Any]], bytes]:
    """The header of its `model.safetensors` by tensor, and the bytes after it."""
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]
