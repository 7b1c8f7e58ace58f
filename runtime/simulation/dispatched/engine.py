"""A simulated engine as the dispatcher reaches one: the Engine protocol, in grains."""

import asyncio
from collections.abc import Callable

from sostenuto.errors import EngineError, VersionRefused
from sostenuto.runtime.engines.needs import unmet
from sostenuto.runtime.engines.wire import (
    Capabilities,
    CommitReply,
    CommitRequest,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Load,
    PauseMode,
    ScoreReply,
    ScoreRequest,
    Spans,
    WireVersionSpan,
    tell,
)
from sostenuto.runtime.simulation.clock import Clock
from sostenuto.runtime.simulation.dispatched.script import FIRST_ID, Stage, in_grains
from sostenuto.runtime.simulation.dispatched.transfer import Transfer
from sostenuto.runtime.simulation.engine import SimulatedEngine
from sostenuto.runtime.simulation.request import Served
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import EngineId, ProgramId, Version

ENDLESS_TOKENS = 1 << 40
"""No limit of the model's: the pool decides what is too large."""


class DispatchedEngine:
    def __init__(
        self, engine: SimulatedEngine, stage: Stage, clock: Clock, transfer: Transfer | None = None
    ) -> None:
        """`transfer`: how it takes in versions; None: as a whole, and nothing goes wrong."""
        self._engine = engine
        self._stage = stage
        self._clock = clock
        self._transfer = transfer
        self._exact: dict[str, Version] = {}
        """Requests that run for exactly a version."""
        self.is_verified = True
        """Whether what it serves is whole; False from an update that failed to the next one that did not."""

    def __repr__(self) -> str:
        return f"<DispatchedEngine {self._engine!r}>"

    async def capabilities(self) -> Capabilities:
        profile, grain = self._engine.profile, self._stage.grain
        return Capabilities(
            model=profile.name,
            architecture="simulated",
            vocabulary_size=FIRST_ID << 15,
            context_tokens=ENDLESS_TOKENS,
            kv_tokens=profile.kv_tokens // grain,
            concurrency=profile.concurrency,
            shares_prefixes=True,
            block_tokens=in_grains(profile.block_tokens, grain),
            version=str(self._engine.version),
            dtype="none",
            threads=1,
            lower_tokens=profile.host_tokens // grain,
            lower_tokens_s=profile.host_tokens_s / grain,
        )

    async def load(self) -> Load:
        engine, result, grain = self._engine, self._engine.result, self._stage.grain
        return Load(
            running=engine.running,
            waiting=engine.waiting,
            used_kv_tokens=in_grains(engine.cache.active_tokens, grain),
            held_kv_tokens=in_grains(engine.cache.idle_tokens, grain),
            held_programs=0,
            prefilled_tokens=in_grains(result.prefilled_tokens, grain),
            cached_tokens=in_grains(result.cached_tokens, grain),
            generated_tokens=in_grains(result.generated_tokens, grain),
            updates=engine.version.number,
            busy_s=result.busy_s,
            pause_s=0.0,
        )

    async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
        stage, engine_id = self._stage, self._engine.id
        self._check(request)
        script = stage.scripts[ProgramId(request.program_id)]
        asked = script.decodes(EngineId(engine_id), request.request_id, self._clock.now_s())

        def ask(answer: Callable[[Served], None]) -> None:
            def done(served: Served) -> None:
                stage.fleet.left(engine_id)
                script.served(served)
                answer(served)

            stage.fleet.generate(engine_id, asked, done)

        if request.exact_version is not None:
            self._exact[request.request_id] = Version.parse(request.exact_version)
        try:
            served = await stage.answered(ask)
        except asyncio.CancelledError:
            stage.fleet.abort(engine_id, request.request_id)
            raise
        finally:
            self._exact.pop(request.request_id, None)
        if served.failed:
            raise EngineError(served.failed)
        now_s = self._clock.now_s()
        ids = script.interrupted(served.generated_tokens, now_s) if served.aborted else script.sampled()
        reply = self._reply(served, ids, len(request.token_ids))
        tell(reply, spans)
        return reply

    def _check(self, request: GenerateRequest) -> None:
        if (problem := unmet(request, self._engine.version)) is not None:
            raise VersionRefused(f"engine {self._engine.id}: {problem}")

    def _reply(self, served: Served, ids: list[int], context: int) -> GenerateReply:
        prefilled = min(context, in_grains(served.prefilled_tokens, self._stage.grain))
        return GenerateReply(
            token_ids=ids,
            logprobs=[-1.0] * len(ids),
            versions=_stamped(served, len(ids)),
            finish_reason=FinishReason.ABORT if served.aborted else FinishReason.STOP,
            cached_tokens=context - prefilled,
            prefilled_tokens=prefilled,
            queue_s=served.queue_s,
            prefill_s=served.prefill_s,
            decode_s=served.decode_s,
            pause_s=served.pause_s,
        )

    async def abort(self, request_id: str) -> None:
        self._stage.fleet.abort(self._engine.id, request_id)

    async def release(self, program_id: ProgramId) -> None:
        script = self._stage.scripts.get(program_id)
        if script is not None:
            script.evicted()
        self._stage.fleet.release(self._engine.id, program_id)

    async def offload(self, program_id: ProgramId) -> None:
        self._engine.offload(program_id)

    async def restore(self, program_id: ProgramId) -> None:
        """A simulated engine brings KV back when it is needed, and never ahead of that."""

    async def pause(self, mode: PauseMode) -> None:
        raise EngineError(f"engine {self._engine.id}: a simulated engine is not paused, with {mode} neither")

    async def resume(self) -> None:
        """It was not paused."""

    async def score(self, request: ScoreRequest) -> ScoreReply:
        return ScoreReply(
            logprobs=[-1.0] * (len(request.token_ids) - request.start), version=str(self._engine.version)
        )

    async def prepare_update(self, manifest: Manifest) -> None:
        if self._transfer is not None:
            try:
                await self._transfer.stage(manifest.version, self._engine.profile.stage_s)
            except EngineError:
                self.is_verified = False
                raise
            return
        await self._stage.answered(lambda answer: self._engine.stage(lambda: answer(None)))

    async def commit_update(self, request: CommitRequest) -> CommitReply:
        version, keep_kv = Version.parse(request.version), request.held == "keep"
        if self._transfer is not None:
            try:
                await self._transfer.swap(request.version, self._engine.profile.swap_s)
            except EngineError:
                self.is_verified = False
                raise
        await self._stage.answered(
            lambda answer: self._engine.commit(version, keep_kv=keep_kv, done=lambda: answer(None))
        )
        self.is_verified = True
        for request_id in [id_ for id_, exact in self._exact.items() if exact != version]:
            self._stage.fleet.abort(self._engine.id, request_id)
        return CommitReply(
            version=request.version,
            pause_s=self._engine.profile.swap_s,
            recomputed_requests=0,
            dropped_programs=0,
        )

    async def abandon_update(self, version: str) -> None:
        del version

    async def flush(self) -> None:
        self._engine.cache.invalidate()


def _stamped(served: Served, ids: int) -> list[WireVersionSpan]:
    """The versions of the tokens, as those of so many grains."""
    tokens = max(1, served.generated_tokens)
    starts = [start * ids // tokens for _, start in served.versions]
    ends = [*starts[1:], ids][: len(starts)]
    return [
        WireVersionSpan(version=str(version), start=start, end=end)
        for (version, _), start, end in zip(served.versions, starts, ends, strict=True)
        if start < end
    ]
