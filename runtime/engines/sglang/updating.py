"""Swapping in new weights, in the one order that is safe.

    pause -> flush, where the policy wants it -> load -> verify label and checksum -> resume, always

- Nothing is aborted and nothing is flushed by a default of a call.
- A load that fails may have changed some tensors; what the server calls its roll-back reads the same new
  folder again.  From then on nothing that the engine samples is believed, until a whole version is verified.
"""

from collections.abc import Awaitable, Callable

import anyio
from pydantic import BaseModel, ConfigDict

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.http import EngineHttp, HttpRefusal
from sostenuto.runtime.engines.sglang.facts import ModelInfo
from sostenuto.runtime.engines.sglang.pausing import Pausing
from sostenuto.runtime.engines.sglang.transports import Transport
from sostenuto.runtime.engines.verifying import Prepared, Surface, Verifier
from sostenuto.runtime.engines.wire import CommitRequest, PauseMode
from sostenuto.trainer.publication.manifest import Manifest

_POLL_S = 0.05
_CHANGED = "Weights were updated"
"""How the server begins when it refuses only the flush."""


class _Checked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    per_engine_checksum: str | None = None


_SURFACE = Surface(
    label="/model_info",
    label_of=lambda answer: answer.read(ModelInfo).weight_version,
    checker="/weights_checker",
    sum_of=lambda answer: answer.read(_Checked).per_engine_checksum,
)


class Updating:
    """Of one server."""

    def __init__(
        self,
        admin: EngineHttp,
        pausing: Pausing,
        transport: Transport,
        *,
        within_s: float,
        start_is_known: bool,
    ) -> None:
        """`within_s`: of each call that moves weights, and of waiting until nothing runs."""
        self._admin = admin
        self._pausing = pausing
        self._transport = transport
        self._within_s = within_s
        self._turn = anyio.Lock()
        self._prepared: Prepared | None = None
        self._verifier = Verifier(admin, _SURFACE, within_s=within_s, start_is_known=start_is_known)
        self.doubt = ""
        """Why its weights are not known; empty while they are."""
        self.is_swapping = False
        self.is_under_way = False
        """Whether it may serve either version."""
        self.updates = 0

    @property
    def is_known(self) -> bool:
        """False while it serves what others have started it with, and that is not known."""
        return self._verifier.is_known

    @property
    def disbelief(self) -> str:
        """Why nothing that it samples is believed; empty where it is."""
        return self.doubt or ("" if self.is_known else "nobody knows the weights it was started with")

    async def prepare(self, manifest: Manifest) -> None:
        await self._prepare(Prepared(manifest.version, manifest), lambda: self._transport.prepare(manifest))

    async def prepare_start(self, version: str) -> None:
        """The weights of the model's own folder."""
        await self._prepare(Prepared(version, None), lambda: self._transport.prepare_start(version))

    async def _prepare(self, prepared: Prepared, prepare: Callable[[], Awaitable[None]]) -> None:
        async with self._turn:
            self._prepared = None
            await prepare()
            self._prepared = prepared

    async def abandon(self, version: str) -> None:
        async with self._turn:
            if self._prepared is not None and self._prepared.version == version:
                self._prepared = None
            await self._transport.abandon(version)

    async def commit(self, request: CommitRequest) -> float:
        """Swap to the prepared version; how long the engine stood still, in seconds."""
        async with self._turn:
            prepared = self._prepared
            if prepared is None or prepared.version != request.version:
                where = self._admin.where("commit_update")
                raise EngineError(f"{where}: version {request.version} is not prepared; prepare it first")
            began_s, self.is_under_way = anyio.current_time(), True
            try:
                await self._take_in(prepared, is_recomputed=request.running == "recompute")
                stood_s = anyio.current_time() - began_s
                await self._transport.served(prepared.version)
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
        self.doubt = ""
        self._verifier.restarted()
        self._transport.restarted()

    async def _take_in(self, prepared: Prepared, *, is_recomputed: bool) -> None:
        async with self._pausing.standing_still(PauseMode.RETRACT if is_recomputed else PauseMode.KEEP):
            if is_recomputed:
                await self.flush()
            await self._swap(prepared)

    async def _swap(self, prepared: Prepared) -> None:
        version = prepared.version
        self.is_swapping = True
        try:
            await self._load(version)
            await self._verifier.verify(prepared)
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
