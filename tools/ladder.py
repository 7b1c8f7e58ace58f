"""A program's sandbox, on whichever rung it stands.

    running -> paused -> reclaimed -> snapshotted      each frees more, and takes longer to come back from

- Whoever uses the sandbox brings it back first: that a rung is right is a matter of speed alone.
- Nothing that cannot come back is given up.  A sandbox in use stays as it is.  One with processes besides its
  shell, with files outside of its workspace, or without mounts of its own, so that its workspace would come
  back at another path, is not snapshotted; one whose memory cannot be moved out is paused.  `move` says what
  was reached.
- From a snapshot the shell comes back with its directory and its exported variables.
- The snapshot stays until somebody uses the sandbox again, and `before_use` has returned: until then it is
  what the sandbox is.  So it is with one that is taken while the sandbox goes on.
"""

import shlex
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import IO

import anyio

from sostenuto.errors import SandboxError, Unsupported
from sostenuto.sandbox.protocol import Backend, Blueprint, Sandbox, SandboxUsage, ShellResult, Snapshot
from sostenuto.sandbox.walk import INSIDE
from sostenuto.types import SandboxRung

_SHELL_S = 10.0
"""For the few commands that ask the shell for its state, and give it back."""
_VARIABLES_BYTES = 1 << 18
_NOTHING_ELSEWHERE = (
    '(for folder in "${TMPDIR:-/tmp}" /dev/shm; do [ -z "$(ls -A "$folder" 2>/dev/null)" ] || exit 1; done)'
)
"""Whether all that was written is in the workspace."""


async def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Resting:
    """What a sandbox that is snapshotted comes back from."""

    snapshot: Snapshot
    shell: str
    """Commands that bring directory and variables back."""


