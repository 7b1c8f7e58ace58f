"""Archives that go into a container and come out of one.

They are files: in memory while they are small, on disk from `_MEMORY_BYTES` on.
"""

import bz2
import gzip
import io
import stat
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from tempfile import SpooledTemporaryFile
from typing import IO, cast

from sostenuto.errors import PathError, SandboxError

_DEPTH = 200
_UPLOAD_FILES = 4
"""An archive may unpack to so many files of the largest size."""
_MEMBERS = 100_000
_MEMORY_BYTES = 4 << 20
_PIECE_BYTES = 1 << 16


def scratch() -> IO[bytes]:
    """An empty file without a name."""
    return cast("IO[bytes]", SpooledTemporaryFile(max_size=_MEMORY_BYTES))


class Packer:
    """Writes a tar whose members all belong to one user."""

    def __init__(self, uid: int) -> None:
        self._uid = uid
        self._file = scratch()
        self._tar = tarfile.open(fileobj=self._file, mode="w")  # noqa: SIM115 - closed on exit

    def __enter__(self) -> "Packer":
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()
        self._file.close()

    def folders(self, names: Iterable[str]) -> None:
        """Each in the one before it."""
        path = PurePosixPath()
        for name in names:
            path /= name
            self.folder(str(path))

    def folder(self, name: str, mode: int = 0o755) -> None:
        info = tarfile.TarInfo(name)
        info.type = tarfile.DIRTYPE
        self._add(info, mode)

    def file(self, name: str, content: bytes, mode: int = 0o644) -> None:
        self._copy(name, io.BytesIO(content), len(content), mode)

    def link(self, name: str, target: str) -> None:
        info = tarfile.TarInfo(name)
        info.type = tarfile.SYMTYPE
        info.linkname = target
        self._add(info, 0o777)

    def member(self, name: str, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        if member.isdir():
            self.folder(name, stat.S_IMODE(member.mode) & 0o777 | 0o700)
        elif member.issym():
            self.link(name, member.linkname)
        else:
            content = tar.extractfile(member) or io.BytesIO()
            size = content.seek(0, io.SEEK_END)
            content.seek(0)
            self._copy(name, content, size, stat.S_IMODE(member.mode) & 0o777)

    def _copy(self, name: str, content: IO[bytes], size: int, mode: int) -> None:
        info = tarfile.TarInfo(name)
        info.size = size
        self._add(info, mode, content)

    def _add(self, info: tarfile.TarInfo, mode: int, content: IO[bytes] | None = None) -> None:
        info.mode = mode
        info.uid = info.gid = self._uid
        self._tar.addfile(info, content)

    def template(self, folder: Path, prefix: str = "") -> None:
        """The content of a trusted folder; links stay links, modes are kept."""
        for path in sorted(folder.iterdir()):
            name = prefix + path.name
            if path.is_symlink():
                self.link(name, str(path.readlink()))
            elif path.is_dir():
                self.folder(name, path.stat().st_mode & 0o777 | 0o700)
                self.template(path, f"{name}/")
            elif path.is_file():
                self.file(name, path.read_bytes(), path.stat().st_mode & 0o777 | 0o600)
            else:
                raise SandboxError(f"template {path}: only files, folders and links can be copied")

    def archive(self) -> IO[bytes]:
        """All of it, to be read within the block of the packer."""
        self._tar.close()
        self._file.seek(0)
        return self._file


def plain(archive: IO[bytes], target: IO[bytes], file_bytes: int) -> IO[bytes]:
    """The archive itself, or what gzip or bzip2 made of it, unpacked into `target`.

    Raises PathError when it is damaged or grows beyond what is unpacked.
    """
    archive.seek(0)
    magic = archive.read(2)
    archive.seek(0)
    if magic == b"\x1f\x8b":
        packed = cast("IO[bytes]", gzip.GzipFile(fileobj=archive, mode="rb"))
    elif magic == b"BZ":
        packed = cast("IO[bytes]", bz2.BZ2File(archive))
    else:
        return archive
    try:
        while piece := packed.read(_PIECE_BYTES):
            target.write(piece)
            if target.tell() > _UPLOAD_FILES * file_bytes:
                raise PathError("the archive holds more than is allowed")
    except (OSError, EOFError, zlib.error) as exc:
        raise PathError(f"the archive cannot be read: {exc}") from exc
    return target


def members_of(archive: IO[bytes], file_bytes: int) -> dict[str, tarfile.TarInfo]:
    """By the names under which they are unpacked; PathError for an archive that must not be."""
    members: dict[str, tarfile.TarInfo] = {}
    leaves: set[str] = set()
    room = _UPLOAD_FILES * file_bytes
    for member, size in _entries(archive):
        name = _name(member)
        room -= size
        if size > file_bytes or room < 0 or len(members) >= _MEMBERS:
            raise PathError(f"the archive is too large at {member.name!r}")
        if leaves.intersection(map(str, PurePosixPath(name).parents)):
            raise PathError(f"{member.name!r} of the archive lies below another member that is no folder")
        if not member.isdir():
            leaves.add(name)
        if name != ".":
            members[name] = member
    return members


def _entries(archive: IO[bytes]) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Each with the bytes that it unpacks to."""
    try:
        archive.seek(0)
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            for member in tar:
                if not (member.isdir() or member.isreg() or member.issym() or member.islnk()):
                    raise PathError(f"{member.name!r} of the archive is no file, folder or link")
                yield member, tar.getmember(member.linkname).size if member.islnk() else member.size
    except (tarfile.TarError, KeyError) as exc:
        raise PathError(f"the archive is no plain tar: {exc}") from exc


def _name(member: tarfile.TarInfo) -> str:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or len(path.parts) > _DEPTH:
        raise PathError(f"{member.name!r} of the archive leaves the workspace")
    return str(path)


def write_below(archive: IO[bytes], target: IO[bytes], top: str) -> None:
    """Copy it with the names below its folder `top`, which the daemon puts in front of each."""
    archive.seek(0)
    with tarfile.open(fileobj=archive) as source, tarfile.open(fileobj=target, mode="w") as copy:
        for member in source:
            member.name = str(PurePosixPath(member.name).relative_to(top))
            if member.islnk():
                member.linkname = str(PurePosixPath(member.linkname).relative_to(top))
            copy.addfile(member, source.extractfile(member) if member.isreg() else None)
