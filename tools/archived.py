"""Archives on their way through the tool server: in files without a name, in pieces, without secrets.

Such a file is gone when the server is, however it ends.
"""

import io
import tarfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, cast

import anyio.to_thread

from sostenuto.tools.secrets import Secrets

PIECE_BYTES = 1 << 20
"""Read, written and sent at once; also what a small archive may take of memory instead of disk."""


@dataclass(slots=True)
class Spool:
    """A file that one task fills, and then reads.  The disk is waited for in a thread."""

    file: IO[bytes]
    size: int = 0
    _waiting: bytearray = field(default_factory=bytearray)

    async def add(self, piece: bytes) -> None:
        self.size += len(piece)
        self._waiting += piece
        if len(self._waiting) >= PIECE_BYTES:
            await self._write()

    async def rewind(self) -> int:
        """Go to the beginning, with all of it in the file; returns its size in bytes."""
        await self._write()
        size = self.file.seek(0, io.SEEK_END)
        self.file.seek(0)
        return size

    async def _write(self) -> None:
        data, self._waiting = self._waiting, bytearray()
        if data:
            await anyio.to_thread.run_sync(self.file.write, data)


@asynccontextmanager
async def open_spool(folder: str | Path | None) -> AsyncGenerator[Spool]:
    """An empty one on the disk of `folder`; None: where the system has temporary files."""
    with SpooledTemporaryFile(max_size=PIECE_BYTES, dir=None if folder is None else str(folder)) as file:
        yield Spool(cast("IO[bytes]", file))


async def pieces_of(file: IO[bytes]) -> AsyncGenerator[bytes]:
    """The rest of a file."""
    while piece := await anyio.to_thread.run_sync(file.read, PIECE_BYTES):
        yield piece


async def masked(spool: Spool, other: Spool, secrets: Secrets) -> Spool:
    """The one of the two, `other` being empty, that has the archive without secrets.

    In the content of files a value becomes as many asterisks, as sizes are written ahead of it.
    """
    if not secrets.values:
        return spool
    await anyio.to_thread.run_sync(_rewrite, spool.file, other.file, secrets)
    return other


def _rewrite(source: IO[bytes], target: IO[bytes], secrets: Secrets) -> None:
    source.seek(0)
    with (
        tarfile.open(fileobj=source, mode="r:") as tar,
        tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as copy,
    ):
        for member in tar:
            member.pax_headers = {}  # of the old names
            member.name, member.linkname = secrets.redact(member.name), secrets.redact(member.linkname)
            content = tar.extractfile(member) if member.isreg() else None
            copy.addfile(member, None if content is None else cast("IO[bytes]", _Masked(content, secrets)))


class _Masked(io.RawIOBase):
    """A file in which secrets read as asterisks, also where one begins in one piece and ends in the next."""

    def __init__(self, source: IO[bytes], secrets: Secrets) -> None:
        super().__init__()
        self._source = source
        self._secrets = secrets
        self._ahead = b""

    def read(self, size: int = -1) -> bytes:
        wanted = size + self._secrets.longest_bytes
        while len(self._ahead) < wanted and (piece := self._source.read(max(wanted, PIECE_BYTES))):
            self._ahead = self._secrets.mask(self._ahead + piece)
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        return data
