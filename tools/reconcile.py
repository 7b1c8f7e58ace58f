"""The folder of what survives the server, and what is done at the start with what its predecessor left.

    STATE/lock             held by the server that lives; its pid is in it
    STATE/journal.sqlite   see tools/journal.py

What belongs to the living is never touched: the folders of sandboxes say who made them, a backend with
`reclaim` tells its own orphans, and of this folder's journal there is one owner at a time.
"""

import fcntl
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from logging import getLogger
from pathlib import Path
from typing import Protocol, runtime_checkable

import anyio
from anyio import to_thread

from sostenuto.errors import ConfigError, SostenutoError
from sostenuto.sandbox.cgroup_end import reclaim_cgroups
from sostenuto.sandbox.cgroup_tree import Tree
from sostenuto.sandbox.folders import reclaim
from sostenuto.sandbox.protocol import Backend
from sostenuto.sandbox.snapshots import seal_of
from sostenuto.tools.config import ServerConfig
from sostenuto.tools.journal import Journal, Left, open_journal
from sostenuto.tools.rests import snapshots_of

log = getLogger(__name__)

_BACKEND_S = 60.0
_LOOK_S = 0.05


@runtime_checkable
class Reclaims(Protocol):
    """A backend whose sandboxes outlive the process that made them."""

    async def reclaim(self) -> Sequence[str]:
        """End and remove what dead processes have left, and name it; what has a living owner stays."""
        ...


@asynccontextmanager
async def open_state(config: ServerConfig) -> AsyncGenerator[Journal]:
    """The journal in `state_dir`, which nobody else uses meanwhile, or the ConfigError that says who does."""
    state_dir = config.state_dir
    if state_dir is None:
        async with open_journal(None) as journal:
            yield journal
        return
    async with (
        _locked(state_dir, config.takeover_s),
        open_journal(state_dir / "journal.sqlite") as journal,
    ):
        yield journal


async def reclaim_orphans(config: ServerConfig, backend: Backend, journal: Journal) -> int:
    """End and remove what dead servers have left, but for snapshots; how many sandboxes and groups it was."""
    orphans = await to_thread.run_sync(_reclaim_here, config.sandbox_root, journal)
    if isinstance(backend, Reclaims):
        orphans += await _reclaimed(backend)
    for name in orphans:
        log.warning("reclaimed what a tool server before had left: %s", name)
    for name in journal.left.sandboxes:
        if name not in orphans:
            log.warning("sandbox %s of a tool server before is gone already", name)
        journal.sandbox_went(name)
    return len(orphans)


async def verify_layers(journal: Journal, backend: str) -> None:
    """Of the layers that a server before has left, let only those be left which are as they were made."""
    layers = journal.left.layers
    for content, row in list(layers.items()):
        intact = row.snapshot.backend == backend and row.seal == await to_thread.run_sync(
            seal_of, row.snapshot
        )
        if not intact:
            log.warning("the layer of %.12s of a tool server before is not what it was", content)
            del layers[content]


async def forget_ownerless(backend: Backend, left: Left) -> None:
    """Remove the snapshots that a dead server has left, but for layers and what programs can go on from."""
    owned = snapshots_of(left) | {row.snapshot for row in left.layers.values()}
    for snapshot in left.snapshots:
        if snapshot.backend != backend.name or snapshot in owned:
            continue
        try:
            with anyio.fail_after(_BACKEND_S):
                await backend.forget(snapshot)
        except (SostenutoError, TimeoutError) as error:
            log.warning("snapshot %s could not be removed: %s", snapshot.reference, error)


def _reclaim_here(sandbox_root: str | None, journal: Journal) -> list[str]:
    """What is on this machine's own disk and in its kernel."""
    orphans = reclaim_cgroups(Tree())
    if sandbox_root is not None:
        orphans += reclaim(Path(sandbox_root), keep={one.reference for one in journal.left.snapshots})
    return orphans


async def _reclaimed(backend: Reclaims) -> Sequence[str]:
    try:
        with anyio.fail_after(_BACKEND_S):
            return await backend.reclaim()
    except (SostenutoError, TimeoutError) as error:
        log.error("what tool servers before have left could not be reclaimed: %s", error)  # noqa: TRY400
        return ()


@asynccontextmanager
async def _locked(state_dir: Path, takeover_s: float) -> AsyncGenerator[None]:
    fd = _open(state_dir)
    try:
        await _lock(fd, state_dir, takeover_s)
        yield
    finally:
        os.close(fd)


def _open(state_dir: Path) -> int:
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"state_dir: {state_dir} cannot be used: {error}; name another folder") from error


async def _lock(fd: int, state_dir: Path, takeover_s: float) -> None:
    with anyio.move_on_after(takeover_s):
        # The system tells nobody of a lock that comes free in a way that a loop could wait for.
        while not _try_lock(fd):  # noqa: ASYNC110
            await anyio.sleep(_LOOK_S)
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        return
    pid = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
    raise ConfigError(
        f"state_dir: {state_dir} is in use by the tool server with pid {pid}; "
        "end that one, or name another folder"
    )


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
