"""Swapping in new weights, in the one order that is safe.

    pause -> flush, where the policy wants it -> load -> verify label and checksum -> resume, always

- Nothing is aborted and nothing is flushed by a default of a call.
- A load that fails may have changed some tensors; what the server calls its roll-back reads the same new
  folder again.  From then on nothing that the engine samples is believed, until a whole version is verified.
"""

from dataclasses import dataclass
from zlib import crc32

import anyio
from pydantic import BaseModel, ConfigDict

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.http import EngineHttp, HttpRefusal
from sostenuto.runtime.engines.sglang.facts import ModelInfo
from sostenuto.runtime.engines.sglang.pausing import Pausing
from sostenuto.runtime.engines.sglang.transports import Transport
from sostenuto.runtime.engines.wire import CommitRequest, PauseMode
from sostenuto.trainer.publication.manifest import Manifest

_POLL_S = 0.05
_CHANGED = "Weights were updated"
"""How the server begins when it refuses only the flush."""


class _Checked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    per_engine_checksum: str | None = None


@dataclass(frozen=True, slots=True)
class _Sum:
    """What was loaded, as its sender and as the engine sums it up."""

    sent: int
    loaded: str | None


class Updating:
    """Of one server."""

    def __init__(self, admin: EngineHttp, pausing: Pausing, transport: Transport, *, within_s: float) -> None:
        """`within_s`: of each call that moves weights, and of waiting until nothing runs."""
        self._admin = admin
        self._pausing = pausing
        self._transport = transport
        self._within_s = within_s
        self._turn = anyio.Lock()
        self._prepared: Manifest | None = None
        self._last: _Sum | None = None
        self.doubt = ""
        """Why its weights are not known; empty while they are."""
        self.is_swapping = False
        self.is_under_way = False
        """Whether it may serve either version."""
        self.updates = 0

    async def prepare(self, manifest: Manifest) -> None:
        async with self._turn:
            self._prepared = None
            await self._transport.prepare(manifest)
            self._prepared = manifest

    async def abandon(self, version: str) -> None:
        async with self._turn:
            if self._prepared is not None and self._prepared.version == version:
                self._prepared = None
            await self._transport.abandon(version)

    async def commit(self, request: CommitRequest) -> float:
        """Swap to the prepared version; how long the engine stood still, in seconds."""
        async with self._turn:
            manifest = self._prepared
            if manifest is None or manifest.version != request.version:
                where = self._admin.where("commit_update")
                raise EngineError(f"{where}: version {request.version} is not prepared; prepare it first")
            began_s, self.is_under_way = anyio.current_time(), True
            try:
                await self._take_in(manifest, is_recomputed=request.running == "recompute")
                stood_s = anyio.current_time() - began_s
                await self._transport.served(manifest.version)
            finally:
                self.is_under_way = False
            return stood_s

    async def flush(self) -> None:
        """Drop all KV.  The server refuses while requests run; EngineError when that does not end."""
        refusal: HttpRefusal | None = None
        with anyio.move_on_after(self._within_s):
            while True:
                try:
                    await self._admin.post("/flush_cache")
                except HttpRefusal as error:
                    if error.status != 400:
                        raise
                    refusal = error
                else:
                    return
                await anyio.sleep(_POLL_S)
        raise EngineError(
            f"{self._admin.where('/flush_cache')}: requests run for over {self._within_s:g} s; "
            "pause with retract or abort before"
        ) from refusal

    def restarted(self) -> None:
        """The server is a new one, with the weights that it was started with."""
        self.doubt, self._last = "", None
        self._transport.restarted()

    async def _take_in(self, manifest: Manifest, *, is_recomputed: bool) -> None:
        async with self._pausing.standing_still(PauseMode.RETRACT if is_recomputed else PauseMode.KEEP):
            if is_recomputed:
                await self.flush()
            await self._swap(manifest)

    async def _swap(self, manifest: Manifest) -> None:
        version = manifest.version
        self.is_swapping = True
        try:
            await self._load(version)
            await self._verify(manifest)
        except BaseException as error:
            # Also a cancelled call leaves nobody who knows what is loaded.
            reason = str(error) or "it was given up"
            self.doubt = f"its update to {version} failed: {reason}"
            raise
        finally:
            self.is_swapping = False
        self.doubt = ""
        self.updates += 1

    async def _load(self, version: str) -> None:
        try:
            await self._transport.load(self._admin, version, self._within_s)
        except HttpRefusal as refusal:
            if not refusal.said.startswith(_CHANGED):
                raise
            # The weights are new and only the label is missing; KV was to stay, or is flushed already.
            label = {"new_version": version, "abort_all_requests": False}
            await self._admin.post("/update_weight_version", label)

    async def _verify(self, manifest: Manifest) -> None:
        label = (await self._admin.get("/model_info")).read(ModelInfo).weight_version
        if label != manifest.version:
            where = self._admin.where("/model_info")
            raise EngineError(f"{where}: it serves {label} after the update to {manifest.version}")
        sent = crc32("".join(f"{entry.name} {entry.checksum} " for entry in manifest.tensors).encode())
        now = _Sum(sent, await self._checksum())
        before, self._last = self._last, now
        if before is None or None in (before.loaded, now.loaded):
            return
        is_same = before.sent == now.sent
        if is_same != (before.loaded == now.loaded):
            raise EngineError(
                f"{self._admin.where('/weights_checker')}: checksum {before.loaded} became {now.loaded}, "
                f"but the tensors that were sent {'are the same' if is_same else 'differ'}"
            )

    async def _checksum(self) -> str | None:
        """Over all tensors of the engine; None where it has no checker."""
        try:
            answer = await self._admin.post(
                "/weights_checker", {"action": "checksum"}, within_s=self._within_s
            )
        except HttpRefusal as refusal:
            if refusal.status in (400, 404, 405, 500):
                return None
            raise
        return answer.read(_Checked).per_engine_checksum
