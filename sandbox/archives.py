"""Folders of a workspace as tar archives, into it and out of it.

- An archive is looked at from its first to its last byte before anything of it is written: what it holds, and
  how large that is.  Nothing is written through a link or outside of the folder it goes to.
- What is decompressed is bounded, and so is what a header may take: a small archive cannot fill the memory.
"""

import bz2
import gzip
import io
import os
import secrets
import stat
import tarfile
import zlib
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, BinaryIO, cast

from sostenuto.errors import PathError
from sostenuto.sandbox.walk import give, walking

MOST_MEMBERS = 50_000
_HEADER_BYTES = 1 << 20
"""What the headers of one member may take, padding and long names included."""
_CHUNK_BYTES = 1 << 16
_DEPTH = 200
_BLOCK_BYTES = 512
_STEP = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_BROKEN = (tarfile.TarError, EOFError, zlib.error, ValueError, OSError, OverflowError)
"""What reading a damaged archive from memory raises."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Of what one archive may unpack to."""

    file_bytes: int
    total_bytes: int


def unpack(
    workspace: int, archive: bytes | IO[bytes], path: str, bound: Bound, *, uid: int | None = None
) -> None:
    """Unpack a tar, also compressed by gzip or bzip2, into the folder `path`, which is created.

    A file is read twice, from its beginning, and may not change meanwhile.

    Raises PathError, and has then written nothing, for an archive that cannot be read or holds more than
    `bound`, devices, pipes, or names and hard links that lead out of it.
    """
    source = io.BytesIO(archive) if isinstance(archive, bytes) else archive
    for _ in _members(source, bound):
        pass
    with walking(workspace, path, make=True, uid=uid, links=False) as walk:
        walk.to_end()
        folders: list[tarfile.TarInfo] = []
        for member, content in _members(source, bound):
            _write(walk.here, member, content, uid)
            if member.isdir():
                folders.append(member)
        for member in reversed(folders):  # last, as a folder may not be writable for who unpacks
            _set_mode(walk.here, member)


def _members(archive: IO[bytes], bound: Bound) -> Generator[tuple[tarfile.TarInfo, BinaryIO | None]]:
    """Each member with its content, checked; the content is to be read before the next is asked for."""
    source = _Bounded(_decompressed(archive), bound.total_bytes)
    left_bytes = bound.total_bytes
    with _readable():
        tar = tarfile.open(fileobj=source, mode="r|", bufsize=_BLOCK_BYTES)  # noqa: SIM115 - of memory
        for count in range(MOST_MEMBERS + 1):
            source.allow(_HEADER_BYTES)
            member = tar.next()
            if member is None:
                return
            left_bytes -= member.size
            _check(member, count, left_bytes, bound)
            source.allow(member.size + 2 * _BLOCK_BYTES)
            content = tar.extractfile(member) if member.isreg() else None
            yield member, cast("BinaryIO | None", content)
            while content is not None and content.read(_CHUNK_BYTES):
                pass


def _decompressed(archive: IO[bytes]) -> IO[bytes]:
    archive.seek(0)
    magic = archive.read(3)
    archive.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=archive, mode="rb"))
    return cast("IO[bytes]", bz2.BZ2File(archive)) if magic == b"BZh" else archive


@contextmanager
def _readable() -> Generator[None]:
    try:
        yield
    except _BROKEN as exc:
        raise PathError(f"the archive cannot be read: {exc}") from exc


class _Bounded(io.RawIOBase):
    """Reads on until what is allowed, or all that is, has been read."""

    def __init__(self, source: IO[bytes], total_bytes: int) -> None:
        super().__init__()
        self._source = source
        self._total_bytes = total_bytes + MOST_MEMBERS * _BLOCK_BYTES
        self._allowed_bytes = _HEADER_BYTES  # the first header is read as the archive is opened

    def allow(self, count: int) -> None:
        self._allowed_bytes = count

    def read(self, size: int = -1) -> bytes:
        self._allowed_bytes -= size
        self._total_bytes -= size
        if size < 0 or self._allowed_bytes < 0 or self._total_bytes < 0:
            raise PathError("the archive holds more than is allowed")
        return self._source.read(size)


def _check(member: tarfile.TarInfo, count: int, left_bytes: int, bound: Bound) -> None:
    named = f"the archive's member {member.name!r}"
    if count >= MOST_MEMBERS:
        raise PathError(f"the archive holds more than {MOST_MEMBERS} members")
    if member.size > bound.file_bytes or left_bytes < 0:
        raise PathError(f"{named} makes it larger than allowed")
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()) or member.issparse():
        raise PathError(f"{named} is no file, folder or link")
    for name in (member.name, member.linkname if member.islnk() else ""):
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise PathError(f"{named} leaves the folder it is unpacked to")


