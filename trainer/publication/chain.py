"""A version as files: a full one, and the deltas that lead from it to the version.  No torch.

- A delta file says which version and which bytes it is meant for (`base`, `base_digest`) and what becomes of
  them (`version`, `digest`), so a chain whose links do not fit is found before anything is computed.
- What comes out is checked by who takes it, against the checksums of the whole tensors.
"""

import json
import mmap
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from sostenuto.errors import EngineError
from sostenuto.trainer.publication.deltas import Bytes, Encoded, Form, apply
from sostenuto.trainer.publication.manifest import Manifest, TensorEntry

MAGIC = b"sostenuto-delta\n"
_REMEDY = "publish a full version"


class Part(BaseModel):
    """One tensor of a delta file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    form: Form
    changed: int
    itemsize: int
    nbytes: int
    """In the file, one after the other behind the header."""
    checksum: int


class Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    digest: int
    base: str
    base_digest: int
    parts: tuple[Part, ...]

    def encoded(self) -> bytes:
        """What a delta file begins with."""
        body = self.model_dump_json().encode()
        return MAGIC + len(body).to_bytes(8, "little") + zlib.crc32(body).to_bytes(4, "little") + body


class DeltaFile:
    """A delta that is mapped.  EngineError for a file that is none, or not whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = _mapped(path)
        self.header, at = self._header()
        self._parts: dict[str, tuple[Part, int]] = {}
        for part in self.header.parts:
            self._parts[part.name] = part, at
            at += part.nbytes
        if at != len(self._content):
            raise self._broken(f"has {len(self._content)} bytes, not {at}")

    def apply(self, name: str, content: Bytes) -> None:
        """Make of a tensor of the base, in place, that of the version."""
        if name not in self._parts:
            raise self._broken(f"has nothing of {name!r}")
        part, at = self._parts[name]
        encoded = self._content[at : at + part.nbytes]
        if zlib.crc32(encoded.data) != part.checksum:
            raise self._broken(f"the bytes of {name!r} do not have their checksum")
        try:
            apply(Encoded(part.form, part.changed, encoded), content, part.itemsize)
        except ValueError as error:
            raise self._broken(f"{name!r} {error}") from error

    def _header(self) -> tuple[Header, int]:
        start = len(MAGIC) + 12
        head = self._content[:start].tobytes()
        if head[: len(MAGIC)] != MAGIC or len(head) < start:
            raise self._broken("is no delta")
        end = start + int.from_bytes(head[-12:-4], "little")
        body = self._content[start:end].tobytes()
        if zlib.crc32(body) != int.from_bytes(head[-4:], "little"):
            raise self._broken("its header does not have its checksum")
        try:
            return Header.model_validate_json(body), end
        except ValidationError as error:
            raise self._broken("its header is of another release") from error

    def _broken(self, what: str) -> EngineError:
        return EngineError(f"{self._path}: {what}; {_REMEDY}")


def contents(manifest: Manifest) -> Iterator[tuple[TensorEntry, Bytes]]:
    """Every tensor of a version that lies in files, for engines that are given files.

    EngineError when the version travels otherwise, or a tensor does not end in its file.
    """
    if manifest.delta is not None:
        deltas = [DeltaFile(Path(file)) for file in manifest.delta.deltas]
        names = frozenset(entry.name for entry in manifest.tensors)
        yield from tensors(manifest, full_version(Path(manifest.delta.full)), deltas, names)
        return
    if not manifest.path:
        raise EngineError(
            f"version {manifest.version} travels by {manifest.transport}, which this engine cannot take; set "
            "learner.publication.transport to shared_memory, disk or disk_delta"
        )
    content = _mapped(Path(manifest.path)) if manifest.nbytes else np.empty(0, np.uint8)
    for entry in manifest.tensors:
        end = entry.offset + entry.nbytes
        if end > len(content):
            what = f"ends at byte {end} of a file of {len(content)}"
            raise EngineError(f"{entry.name!r}: {what}; publish again")
        yield entry, content[entry.offset : end]


class Start(NamedTuple):
    """Where a chain begins."""

    version: str
    digest: int
    contents: dict[str, Bytes]


def tensors(
    manifest: Manifest, start: Start, deltas: Sequence[DeltaFile], wanted: Collection[str]
) -> Iterator[tuple[TensorEntry, Bytes]]:
    """The tensors of `manifest`, made of those of `start`.  EngineError when the links do not fit."""
    version, digest = start.version, start.digest
    for delta in deltas:
        header = delta.header
        if (header.base, header.base_digest) != (version, digest):
            raise EngineError(
                f"version {header.version} is a delta on {header.base} (digest {header.base_digest:08x}), "
                f"and what is here is {version} ({digest:08x}); {_REMEDY}"
            )
        version, digest = header.version, header.digest
    if (version, digest) != (manifest.version, manifest.digest):
        raise EngineError(
            f"version {manifest.version} is not what its deltas lead to, which is {version}; {_REMEDY}"
        )
    for entry in manifest.tensors:
        if entry.name in wanted:
            yield entry, _made(entry, start, deltas)


def _made(entry: TensorEntry, start: Start, deltas: Sequence[DeltaFile]) -> Bytes:
    old = start.contents.get(entry.name)
    if old is None or old.nbytes != entry.nbytes:
        raise EngineError(f"{entry.name!r}: version {start.version} has no such tensor; {_REMEDY}")
    content = np.array(old)
    for delta in deltas:
        delta.apply(entry.name, content)
    return content


def full_version(path: Path) -> Start:
    """A file of `DiskSender`, by what it says of itself."""
    content = _mapped(path)
    try:
        end = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8:end].tobytes())
        about = header.pop("__metadata__")
        checksums: dict[str, int] = json.loads(about["crc32"])
        told = "".join(f"{name} {checksum} " for name, checksum in checksums.items())
        contents = {
            name: content[end + said["data_offsets"][0] : end + said["data_offsets"][1]]
            for name, said in header.items()
        }
        return Start(about["version"], zlib.crc32(told.encode()), contents)
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{path}: is no full version of a publication; {_REMEDY}") from error


def _mapped(path: Path) -> Bytes:
    try:
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: cannot be mapped: {error}; {_REMEDY}") from error
