"""Swapping in new weights, in the one order that is safe.

    pause(keep) -> load -> drop KV, as the request says -> label -> verify label and checksum -> resume,
    however it ends

- A load that fails may have changed some tensors.  From then on nothing that the engine samples is
  believed, until a whole version is verified; what runs is ended before the engine goes on.
- vLLM drops KV of running requests and of those that wait for their tool only together.
"""

from collections.abc import Awaitable, Callable
from zlib import crc32

import anyio
from pydantic import BaseModel, ConfigDict

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.http import Answer, EngineHttp
from sostenuto.runtime.engines.verifying import Prepared, Surface, Verifier
from sostenuto.runtime.engines.vllm.pausing import Pausing
from sostenuto.runtime.engines.vllm.transports import Transport
from sostenuto.runtime.engines.wire import CommitRequest
from sostenuto.trainer.publication.manifest import Manifest


class WeightInfo(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    weight_version: str


class _Checksums(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    checksums: dict[str, str]


def _sum(answer: Answer) -> str:
    found = answer.read(_Checksums).checksums
    return str(crc32("".join(f"{name} {found[name]} " for name in sorted(found)).encode()))


_SURFACE = Surface(
    label="/weight_info",
    label_of=lambda answer: answer.read(WeightInfo).weight_version,
    checker="/weight_checker",
    sum_of=_sum,
)


class Updating:
    """Of one server."""

    def __init__(
        self,
        http: EngineHttp,
        pausing: Pausing,
        transport: Transport,
        *,
        within_s: float,
        start_is_known: bool,
        forsake: Callable[[], Awaitable[None]],
    ) -> None:
        """`within_s`: of each call that moves weights.  `forsake` ends every request that runs."""
        self._http = http
        self._pausing = pausing
        self._transport = transport
        self._within_s = within_s
        self._forsake = forsake
        self._turn = anyio.Lock()
        self._prepared: Prepared | None = None
        self._verifier = Verifier(http, _SURFACE, within_s=within_s, start_is_known=start_is_known)
        self.doubt = ""
        """Why its weights are not known; empty while they are."""
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
            try:
                await prepare()
            except EngineError as error:
                raise EngineError(f"{self._http.where('prepare_update')}: {error}") from error
            self._prepared = prepared

    async def abandon(self, version: str) -> None:
        async with self._turn:
            if self._prepared is not None and self._prepared.version == version:
                self._prepared = None
            await self._transport.abandon(version)

    async def commit(self, request: CommitRequest) -> float:
        """Serve the prepared version; how long the engine stood still, in seconds."""
        async with self._turn:
            prepared = self._checked(request)
            began_s, self.is_under_way = anyio.current_time(), True
            try:
                async with self._pausing.standing_still():
                    await self._swap(prepared, request)
                stood_s = anyio.current_time() - began_s
                self._prepared = None
                await self._transport.served(prepared.version)
            finally:
                self.is_under_way = False
            return stood_s

    def restarted(self) -> None:
        """The server is a new one, with the weights that it was started with."""
        self.doubt = ""
        self._verifier.restarted()
        self._transport.restarted()

    def _checked(self, request: CommitRequest) -> Prepared:
        where, prepared = self._http.where("commit_update"), self._prepared
        if prepared is None or prepared.version != request.version:
            raise EngineError(f"{where}: version {request.version} is not prepared; prepare it first")
        if request.running == "recompute" and request.held == "keep":
            remedy = "drop it, too, or let running requests continue"
            raise EngineError(
                f"{where}: vLLM cannot keep held KV and compute that of requests anew; {remedy}"
            )
        return prepared

    async def _swap(self, prepared: Prepared, request: CommitRequest) -> None:
        version = prepared.version
        self.doubt = f"its update to {version} did not come to an end"
        try:
            await self._transport.load(self._http, version, self._within_s)
            await self._drop_kv(request)
            await self._http.post("/update_weight_version", {"new_version": version}, repeatable=True)
            await self._verifier.verify(prepared)
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
