"""Archives that go into a container and come out of one."""

import bz2
import gzip
import io
import stat
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from sostenuto.errors import PathError, SandboxError

_DEPTH = 200
_UPLOAD_FILES = 4
"""An archive may unpack to so many files of the largest size."""
_MEMBERS = 100_000
_MOST_PLAIN_BYTES = 256 << 20
"""Of a compressed archive, which is held in memory."""


class Packer:
    """Writes a tar whose members all belong to one user."""

    def __init__(self, uid: int) -> None:
        self._uid = uid
        self._buffer = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._buffer, mode="w")  # noqa: SIM115 - closed on exit

    def __enter__(self) -> "Packer":
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

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
        info = tarfile.TarInfo(name)
        info.size = len(content)
        self._add(info, mode, io.BytesIO(content))

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
            content = tar.extractfile(member)
            self.file(name, content.read() if content else b"", stat.S_IMODE(member.mode) & 0o777)

    def _add(self, info: tarfile.TarInfo, mode: int, content: io.BytesIO | None = None) -> None:
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

    def archive(self) -> bytes:
        self._tar.close()
        return self._buffer.getvalue()


def plain(archive: bytes, file_bytes: int) -> bytes:
    """The same without gzip or bzip2; PathError when it is damaged or grows beyond what is unpacked."""
    memory = io.BytesIO(archive)
    if archive.startswith(b"\x1f\x8b"):
        packed = gzip.GzipFile(fileobj=memory)
    elif archive.startswith(b"BZ"):
        packed = bz2.BZ2File(memory)
    else:
        return archive
    most_bytes = min(_UPLOAD_FILES * file_bytes, _MOST_PLAIN_BYTES)
    try:
        with packed as source:
            content = source.read(most_bytes + 1)
    except (OSError, EOFError, zlib.error) as exc:
        raise PathError(f"the archive cannot be read: {exc}") from exc
    if len(content) > most_bytes:
        raise PathError("the archive holds more than is allowed")
    return content


def members_of(archive: bytes, file_bytes: int) -> dict[str, tarfile.TarInfo]:
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


def _entries(archive: bytes) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Each with the bytes that it unpacks to."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
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


def below(archive: bytes, top: str) -> bytes:
    """The same tar with the names below its folder `top`, which the daemon puts in front of each."""
    buffer = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as source,
        tarfile.open(fileobj=buffer, mode="w") as target,
    ):
        for member in source:
            member.name = str(PurePosixPath(member.name).relative_to(top))
            if member.islnk():
                member.linkname = str(PurePosixPath(member.linkname).relative_to(top))
            target.addfile(member, source.extractfile(member) if member.isreg() else None)
    return buffer.getvalue()