@dataclass(slots=True, eq=False)
class Ladder:
    """See `sostenuto.sandbox.protocol.Sandbox`; `start` makes one."""

    _backend: Backend
    _name: str
    _blueprint: Blueprint
    _sandbox: Sandbox | None
    _rung: SandboxRung = SandboxRung.RUNNING
    _resting: Resting | None = None
    _unused: Resting | None = None
    """What it came back from, or was snapshotted as, while nobody has used it since."""
    before_use: Callable[[], Awaitable[None]] = _nothing
    _moving: anyio.Lock = field(default_factory=lambda: anyio.Lock(fast_acquire=True))
    _users: int = 0
    _stopped: bool = False

    @classmethod
    async def start(cls, backend: Backend, name: str, blueprint: Blueprint) -> "Ladder":
        """A running one."""
        return cls(backend, name, blueprint, await backend.start(name, blueprint))

    @classmethod
    def resting_on(cls, backend: Backend, name: str, blueprint: Blueprint, resting: Resting) -> "Ladder":
        """One that another server has snapshotted; it starts when it is used."""
        return cls(backend, name, blueprint, None, SandboxRung.SNAPSHOTTED, resting)

    @property
    def resting(self) -> Resting | None:
        """What it comes back from, or has come back from and still is."""
        return self._resting or self._unused

    @property
    def rung(self) -> SandboxRung:
        return self._rung

    async def move(self, rung: SandboxRung) -> SandboxRung:
        """Bring it to `rung`, or as near to that as it can come back from; returns which one it reached."""
        async with self._moving:
            if rung is SandboxRung.RUNNING:
                await self._come_back()
            elif not self._users and (rung is not SandboxRung.SNAPSHOTTED or not await self._rest()):
                await self._step_down(rung)
        return self._rung

    async def checkpoint(self) -> bool:
        """Snapshot it as it runs; False, and nothing changes, if it is in use or would lose something."""
        async with self._moving:
            if self._users or self._rung is not SandboxRung.RUNNING or self._unused is not None:
                return False
            self._unused = await self._snapshotted()
            return self._unused is not None

    async def _step_down(self, rung: SandboxRung) -> None:
        if self._resting is not None:
            return
        sandbox = self._awake()
        if rung is not SandboxRung.PAUSED and self._rung is not SandboxRung.RECLAIMED:
            with suppress(Unsupported):
                await sandbox.reclaim()
                self._rung = SandboxRung.RECLAIMED
        if self._rung is SandboxRung.RUNNING:
            await sandbox.pause()
            self._rung = SandboxRung.PAUSED

    async def _rest(self) -> bool:
        """Snapshot and end it; False, and nothing changes, if something would be lost."""
        if self._resting is not None:
            return False
        resting = self._unused or await self._snapshotted()
        if resting is None:
            return False
        sandbox = self._awake()
        self._resting, self._unused, self._rung = resting, None, SandboxRung.SNAPSHOTTED
        await sandbox.stop()
        self._sandbox = None
        return True

    async def _snapshotted(self) -> Resting | None:
        await self._come_back()
        sandbox = self._awake()
        if not await sandbox.is_quiet() or (shell := await _shell_state(sandbox)) is None:
            return None
        return Resting(await sandbox.snapshot(), shell)

    async def _come_back(self) -> None:
        if self._resting is not None:
            await self._restore(self._resting)
        elif self._rung is not SandboxRung.RUNNING:
            await self._awake().resume()
            self._rung = SandboxRung.RUNNING

    async def _restore(self, resting: Resting) -> None:
        if self._sandbox is not None:  # it was not ended when it was laid to rest
            await self._sandbox.stop()
        self._sandbox = await self._backend.start(self._name, self._blueprint, snapshot=resting.snapshot)
        result = await self._sandbox.shell(resting.shell, timeout_s=_SHELL_S)
        if result.exit_code != 0:
            raise SandboxError(f"sandbox {self._name!r}: its shell did not come back: {result.output}")
        self._resting, self._unused, self._rung = None, resting, SandboxRung.RUNNING

    async def _leave_snapshot(self) -> None:
        """It is about to differ from what it came back from."""
        if self._unused is not None:
            await self.before_use()
            await self._backend.forget(self._unused.snapshot)
            self._unused = None

    def _awake(self) -> Sandbox:
        if self._sandbox is None or self._stopped:
            raise SandboxError(f"sandbox {self._name!r} has ended")
        return self._sandbox

    @asynccontextmanager
    async def _used(self) -> AsyncGenerator[Sandbox]:
        """Running, and staying so, within the block."""
        if self._rung is not SandboxRung.RUNNING or self._unused is not None or self._moving.locked():
            async with self._moving:
                await self._come_back()
                await self._leave_snapshot()
        self._users += 1
        try:
            yield self._awake()
        finally:
            self._users -= 1

    # ---- what every sandbox does ----

    async def shell(self, command: str, *, timeout_s: float, output_bytes: int = 65536) -> ShellResult:
        async with self._used() as sandbox:
            return await sandbox.shell(command, timeout_s=timeout_s, output_bytes=output_bytes)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        output_bytes: int = 65536,
    ) -> ShellResult:
        async with self._used() as sandbox:
            return await sandbox.exec(argv, stdin=stdin, timeout_s=timeout_s, output_bytes=output_bytes)

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        async with self._used() as sandbox:
            return await sandbox.read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        async with self._used() as sandbox:
            await sandbox.write(path, data)

    async def upload(self, archive: bytes | IO[bytes], path: str = ".") -> None:
        async with self._used() as sandbox:
            await sandbox.upload(archive, path)

    async def download(self, path: str = ".", *, max_bytes: int = 64 << 20) -> bytes:
        async with self._used() as sandbox:
            return await sandbox.download(path, max_bytes=max_bytes)

    async def download_to(self, target: IO[bytes], path: str = ".", *, max_bytes: int) -> None:
        async with self._used() as sandbox:
            await sandbox.download_to(target, path, max_bytes=max_bytes)

    async def snapshot(self) -> Snapshot:
        async with self._used() as sandbox:
            return await sandbox.snapshot()

    async def pause(self) -> None:
        await self.move(SandboxRung.PAUSED)

    async def reclaim(self) -> None:
        await self.move(SandboxRung.RECLAIMED)

    async def resume(self) -> None:
        await self.move(SandboxRung.RUNNING)

    async def usage(self) -> SandboxUsage:
        if self._resting is not None:
            return SandboxUsage(0, 0, 0.0, 0, self._resting.snapshot.size_bytes)
        return await self._awake().usage()

    async def is_quiet(self) -> bool:
        return self._resting is not None or await self._awake().is_quiet()

    async def stop(self) -> None:
        self._stopped = True
        with anyio.CancelScope(shield=True):
            if self._sandbox is not None:
                await self._sandbox.stop()
            for resting in (self._resting, self._unused):
                if resting is not None:
                    await self._backend.forget(resting.snapshot)


async def _shell_state(sandbox: Sandbox) -> str | None:
    """Commands that bring directory and variables back; None when more than these would be lost."""
    root = await sandbox.exec(["pwd"], timeout_s=_SHELL_S)
    if root.output.strip() != INSIDE:  # its workspace would come back elsewhere
        return None
    empty = await sandbox.shell(_NOTHING_ELSEWHERE, timeout_s=_SHELL_S)
    variables = await sandbox.shell("export -p", timeout_s=_SHELL_S, output_bytes=_VARIABLES_BYTES)
    folder = await sandbox.shell("pwd", timeout_s=_SHELL_S)
    if empty.exit_code or variables.exit_code or folder.exit_code or variables.cut_bytes:
        return None
    return f"{variables.output}\ncd {shlex.quote(folder.output.rstrip())}"
