"""A publication as a model folder, for engines that load weights from disk.

- The tensors' bytes go from the sender's mapped file into one safetensors file as they are; each is
  checked on the way, and the folder takes its name only when it is whole.
- Files of the served model beside its weights (configuration, tokenizer) are copied.
- An engine may read the folder that it serves again, so it stays until another version is served.
"""

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import IO

from sostenuto.errors import EngineError
from sostenuto.trainer.publication.chain import contents
from sostenuto.trainer.publication.deltas import Bytes
from sostenuto.trainer.publication.formats import DTYPES
from sostenuto.trainer.publication.manifest import Manifest, TensorEntry

_WEIGHTS = "model.safetensors"
_LEFT_BEHIND = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_CHUNK_BYTES = 16 << 20


class WeightFolders:
    """The published folders of one engine, under `directory`.  Blocking: call it in a thread.

    folder = folders.write(manifest)
    folders.keep(manifest.version)
    """

    def __init__(self, directory: Path, model: Path) -> None:
        """`model`: the folder of the served model."""
        self._directory = directory
        self._model = model

    def place(self, version: str) -> Path:
        return self._directory / f"weights-{version}"

    def write(self, manifest: Manifest) -> Path:
        """Write the version; EngineError names the path, or the tensor that is not as its sender wrote it."""
        place, part = self.place(manifest.version), self.place(f"{manifest.version}.part")
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            self._copy_others(part)
            write_safetensors(manifest, part / _WEIGHTS)
            shutil.rmtree(place, ignore_errors=True)
            part.rename(place)
        except OSError as error:
            raise EngineError(
                f"{part}, {manifest.nbytes} bytes needed: {error.strerror}; "
                "free some, or name another directory"
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return place

    def adopt(self, version: str) -> Path:
        """The served model's own weights as a version, without a copy where the disk is the same.

        EngineError names the folder when it has none that an engine could load, or no room is left.
        """
        place, part = self.place(version), self.place(f"{version}.part")
        if not any(self._model.glob("*.safetensors")):
            raise EngineError(f"{self._model}: has no *.safetensors; save the model's weights as such there")
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            for file in self._model.iterdir():
                if file.is_file():
                    _link_or_copy(file, part / file.name)
            shutil.rmtree(place, ignore_errors=True)
            part.rename(place)
        except OSError as error:
            raise EngineError(f"{part}: {error.strerror}; free some, or name another directory") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return place

    def keep(self, *versions: str) -> None:
        """Remove every other version's folder."""
        kept = {self.place(version) for version in versions}
        for place in self._directory.glob("weights-*"):
            if place not in kept:
                shutil.rmtree(place, ignore_errors=True)

    def _copy_others(self, place: Path) -> None:
        for file in self._model.iterdir():
            if file.is_file() and not file.name.endswith(_LEFT_BEHIND):
                shutil.copyfile(file, place / file.name)


def _link_or_copy(file: Path, place: Path) -> None:
    try:
        place.hardlink_to(file.resolve())
    except OSError:
        # Another disk, another owner, or a file system without links.
        shutil.copyfile(file, place)


def write_safetensors(manifest: Manifest, path: Path) -> None:
    """The manifest's tensors as one file; OSError, or EngineError for a tensor that is not whole."""
    header, start = {}, 0
    for entry in manifest.tensors:
        header[entry.name] = {
            "dtype": _dtype(entry),
            "shape": list(entry.shape),
            "data_offsets": [start, start + entry.nbytes],
        }
        start += entry.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as target:
        target.write(len(encoded).to_bytes(8, "little") + encoded)
        for entry, content in contents(manifest):
            _copy(entry, content, target)
        target.flush()
        os.fsync(target.fileno())


def _copy(entry: TensorEntry, content: Bytes, target: IO[bytes]) -> None:
    checksum = 0
    for at in range(0, entry.nbytes, _CHUNK_BYTES):
        chunk = content[at : at + _CHUNK_BYTES].tobytes()
        checksum = zlib.crc32(chunk, checksum)
        target.write(chunk)
    if checksum != entry.checksum:
        raise EngineError(f"{entry.name!r}: its bytes are not those that were published; publish again")


def _dtype(entry: TensorEntry) -> str:
    if entry.dtype not in DTYPES:
        raise EngineError(f"{entry.name!r}: {entry.dtype} has no name in safetensors; convert it before")
    return DTYPES[entry.dtype]
