"""What the sandbox tests share: backends by name, a root that every user can enter, and what was left."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio

from sostenuto.sandbox import processes
from sostenuto.sandbox.bubblewrap import BubblewrapBackend
from sostenuto.sandbox.landlock import LandlockBackend
from sostenuto.sandbox.plain import ProcessBackend
from sostenuto.sandbox.protocol import Backend, Blueprint, Sandbox

ISOLATING = ("bubblewrap", "landlock")
ALL = (*ISOLATING, "process")


@contextmanager
def sandbox_root() -> Generator[Path]:
    """Not `tmp_path`: pytest keeps other users out of that, and a sandbox may have a user of its own."""
    root = Path(tempfile.mkdtemp(prefix="sostenuto-test-"))
    root.chmod(0o711)
    try:
        yield root
    finally:
        shutil.rmtree(root)


def backend_of(name: str, root: Path) -> Backend:
    if name == "process":
        return ProcessBackend(root, unsafe=True)
    return BubblewrapBackend(root) if name == "bubblewrap" else LandlockBackend(root)


@asynccontextmanager
async def running(kind: str, blueprint: Blueprint | None = None) -> AsyncGenerator[tuple[Sandbox, Path]]:
    """A sandbox and its root; afterwards it is stopped and nothing of it may be left."""
    with sandbox_root() as root:
        sandbox = await backend_of(kind, root).start("tested", blueprint or Blueprint())
        try:
            yield sandbox, root
        finally:
            await sandbox.stop()
        assert left_processes(root) == []
        assert entries(root) == []


async def output_of(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.shell(command, timeout_s=20)).output.strip()


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def left_processes(root: Path) -> list[str]:
    """Command lines of other processes that were started for a sandbox under `root`."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes()
                if str(root).encode() in words + (entry / "environ").read_bytes():
                    found.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return found


def supervisor_below(parent: int, root: Path) -> int:
    """The one child of `parent` that supervises a sandbox under `root`; it may have other children."""
    (supervisor,) = (
        child for child in processes.children(parent) if str(root).encode() in _environment(child)
    )
    return supervisor


def commands_inside(root: Path) -> list[str]:
    """Command lines of the processes of the one sandbox under `root` that this process started."""
    launcher = supervisor_below(os.getpid(), root)
    found: list[str] = []
    for pid in processes.descendants(launcher):
        with suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip())
    return found


def pipes_inside(root: Path) -> list[str]:
    """Names of the pipes of the one sandbox under `root`."""
    (folder,) = root.iterdir()
    pipes = folder / "pipes"
    pipes.chmod(0o711)
    try:
        return entries(pipes)
    finally:
        pipes.chmod(0o311)


def _environment(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


async def nothing_left(root: Path) -> bool:
    """Whether every process of `root` is gone within seconds of its owner."""
    with anyio.move_on_after(10):
        while left_processes(root):  # noqa: ASYNC110 - processes of others set no event
            await anyio.sleep(0.01)
    return not left_processes(root)


class CancelledAt:
    """Awaits `work`, throwing a cancellation into it at each of the given awaits, counted from 0."""

    def __init__(self, work: Coroutine[Any, Any, object], *awaits: int) -> None:
        self._work = work
        self._awaits = awaits
        self.count = 0

    def __await__(self) -> Generator[Any, Any, object]:
        steps = self._work.__await__()
        thrown: BaseException | None = None
        while True:
            try:
                waited = steps.throw(thrown) if thrown else steps.send(None)
            except StopIteration as stop:
                return stop.value
            thrown = None
            self.count += 1
            if self.count - 1 in self._awaits:
                thrown = asyncio.CancelledError()
                if waited is not None:
                    waited.cancel()
                continue
            try:
                yield waited
            except BaseException as exc:  # noqa: BLE001 - handed on to the work
                thrown = exc


async def cancelled_at(work: Coroutine[Any, Any, object], *awaits: int) -> bool:
    """Whether `work` had so many awaits that it was cancelled; it may have finished all the same."""
    driven = CancelledAt(work, *awaits)
    with suppress(asyncio.CancelledError):
        await driven
    return driven.count > awaits[0]
