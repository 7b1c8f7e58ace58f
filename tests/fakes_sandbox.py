"""What fakes of a sandbox share."""

from collections.abc import Sequence
from typing import IO

from sostenuto.sandbox.protocol import SandboxUsage, ShellResult, Snapshot


class Unused:
    """The part of a sandbox that environments do not see."""

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, output_bytes: int = 65536
    ) -> ShellResult:
        raise NotImplementedError

    async def upload(self, archive: bytes | IO[bytes], path: str = ".") -> None:
        raise NotImplementedError

    async def download(self, path: str = ".", *, max_bytes: int = 64 << 20) -> bytes:
        raise NotImplementedError

    async def download_to(self, target: IO[bytes], path: str = ".", *, max_bytes: int) -> None:
        raise NotImplementedError

    async def reclaim(self) -> None:
        raise NotImplementedError

    async def snapshot(self) -> Snapshot:
        raise NotImplementedError

    async def usage(self) -> SandboxUsage:
        raise NotImplementedError

    async def is_quiet(self) -> bool:
        raise NotImplementedError
