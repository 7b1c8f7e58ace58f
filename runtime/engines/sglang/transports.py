"""How new weights get into a server that stands still.

- `Disk`: a folder that the server reads; both see the same file system.
- `Distributed`: the sender broadcasts in a process group that the server joins.  The bytes do not pass
  through this process: it says what comes, and asks the sender to send it at the same time.
"""

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import anyio.lowlevel
import anyio.to_thread
from pydantic import BaseModel, ConfigDict

from sostenuto.errors import EngineError, lone_error
from sostenuto.runtime.engines.folder import WeightFolders
from sostenuto.runtime.engines.http import EngineHttp, HttpRefusal
from sostenuto.trainer.publication.manifest import Manifest, TensorEntry


class Done(BaseModel):
    """What every call about weights answers."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    success: bool
    message: str = ""


class Transport(Protocol):
    """One server's way to new weights."""

    async def prepare(self, manifest: Manifest) -> None:
        """Whatever can be done while the server decodes."""
        ...

    async def prepare_start(self, version: str) -> None:
        """The same for the weights of the model's own folder, as this version."""
        ...

    async def load(self, admin: EngineHttp, version: str, within_s: float) -> None:
        """Load what was prepared; the server stands still.  EngineError leaves the weights unknown."""
        ...

    async def served(self, version: str) -> None:
        """`version` is verified; what is not needed any more may go."""
        ...

    async def abandon(self, version: str) -> None:
        """`version` will not be loaded."""
        ...

    def restarted(self) -> None:
        """The server is a new one: what was agreed with the old one is void."""
        ...


class Disk:
    """Through folders."""

    def __init__(self, folders: WeightFolders) -> None:
        self._folders = folders
        self._serving: str = ""

    async def prepare(self, manifest: Manifest) -> None:
        await anyio.to_thread.run_sync(self._folders.write, manifest)

    async def prepare_start(self, version: str) -> None:
        await anyio.to_thread.run_sync(self._folders.adopt, version)

    async def load(self, admin: EngineHttp, version: str, within_s: float) -> None:
        body = {
            "model_path": str(self._folders.place(version).absolute()),
            "load_format": "safetensors",
            "abort_all_requests": False,
            "flush_cache": False,
            "weight_version": version,
        }
        await ask(admin, "/update_weights_from_disk", body, within_s)

    async def served(self, version: str) -> None:
        self._serving = version
        await anyio.to_thread.run_sync(self._folders.keep, version)

    async def abandon(self, version: str) -> None:
        if version != self._serving:
            await anyio.to_thread.run_sync(self._folders.keep, self._serving)

    def restarted(self) -> None:
        self._serving = ""


@dataclass(frozen=True, slots=True)
class Group:
    """The process group; the sender is rank 0."""

    master_address: str
    master_port: int
    world_size: int
    """The sender and every rank of the server."""
    backend: str = "nccl"
    name: str = "sostenuto"
    rank_offset: int = 1


class Sender(Protocol):
    """The trainer's side of the group."""

    async def join(self, group: Group) -> None:
        """Open the group as rank 0; returns when the server has joined."""
        ...

    async def send(self, version: str, bucket: Sequence[TensorEntry]) -> None:
        """Broadcast these tensors in this order."""
        ...


class Distributed:
    """Through a process group, in buckets."""

    def __init__(self, group: Group, sender: Sender, *, bucket_bytes: int = 512 << 20) -> None:
        self._group = group
        self._sender = sender
        self._bucket_bytes = bucket_bytes
        self._manifest: Manifest | None = None
        self._is_joined = False

    async def prepare(self, manifest: Manifest) -> None:
        await anyio.lowlevel.checkpoint()
        self._manifest = manifest

    async def prepare_start(self, version: str) -> None:
        await anyio.lowlevel.checkpoint()
        raise EngineError(f"version {version}: no sender has the model's own folder; use the transport Disk")

    async def load(self, admin: EngineHttp, version: str, within_s: float) -> None:
        assert self._manifest is not None
        with anyio.CancelScope() as scope, lone_error():
            scope.deadline = anyio.current_time() + within_s
            await self._load(self._manifest, admin, within_s)
        if scope.cancelled_caught:
            route = admin.where("/update_weights_from_distributed")
            raise EngineError(f"{route}: not sent within {within_s:g} s; is the sender in the group?")

    async def served(self, version: str) -> None:
        del version
        await anyio.lowlevel.checkpoint()

    async def abandon(self, version: str) -> None:
        await anyio.lowlevel.checkpoint()
        if self._manifest is not None and self._manifest.version == version:
            self._manifest = None

    def restarted(self) -> None:
        self._is_joined = False

    async def _load(self, manifest: Manifest, admin: EngineHttp, within_s: float) -> None:
        if not self._is_joined:
            await self._join(admin, within_s)
        await ask(admin, "/begin_weight_update", {"selector": "all"}, within_s)
        try:
            for bucket in buckets(manifest.tensors, self._bucket_bytes):
                await self._send(admin, manifest.version, bucket, within_s)
        except BaseException:
            # A session that is left open refuses the next update, which is to repair this one.
            with anyio.CancelScope(shield=True), suppress(EngineError):
                await ask(admin, "/end_weight_update", {}, within_s)
            raise
        await ask(admin, "/end_weight_update", {}, within_s)
        # The default of `abort_all_requests` would abort what the pause has kept.
        label = {"new_version": manifest.version, "abort_all_requests": False}
        await ask(admin, "/update_weight_version", label, within_s)

    async def _join(self, admin: EngineHttp, within_s: float) -> None:
        group = self._group
        body = {
            "master_address": group.master_address,
            "master_port": group.master_port,
            "rank_offset": group.rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await _together(
            lambda: ask(admin, "/init_weights_update_group", body, within_s), lambda: self._sender.join(group)
        )
        self._is_joined = True

    async def _send(
        self, admin: EngineHttp, version: str, bucket: Sequence[TensorEntry], within_s: float
    ) -> None:
        body = {
            "names": [entry.name for entry in bucket],
            "dtypes": [entry.dtype for entry in bucket],
            "shapes": [list(entry.shape) for entry in bucket],
            "group_name": self._group.name,
            "flush_cache": False,
            "abort_all_requests": False,
            "selector": "all",
        }
        await _together(
            lambda: ask(admin, "/update_weights_from_distributed", body, within_s),
            lambda: self._sender.send(version, bucket),
        )


def buckets(tensors: Sequence[TensorEntry], limit_bytes: int) -> list[list[TensorEntry]]:
    """In order, each at most `limit_bytes` or a single tensor."""
    parts: list[list[TensorEntry]] = []
    room = 0
    for entry in tensors:
        if not parts or entry.nbytes > room:
            parts.append([])
            room = limit_bytes
        parts[-1].append(entry)
        room -= entry.nbytes
    return parts


async def ask(admin: EngineHttp, route: str, body: dict[str, Any], within_s: float) -> None:
    """A call about weights; what it refuses is an EngineError with its own words."""
    done = (await admin.post(route, body, within_s=within_s)).read(Done)
    if not done.success:
        raise HttpRefusal(f"{admin.where(route)}: {done.message}", status=200, said=done.message)


async def _together(*calls: Callable[[], Coroutine[None, None, None]]) -> None:
    """Neither of them ends without the other; one that fails ends both."""
    async with anyio.create_task_group() as group:
        for call in calls:
            group.start_soon(call)