def _write(root: int, member: tarfile.TarInfo, content: BinaryIO | None, uid: int | None) -> None:
    with walking(root, member.name, make=True, uid=uid, links=False) as walk:
        if member.isdir():
            walk.to_end()
            return
        name = walk.to_last(follow=False)
        draft = f".{secrets.token_hex(8)}"
        try:
            _draft(walk.here, draft, root, member, content, uid)
            os.rename(draft, name, src_dir_fd=walk.here, dst_dir_fd=walk.here)
        finally:
            with suppress(OSError):  # a hard link to what is there already is not moved but left
                os.unlink(draft, dir_fd=walk.here)


def _draft(
    here: int, draft: str, root: int, member: tarfile.TarInfo, content: BinaryIO | None, uid: int | None
) -> None:
    if member.issym():
        os.symlink(member.linkname, draft, dir_fd=here)
        give(draft, uid, here)
    elif content is None:
        with walking(root, member.linkname, links=False) as walk:
            source = walk.to_last(follow=False)
            os.link(source, draft, src_dir_fd=walk.here, dst_dir_fd=here, follow_symlinks=False)
    else:
        fd = os.open(draft, _CREATE, 0o600, dir_fd=here)
        with os.fdopen(fd, "wb") as file:
            while chunk := content.read(_CHUNK_BYTES):
                file.write(chunk)
            give(fd, uid)
            os.fchmod(fd, member.mode & 0o777)


def _set_mode(root: int, member: tarfile.TarInfo) -> None:
    with walking(root, member.name, links=False) as walk:
        walk.to_end()
        os.fchmod(walk.here, member.mode & 0o777)


def pack(workspace: int, path: str, max_bytes: int) -> bytes:
    """The bytes of what `pack_into` writes."""
    memory = io.BytesIO()
    pack_into(memory, workspace, path, max_bytes)
    return memory.getvalue()


def pack_into(target: IO[bytes], workspace: int, path: str, max_bytes: int) -> None:
    """Write a tar of a file, or of what is in a folder; what is neither file, folder nor link is left out.

    Raises PathError when it is missing or the tar would be larger than `max_bytes`.
    """
    packing = _Packing(target, max_bytes)
    with walking(workspace, path) as walk:
        name = walk.to_any()
        if name is None:
            packing.add_content(walk.here, "", 0)
        elif stat.S_ISREG(os.stat(name, dir_fd=walk.here, follow_symlinks=False).st_mode):
            packing.add(walk.here, name, name, 0)
        else:
            raise PathError(f"{path!r} is not a regular file")
    packing.finish()


class _Packing:
    """Names in the archive are relative to what was asked for."""

    def __init__(self, target: IO[bytes], max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._target = target
        self._tar = tarfile.TarFile(fileobj=target, mode="w", format=tarfile.PAX_FORMAT)

    def finish(self) -> None:
        self._tar.close()

    def add_content(self, folder: int, prefix: str, depth: int) -> None:
        if depth > _DEPTH:
            raise PathError(f"folders are nested deeper than {_DEPTH}")
        for name in sorted(os.listdir(folder)):
            with suppress(FileNotFoundError):  # removed since
                self.add(folder, name, prefix + name, depth)

    def add(self, folder: int, name: str, called: str, depth: int) -> None:
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(facts.st_mode):
            fd = os.open(name, _STEP, dir_fd=folder)
            try:
                self._put(called, facts, tarfile.DIRTYPE)
                self.add_content(fd, f"{called}/", depth + 1)
            finally:
                os.close(fd)
        elif stat.S_ISLNK(facts.st_mode):
            self._put(called, facts, tarfile.SYMTYPE, link=os.readlink(name, dir_fd=folder))
        elif stat.S_ISREG(facts.st_mode):
            self._add_file(folder, name, called)

    def _add_file(self, folder: int, name: str, called: str) -> None:
        fd = os.open(name, _READ, dir_fd=folder)
        with os.fdopen(fd, "rb") as file:
            facts = os.fstat(fd)
            if stat.S_ISREG(facts.st_mode):
                self._put(called, facts, tarfile.REGTYPE, file)

    def _put(
        self, called: str, facts: os.stat_result, kind: bytes, content: BinaryIO | None = None, link: str = ""
    ) -> None:
        member = tarfile.TarInfo(called)
        member.type, member.linkname = kind, link
        member.mode, member.mtime = stat.S_IMODE(facts.st_mode) & 0o777, int(facts.st_mtime)
        member.size = facts.st_size if content is not None else 0
        if self._target.tell() + member.size + 3 * _BLOCK_BYTES > self._max_bytes:
            raise PathError(f"more than {self._max_bytes} bytes; ask for a part of it")
        self._tar.addfile(member, cast("BinaryIO", _Steady(content)) if content is not None else None)


class _Steady(io.RawIOBase):
    """A file that may shrink while it is read: what is missing reads as zeros."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size).ljust(size, b"\0")
