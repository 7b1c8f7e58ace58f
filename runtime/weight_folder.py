"""A model folder as a publication: the tensors of its safetensors files in one file that engines map.

Torch is not needed: bytes are copied as they are, and counted into a checksum on the way.
"""

import json
import mmap
import zlib
from math import prod
from pathlib import Path
from typing import IO, Any, cast

from sostenuto.errors import ConfigError
from sostenuto.trainer.publication.formats import DTYPES
from sostenuto.trainer.publication.manifest import Manifest, TensorEntry
from sostenuto.types import Version

_ALIGNMENT_BYTES = 64
_HEADER_BYTES = 100_000_000
"""The format allows no longer one."""
_CHUNK_BYTES = 16 << 20
_NAMES = {short: name for name, short in DTYPES.items()}


def publication_of(folder: Path, place: Path, version: Version) -> Manifest:
    """Copy the folder's weights into a file under `place`.  Blocking: call it in a thread.

    ConfigError names the file that is missing or broken, or the place that has no room.
    """
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise ConfigError(f"{folder}: no folder with *.safetensors on this machine; save the model there")
    path = place / f"weights-{version}"
    entries: list[TensorEntry] = []
    try:
        place.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as target:
            for file in files:
                _add(file, target, entries)
            nbytes = target.tell()
        _check_names(folder, entries)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ConfigError(f"{error.filename or path}: {error.strerror}; free some of the disk") from error
        raise
    return Manifest(version=str(version), path=str(path), nbytes=nbytes, tensors=tuple(entries))


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of a folder, by name.  ConfigError for a file that is broken."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as source:
            if file.stat().st_size < 8:
                raise _broken(file, "it is too short")
            with mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                _, tensors = _header(file, mapped)
        shapes |= {name: tuple(about["shape"]) for name, about in tensors.items()}
    return shapes


def _add(file: Path, target: IO[bytes], entries: list[TensorEntry]) -> None:
    """Copy the tensors of one file, each to a multiple of the alignment."""
    with file.open("rb") as source:
        if file.stat().st_size < 8:
            raise _broken(file, "it is too short")
        with mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            start, tensors = _header(file, mapped)
            for name, about in tensors.items():
                begin, end = _span(file, name, about, len(mapped) - start)
                target.write(b"\0" * (-target.tell() % _ALIGNMENT_BYTES))
                offset = target.tell()
                entries.append(
                    TensorEntry(
                        name=name,
                        dtype=_NAMES[about["dtype"]],
                        shape=tuple(about["shape"]),
                        offset=offset,
                        nbytes=end - begin,
                        checksum=_copy(mapped, start + begin, start + end, target),
                    )
                )


def _header(file: Path, mapped: mmap.mmap) -> tuple[int, dict[str, dict[str, Any]]]:
    """Where the bytes begin, and what is said of each tensor."""
    length = int.from_bytes(mapped[:8], "little")
    if length > min(len(mapped) - 8, _HEADER_BYTES):
        raise _broken(file, "its header is cut off")
    try:
        header: object = json.loads(mapped[8 : 8 + length])
    except (ValueError, RecursionError):
        raise _broken(file, "its header is no JSON") from None
    if not isinstance(header, dict):
        raise _broken(file, "its header is no object")
    tensors = cast("dict[str, Any]", header)
    tensors.pop("__metadata__", None)
    return 8 + length, tensors


def _span(file: Path, name: str, about: object, size: int) -> tuple[int, int]:
    """First byte of a tensor and the one behind it, after the header's."""
    try:
        fields = cast("dict[str, Any]", about)
        begin, end = fields["data_offsets"]
        wanted = prod(fields["shape"]) * _itemsize(fields["dtype"])
        is_whole = 0 <= begin <= end <= size and end - begin == wanted
    except (KeyError, TypeError, ValueError):
        is_whole, begin, end = False, 0, 0
    if not is_whole:
        raise _broken(file, f"what it says of {name!r} does not fit its bytes, or is no known type")
    return begin, end


def _itemsize(dtype: str) -> int:
    """In bytes; KeyError for a type that no engine knows."""
    name = _NAMES[dtype]
    return 1 if name.startswith(("float8", "bool")) else int(name.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8


def _copy(source: mmap.mmap, begin: int, end: int, target: IO[bytes]) -> int:
    """The checksum of what was copied."""
    checksum = 0
    for at in range(begin, end, _CHUNK_BYTES):
        chunk = source[at : min(at + _CHUNK_BYTES, end)]
        checksum = zlib.crc32(chunk, checksum)
        target.write(chunk)
    return checksum


def _check_names(folder: Path, entries: list[TensorEntry]) -> None:
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{folder}: {twice!r} is in two of its files; leave one of the files out")


def _broken(file: Path, what: str) -> ConfigError:
    return ConfigError(f"{file}: {what}; save the model again")
