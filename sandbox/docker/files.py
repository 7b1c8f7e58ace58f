"""Files of a container's workspace, through the daemon: nothing runs inside, and a paused one can be read.

A path is walked part by part, so that a link which leads out of the workspace is a PathError.  What the
inside changes between the walk and the transfer can lead elsewhere in its own container, and no further.
All of it blocks.
"""

import io
import shutil
import tarfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO

from sostenuto.errors import PathError, SandboxError
from sostenuto.sandbox.docker.inside import WORKSPACE
from sostenuto.sandbox.docker.tars import Packer, members_of, plain, scratch, write_below
from sostenuto.sandbox.docker.typed import Daemon, Entry, Refused

_DEPTH = 200
_OVERHEAD_BYTES = 1 << 20
"""Of a tar, beyond the file in it."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a path leads: the deepest folder that exists, and what is missing below it."""

    path: PurePosixPath
    entry: Entry | None
    """None: there is nothing; `missing` says which parts would have to be made."""
    missing: tuple[str, ...] = ()


class Files:
    """Of one container, whose processes have the user `uid`."""

    def __init__(self, daemon: Daemon, container: str, uid: int) -> None:
        self._daemon = daemon
        self._container = container
        self._uid = uid

    def read(self, path: str, max_bytes: int) -> bytes:
        place = self._walk(path, follow=True)
        if place.entry is None:
            raise PathError(f"{path!r}: No such file or directory")
        if place.entry.is_folder:
            raise PathError(f"{path!r} is a folder, not a file")
        if not place.entry.is_file:
            raise PathError(f"{path!r} is not a regular file")
        too_large = f"{path!r} is larger than {max_bytes} bytes; read a part of it in the shell"
        if place.entry.size_bytes > max_bytes:
            raise PathError(too_large)
        archive = io.BytesIO()
        self._fetch(place.path, archive, max_bytes + _OVERHEAD_BYTES, too_large)
        with tarfile.open(fileobj=archive) as tar:
            content = tar.extractfile(tar.next() or tarfile.TarInfo())
            return content.read() if content else b""

    def write(self, path: str, data: bytes) -> None:
        place = self._walk(path, follow=False)
        if place.path == PurePosixPath(WORKSPACE) and not place.missing:
            raise PathError(f"{path!r} is a folder, not a file")
        if place.entry is not None and place.entry.is_folder:
            raise PathError(f"{path!r}: Is a directory")
        mode = place.entry.mode & 0o777 if place.entry and place.entry.is_file else 0o644
        names = place.missing or (place.path.name,)
        parent = place.path if place.missing else place.path.parent
        with Packer(self._uid) as packer:
            packer.folders(names[:-1])
            packer.file("/".join(names), data, mode)
            self._place(parent, packer, path)

    def upload(self, archive: bytes | IO[bytes], path: str, file_bytes: int) -> None:
        """`file_bytes`: of the largest file."""
        target = self._walk(path, follow=True)
        if target.entry is not None and not target.entry.is_folder:
            raise PathError(f"{path!r} is not a folder")
        given = io.BytesIO(archive) if isinstance(archive, bytes) else archive
        with scratch() as room, Packer(self._uid) as packer:
            self._pack(packer, target, plain(given, room, file_bytes), file_bytes)
            self._place(target.path, packer, path)

    def _pack(self, packer: Packer, target: _Place, archive: IO[bytes], file_bytes: int) -> None:
        members = members_of(archive, file_bytes)
        absent = self._absent_folders(target, members)
        packer.folders(target.missing)
        for name in absent:
            packer.folder("/".join((*target.missing, name)))
        archive.seek(0)
        with tarfile.open(fileobj=archive) as tar:
            for name, member in members.items():
                packer.member("/".join((*target.missing, name)), member, tar)

    def _absent_folders(self, target: _Place, members: dict[str, tarfile.TarInfo]) -> list[str]:
        """Folders that members need, outermost first.

        Raises PathError when something would be written through a link, or in place of what is no folder.
        """
        parents = {str(parent) for name in members for parent in PurePosixPath(name).parents}
        wanted = parents | {name for name, member in members.items() if member.isdir()}
        absent: list[str] = []
        for name in sorted(wanted - {"."}):
            below_absent = not set(absent).isdisjoint(map(str, PurePosixPath(name).parents))
            entry = None if target.missing or below_absent else self._stat(target.path / name)
            if entry is None:
                absent.append(name)
            elif not entry.is_folder:
                raise PathError(f"{name!r} of the archive is no folder in the workspace")
        return absent

    def _place(self, folder: PurePosixPath, packer: Packer, path: str) -> None:
        try:
            self._daemon.place(self._container, str(folder), packer.archive())
        except Refused as exc:
            raise PathError(f"{path!r}: {exc}") from exc

    def download(self, path: str, max_bytes: int) -> bytes:
        memory = io.BytesIO()
        self.download_to(memory, path, max_bytes)
        return memory.getvalue()

    def download_to(self, target: IO[bytes], path: str, max_bytes: int) -> None:
        place = self._walk(path, follow=True)
        if place.entry is None:
            raise PathError(f"{path!r}: No such file or directory")
        with scratch() as archive:
            too_large = f"{path!r} is larger than {max_bytes} bytes as a tar"
            self._fetch(place.path, archive, max_bytes, too_large)
            if place.entry.is_folder:
                write_below(archive, target, place.path.name)
            else:
                shutil.copyfileobj(archive, target)

    def _fetch(self, path: PurePosixPath, target: IO[bytes], max_bytes: int, too_large: str) -> None:
        with closing(self._daemon.fetch(self._container, str(path))) as pieces:
            for piece in pieces:
                target.write(piece)
                if target.tell() > max_bytes:
                    raise PathError(too_large)
        target.seek(0)

    def _walk(self, path: str, *, follow: bool) -> _Place:
        """`follow`: also a link in the last part."""
        parts = _parts(path)
        here, entry = PurePosixPath(WORKSPACE), self._stat(PurePosixPath(WORKSPACE))
        if entry is None:
            raise SandboxError("the workspace is gone")
        for index, part in enumerate(parts):
            if not entry.is_folder:
                raise PathError(f"{path!r}: Not a directory")
            here = _up(here, path) if part == ".." else here / part
            found = self._stat(here)
            is_last = index == len(parts) - 1
            if found is not None and found.is_link and (follow or not is_last):
                here = _inside(found.target, path)
                found = self._target(here, path)
            if found is None:
                return self._missing(here, parts[index + 1 :], path)
            entry = found
        return _Place(here, entry)

    def _missing(self, here: PurePosixPath, rest: list[str], path: str) -> _Place:
        if ".." in rest:
            raise PathError(f"{path!r}: No such file or directory")
        return _Place(here.parent, None, (here.name, *rest))

    def _target(self, here: PurePosixPath, path: str) -> Entry:
        found = self._stat(here)
        if found is None:
            raise PathError(f"{path!r}: a link in it leads nowhere")
        return found

    def _stat(self, path: PurePosixPath) -> Entry | None:
        try:
            return self._daemon.stat(self._container, str(path))
        except Refused as exc:
            raise PathError(str(exc)) from exc


def _parts(path: str) -> list[str]:
    if "\0" in path:
        raise PathError(f"{path!r} has a zero byte")
    within = path
    if path.startswith("/"):
        if path != WORKSPACE and not path.startswith(f"{WORKSPACE}/"):
            raise PathError(f"{path!r} leaves the workspace")
        within = path[len(WORKSPACE) :]
    parts = [part for part in within.split("/") if part not in {"", "."}]
    if len(parts) > _DEPTH:
        raise PathError(f"{path[:100]!r}... is nested deeper than {_DEPTH} folders")
    return parts


def _up(here: PurePosixPath, path: str) -> PurePosixPath:
    if here == PurePosixPath(WORKSPACE):
        raise PathError(f"{path!r} leaves the workspace")
    return here.parent


def _inside(target: str, path: str) -> PurePosixPath:
    found = PurePosixPath(target)
    if not found.is_relative_to(WORKSPACE):
        raise PathError(f"{path!r} leaves the workspace")
    return found
