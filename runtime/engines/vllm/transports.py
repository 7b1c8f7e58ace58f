"""How new weights get into a server that stands still.

- `Disk`: a folder that the server reads; both see the same file system.
- `Distributed`: the sender broadcasts to workers that have joined its group (`--weight-transfer-config`).
  The bytes do not pass through this process: it says what comes, and asks the sender to send it meanwhile.
"""

import json
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.lowlevel
import anyio.to_thread

from sostenuto.errors import EngineError, lone_error
from sostenuto.runtime.engines.folder import WeightFolders
from sostenuto.runtime.engines.http import EngineHttp
from sostenuto.trainer.publication.manifest import Manifest


class Transport(Protocol):
    """One server's way to new weights."""

    async def prepare(self, manifest: Manifest) -> None:
        """Whatever can be done while the server decodes."""
        ...

    async def prepare_start(self, version: str) -> None:
        """The same for the weights of the model's own folder, as this version."""
        ...

    async def load(self, http: EngineHttp, version: str, within_s: float) -> None:
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
    """Through folders under `directory`, which the server reaches under the same path."""

    def __init__(self, directory: Path, model: Path) -> None:
        """`model`: the folder of the served model."""
        self._model = model
        self._folders = WeightFolders(directory, model)
        self._serving = ""

    async def prepare(self, manifest: Manifest) -> None:
        await anyio.to_thread.run_sync(self._write, manifest)

    async def prepare_start(self, version: str) -> None:
        await anyio.to_thread.run_sync(self._folders.adopt, version)

    async def load(self, http: EngineHttp, version: str, within_s: float) -> None:
        path = str(self._folders.place(version).absolute())
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}, "timeout": within_s}
        await http.post("/collective_rpc", body, within_s=within_s)

    async def served(self, version: str) -> None:
        self._serving = version
        await anyio.to_thread.run_sync(self._folders.keep, version)

    async def abandon(self, version: str) -> None:
        if version != self._serving:
            await anyio.to_thread.run_sync(self._folders.keep, self._serving)

    def restarted(self) -> None:
        self._serving = ""

    def _write(self, manifest: Manifest) -> None:
        check_whole(manifest, self._model)
        self._folders.write(manifest)


class Sender(Protocol):
    """The trainer's side of the group."""

    async def join(self) -> None:
        """Open the group; returns when the workers have joined."""
        ...

    async def send(self, manifest: Manifest) -> None:
        """Broadcast these tensors in this order."""
        ...


class Distributed:
    """Through vLLM's weight transfer."""

    def __init__(self, init_info: Mapping[str, Any], sender: Sender) -> None:
        """`init_info`: what the backend's workers need to join, such as `master_address`."""
        self._init_info = dict(init_info)
        self._sender = sender
        self._manifest: Manifest | None = None
        self._is_joined = False

    async def prepare(self, manifest: Manifest) -> None:
        """The sender has the tensors."""
        await anyio.lowlevel.checkpoint()
        self._manifest = manifest

    async def prepare_start(self, version: str) -> None:
        await anyio.lowlevel.checkpoint()
        raise EngineError(f"version {version}: no sender has the model's own folder; use the transport Disk")

    async def load(self, http: EngineHttp, version: str, within_s: float) -> None:
        assert self._manifest is not None
        assert self._manifest.version == version
        with anyio.CancelScope() as scope, lone_error():
            scope.deadline = anyio.current_time() + within_s
            await self._load(http, self._manifest, within_s)
        if scope.cancelled_caught:
            where = http.where("/update_weights")
            raise EngineError(f"{where}: not sent within {within_s:g} s; is the sender in the group?")

    async def served(self, version: str) -> None:
        del version
        await anyio.lowlevel.checkpoint()

    async def abandon(self, version: str) -> None:
        await anyio.lowlevel.checkpoint()
        if self._manifest is not None and self._manifest.version == version:
            self._manifest = None

    def restarted(self) -> None:
        self._is_joined = False

    async def _load(self, http: EngineHttp, manifest: Manifest, within_s: float) -> None:
        if not self._is_joined:
            body = {"init_info": self._init_info}
            await _together(_asking(http, "/init_weight_transfer_engine", body, within_s), self._sender.join)
            self._is_joined = True
        info = {
            "names": [entry.name for entry in manifest.tensors],
            "dtype_names": [entry.dtype for entry in manifest.tensors],
            "shapes": [list(entry.shape) for entry in manifest.tensors],
        }
        await http.post("/start_weight_update", {}, within_s=within_s)
        await _together(
            _asking(http, "/update_weights", {"update_info": info}, within_s),
            lambda: self._sender.send(manifest),
        )
        await http.post("/finish_weight_update", {"weight_version": manifest.version}, within_s=within_s)


def check_whole(manifest: Manifest, model: Path) -> None:
    """EngineError when a tensor of the served model is missing: vLLM would keep the old one of it, and
    say so in its log alone.  A head that is tied to the embedding may be missing.
    """
    sent = {entry.name for entry in manifest.tensors}
    names = {name for path in sorted(model.glob("*.safetensors")) for name in _names(path)}
    missing = sorted(names - sent - _tied(model))
    if missing:
        raise EngineError(
            f"{missing[0]!r}: is missing in version {manifest.version}; publish the whole model"
        )


def _names(path: Path) -> list[str]:
    """The tensors of a safetensors file: its first 8 bytes are the length of a JSON header."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [name for name in header if name != "__metadata__"]


def _tied(model: Path) -> set[str]:
    config = json.loads((model / "config.json").read_text())
    return {"lm_head.weight"} if config.get("tie_word_embeddings") else set()


def _asking(
    http: EngineHttp, route: str, body: Mapping[str, Any], within_s: float
) -> Callable[[], Coroutine[Any, Any, None]]:
    async def ask() -> None:
        await http.post(route, body, within_s=within_s)

    return ask


async def _together(*calls: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Neither of them ends without the other; one that fails ends both."""
    async with anyio.create_task_group() as group:
        for call in calls:
            group.start_soon(call)
