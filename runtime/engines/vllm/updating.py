"""Swapping in new weights, in the one order that is safe.

    pause(keep) -> load -> drop KV, as the request says -> label -> verify label and checksum -> resume,
    however it ends

- A load that fails may have changed some tensors.  From then on nothing that the engine samples is
  believed, until a whole version is verified; what runs is ended before the engine goes on.
- vLLM drops KV of running requests and of those that wait for their tool only together.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from zlib import crc32

import anyio
from pydantic import BaseModel, ConfigDict

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.http import EngineHttp, HttpRefusal
from sostenuto.runtime.engines.vllm.pausing import Pausing
from sostenuto.runtime.engines.vllm.transports import Transport
from sostenuto.runtime.engines.wire import CommitRequest
from sostenuto.trainer.publication.manifest import Manifest

_NO_CHECKER = (404, 405, 500, 501)


class WeightInfo(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    weight_version: str


class _Checksums(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    checksums: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Sum:
    """What was loaded, as its sender and as the engine sums it up."""

    sent: int
    loaded: int | None


class Updating:
    """Of one server."""

    def __init__(
        self,
        http: EngineHttp,
        pausing: Pausing,
        transport: Transport,
        *,
        within_s: float,
        forsake: Callable[[], Awaitable[None]],
    ) -> None:
        """`within_s`: of each call that moves weights.  `forsake` ends every request that runs."""
        self._http = http
        self._pausing = pausing
        self._transport = transport
        self._within_s = within_s
        self._forsake = forsake
        self._turn = anyio.Lock()
        self._prepared: Manifest | None = None
        self._last: _Sum | None = None
        self.doubt = ""
        """Why its weights are not known; empty while they are."""
        self.is_under_way = False
        """Whether it may serve either version."""
        self.updates = 0

    async def prepare(self, manifest: Manifest) -> None:
        async with self._turn:
            self._prepared = None
            try:
                await self._transport.prepare(manifest)
            except EngineError as error:
                raise EngineError(f"{self._http.where('prepare_update')}: {error}") from error
            self._prepared = manifest

    async def abandon(self, version: str) -> None:
        async with self._turn:
            if self._prepared is not None and self._prepared.version == version:
                self._prepared = None
            await self._transport.abandon(version)

    async def commit(self, request: CommitRequest) -> float:
        """Serve the prepared version; how long the engine stood still, in seconds."""
        async with self._turn:
            manifest = self._checked(request)
            began_s, self.is_under_way = anyio.current_time(), True
            try:
                async with self._pausing.standing_still():
                    await self._swap(manifest, request)
                stood_s = anyio.current_time() - began_s
                self._prepared = None
                await self._transport.served(manifest.version)
            finally:
                self.is_under_way = False
            return stood_s

    def restarted(self) -> None:
        """The server is a new one, with the weights that it was started with."""
        self.doubt, self._last = "", None
        self._transport.restarted()

    def _checked(self, request: CommitRequest) -> Manifest:
        where, manifest = self._http.where("commit_update"), self._prepared
        if manifest is None or manifest.version != request.version:
            raise EngineError(f"{where}: version {request.version} is not prepared; prepare it first")
        if request.running == "recompute" and request.held == "keep":
            remedy = "drop it, too, or let running requests continue"
            raise EngineError(
                f"{where}: vLLM cannot keep held KV and compute that of requests anew; {remedy}"
            )
        return manifest

    async def _swap(self, manifest: Manifest, request: CommitRequest) -> None:
        version = manifest.version
        self.doubt = f"its update to {version} did not come to an end"
        try:
            await self._transport.load(self._http, manifest, self._within_s)
            await self._drop_kv(request)
            await self._http.post("/update_weight_version", {"new_version": version}, repeatable=True)
            await self._verify(manifest)
        except EngineError as error:
            self.doubt = f"its update to {version} failed: {error}"
            raise
        else:
            self.doubt = ""
            self.updates += 1
        finally:
            if self.doubt:
                with anyio.CancelScope(shield=True):
                    await self._forsake()

    async def _drop_kv(self, request: CommitRequest) -> None:
        """With running requests that continue, KV cannot be dropped: later turns have another salt."""
        if request.held == "keep":
            return
        of_running = request.running == "recompute"
        if not await self._pausing.drop_kv(of_running=of_running) and of_running:
            where = self._http.where("/reset_prefix_cache")
            raise EngineError(f"{where}: it did not drop the KV of the old weights; start it again")

    async def _verify(self, manifest: Manifest) -> None:
        label = (await self._http.get("/weight_info")).read(WeightInfo).weight_version
        if label != manifest.version:
            where = self._http.where("/weight_info")
            raise EngineError(f"{where}: it serves {label} after the update to {manifest.version}")
        sent = crc32("".join(f"{entry.name} {entry.checksum} " for entry in manifest.tensors).encode())
        now = _Sum(sent, await self._checksum())
        before, self._last = self._last, now
        if before is None or before.loaded is None or now.loaded is None:
            return
        if (before.sent == now.sent) != (before.loaded == now.loaded):
            where = self._http.where("/weight_checker")
            raise EngineError(
                f"{where}: its weights {'did not change' if before.loaded == now.loaded else 'changed'}, "
                f"and what was sent {'did not' if before.sent == now.sent else 'did'}; start it again"
            )

    async def _checksum(self) -> int | None:
        """Over all tensors of the engine; None where it has no checker."""
        try:
            answer = await self._http.post("/weight_checker", {"action": "checksum"}, within_s=self._within_s)
        except HttpRefusal as refusal:
            if refusal.status in _NO_CHECKER:
                return None
            raise
        found = answer.read(_Checksums).checksums
        return crc32("".join(f"{name} {found[name]} " for name in sorted(found)).encode())
