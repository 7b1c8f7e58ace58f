"""The engines as the dispatcher reaches them: which of them are alive, and what they say of themselves.

- A call that fails is looked into.  An engine that does not answer a question about itself either is
  gone: the scheduler hears of it once, and every call on it ends without a reply.
- What a lost engine still answers is ignored, also after an engine has joined again under its name.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import anyio

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.wire import Capabilities, GenerateReply, GenerateRequest, Load
from sostenuto.scheduler.actions import EngineJoined, EngineLoaded, EngineLost, Event
from sostenuto.types import EngineId, ProgramId, Version

_POLL_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Life:
    """An engine from its joining until it is lost."""

    id: EngineId
    engine: Engine
    context_tokens: int
    kv_tokens: int
    calls: set[anyio.CancelScope] = field(default_factory=set[anyio.CancelScope])
    reported: tuple[int, int] = (0, 0)
    """Cached and prefilled tokens at the last report."""

    def report(self, load: Load) -> EngineLoaded:
        cached, prefilled = load.cached_tokens - self.reported[0], load.prefilled_tokens - self.reported[1]
        self.reported = (load.cached_tokens, load.prefilled_tokens)
        return EngineLoaded(
            self.id,
            load.waiting,
            used_share=(load.used_kv_tokens - load.held_kv_tokens) / self.kv_tokens,
            hit_rate=cached / (cached + prefilled) if cached + prefilled > 0 else None,
        )


class Fleet:
    """Owned by the dispatcher."""

    def __init__(
        self,
        engines: Mapping[EngineId, Engine],
        feed: Callable[[Event], None],
        *,
        answer_s: float,
        deserted: Callable[[str], None],
    ) -> None:
        """`answer_s`: how long an engine may take to say how it is.  `deserted`: the last one was lost."""
        self._deserted = deserted
        self._engines = engines
        self._feed = feed
        self._answer_s = answer_s
        self._lives: dict[EngineId, _Life] = {}
        self.context_tokens = 0
        """The longest context that every engine takes; while there is none, as it was."""

    def __repr__(self) -> str:
        shown = " ".join(f"{life.id}={len(life.calls)}" for life in self._lives.values())
        return f"<Fleet {shown or 'empty'}>"

    def __len__(self) -> int:
        """Engines that are alive."""
        return len(self._lives)

    async def join(self, engine_id: EngineId, *, deployed: Version | None) -> Capabilities:
        """Take in an engine as it is; one that was known is taken to have started anew.

        EngineError when it does not answer, or serves an older version than the deployed one.
        """
        engine = self._engines[engine_id]
        facts = await engine.capabilities()
        version = Version.parse(facts.version)
        if deployed is not None and version < deployed:
            raise EngineError(
                f"engine {engine_id} serves version {version}, and {deployed} is deployed; "
                "start it with the weights of that version"
            )
        if (before := self._lives.pop(engine_id, None)) is not None:
            _end_calls(before)
        life = _Life(engine_id, engine, facts.context_tokens, facts.kv_tokens)
        self._lives[engine_id] = life
        self._lives_changed()
        self._feed(
            EngineJoined(
                engine_id=engine_id,
                version=version,
                kv_tokens=facts.kv_tokens,
                concurrency=facts.concurrency,
                block_tokens=facts.block_tokens,
                host_tokens=facts.lower_tokens,
                host_tokens_s=facts.lower_tokens_s,
            )
        )
        return facts

    async def generate(self, engine_id: EngineId, request: GenerateRequest) -> GenerateReply | None:
        """Sample one turn; None when the engine was lost meanwhile, and EngineError when it refused."""
        life = self._lives.get(engine_id)
        if life is None:
            return None
        reply: GenerateReply | None = None
        failure: EngineError | None = None
        with anyio.CancelScope() as call:
            life.calls.add(call)
            try:
                reply = await life.engine.generate(request)
            except EngineError as error:
                failure = error
            finally:
                life.calls.discard(call)
        if failure is not None and not await self._is_lost(life):
            raise failure
        return reply if self._is_current(life) else None

    async def release(self, engine_id: EngineId, program_id: ProgramId) -> None:
        """Give up a program's KV.  Where that fails, it is left to the engine, which evicts it in time."""
        await self._move(engine_id, program_id, "given back", lambda engine: engine.release(program_id))

    async def offload(self, engine_id: EngineId, program_id: ProgramId) -> None:
        """Move a program's KV to the lower tier.  Where that fails, it is left to the engine as well."""
        await self._move(engine_id, program_id, "offloaded", lambda engine: engine.offload(program_id))

    async def _move(
        self, engine_id: EngineId, program_id: ProgramId, how: str, move: Callable[[Engine], Awaitable[None]]
    ) -> None:
        life = self._lives.get(engine_id)
        if life is None:
            return
        try:
            await move(life.engine)
        except EngineError as error:
            if not await self._is_lost(life):
                _log.warning("KV of %s on %s was not %s: %s", program_id, engine_id, how, error)

    async def keep_polling(self) -> None:
        """Tell the scheduler now and then what the engines say of themselves."""
        async with anyio.create_task_group() as group:
            for engine_id in self._engines:
                group.start_soon(self._keep_polling, engine_id)

    async def _keep_polling(self, engine_id: EngineId) -> None:
        while True:
            await anyio.sleep(_POLL_S)
            if (life := self._lives.get(engine_id)) is not None:
                await self._poll(life)

    async def _poll(self, life: _Life) -> None:
        try:
            with anyio.move_on_after(self._answer_s):
                load = await life.engine.load()
                if self._is_current(life):
                    self._feed(life.report(load))
        except EngineError:
            # The next call that needs the engine finds out what it is about.
            return

    async def _is_lost(self, life: _Life) -> bool:
        """Ask the engine, unless that is known already."""
        if self._is_current(life):
            try:
                with anyio.fail_after(self._answer_s):
                    await life.engine.capabilities()
            except (EngineError, TimeoutError) as error:
                self._lose(life, error)
        return not self._is_current(life)

    def _lose(self, life: _Life, error: Exception) -> None:
        if self._is_current(life):
            _log.warning("engine %s is lost: %s", life.id, error or "no answer")
            del self._lives[life.id]
            self._lives_changed()
            _end_calls(life)
            self._feed(EngineLost(life.id))
            if not self._lives:
                self._deserted(f"engine {life.id} is lost: {error or 'no answer'}")

    def _lives_changed(self) -> None:
        lengths = (life.context_tokens for life in self._lives.values())
        self.context_tokens = min(lengths, default=self.context_tokens)

    def _is_current(self, life: _Life) -> bool:
        return self._lives.get(life.id) is life


def _end_calls(life: _Life) -> None:
    for call in life.calls:
        call.cancel()
