"""The engines as the dispatcher reaches them: which of them are alive, and what they say of themselves.

- A call that fails is looked into.  An engine that does not answer a question about itself either is
  gone: the scheduler hears of it once, and every call on it ends without a reply.
- So is one that has started anew unasked: its counters went back, or it sampled with older weights than it
  served when it was asked.
- What a lost engine still answers is ignored, also after an engine has joined again under its name.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import anyio

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.wire import (
    Capabilities,
    Feature,
    GenerateReply,
    GenerateRequest,
    Load,
    Spans,
    WireSpan,
    WireVersionSpan,
)
from sostenuto.runtime.turn_costs import cost_of
from sostenuto.scheduler.events import EngineJoined, EngineLoaded, EngineLost, Event, Probed
from sostenuto.scheduler.gate import Gate
from sostenuto.types import EngineId, ProgramId, Version

_POLL_S = 5.0
_LOOK_S = 2.0
"""Within which an engine has to answer who is asked for a look at the fleet."""
_TURNS_SEEN = 32
_PROBE_TOKENS, _PROBE_NEW_TOKENS = 64, 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why an engine takes no requests any more."""

    reason: str
    is_lost: bool
    """False: it is there, with weights that are not verified."""


@dataclass(frozen=True, slots=True)
class Seen:
    """An engine as it said it is."""

    facts: Capabilities
    load: Load | None
    hit_rate: float | None
    """Of prompt tokens between its last two reports."""
    token_s: float | None
    """Median time for a sampled token, over the last turns."""
    prefill_tokens_s: float | None


@dataclass(slots=True, eq=False)
class _Life:
    """An engine from its joining until it is lost."""

    id: EngineId
    engine: Engine
    facts: Capabilities
    calls: dict[anyio.CancelScope, str] = field(default_factory=dict[anyio.CancelScope, str])
    """With their request ids."""
    reported: tuple[int, int] = (0, 0)
    """Cached and prefilled tokens at the last report."""
    load: Load | None = None
    hit_rate: float | None = None
    tokens_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=_TURNS_SEEN))
    prefills_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=_TURNS_SEEN))
    """Tokens a second."""
    is_asked: bool = False
    """Whether an answer to a poll is outstanding."""
    troubled: anyio.Event = field(default_factory=anyio.Event)
    trouble: Trouble | None = None

    def report(self, load: Load) -> EngineLoaded:
        cached, prefilled = load.cached_tokens - self.reported[0], load.prefilled_tokens - self.reported[1]
        self.reported = (load.cached_tokens, load.prefilled_tokens)
        self.load = load
        self.hit_rate = cached / (cached + prefilled) if cached + prefilled > 0 else None
        return EngineLoaded(
            self.id,
            load.waiting,
            used_share=(load.used_kv_tokens - load.held_kv_tokens) / self.facts.kv_tokens,
            hit_rate=self.hit_rate,
        )

    def replied(self, reply: GenerateReply) -> None:
        """A turn is over: what its tokens took."""
        if reply.token_ids and reply.decode_s > 0:
            self.tokens_s.append(reply.decode_s / len(reply.token_ids))
        if reply.prefilled_tokens and reply.prefill_s > 0:
            self.prefills_s.append(reply.prefilled_tokens / reply.prefill_s)

    def has_started_anew(self, load: Load) -> bool:
        """Whether what it counts since its start has become less."""
        before = self.load
        return before is not None and (
            load.cached_tokens < before.cached_tokens
            or load.prefilled_tokens < before.prefilled_tokens
            or load.generated_tokens < before.generated_tokens
        )

    def ends(self, trouble: Trouble) -> None:
        self.trouble = trouble
        self.troubled.set()


class Fleet:
    """Owned by the dispatcher."""

    def __init__(
        self,
        engines: dict[EngineId, Engine],
        feed: Callable[[Event], None],
        *,
        answer_s: float,
        deserted: Callable[[str], None],
        gate: Gate,
    ) -> None:
        """`answer_s`: how long an engine may take to say how it is.  `deserted`: the last one was lost."""
        self._deserted = deserted
        self._engines = engines
        self._gate = gate
        self._feed = feed
        self._answer_s = answer_s
        self._lives: dict[EngineId, _Life] = {}
        self._probes = 0
        self.context_tokens = 0
        """The longest context that every engine takes; while there is none, as it was."""

    def __repr__(self) -> str:
        shown = " ".join(f"{life.id}={len(life.calls)}" for life in self._lives.values())
        return f"<Fleet {shown or 'empty'}>"

    def __len__(self) -> int:
        """Engines that are alive."""
        return len(self._lives)

    def alive(self) -> dict[EngineId, Engine]:
        return {life.id: life.engine for life in self._lives.values()}

    @property
    def features(self) -> frozenset[Feature]:
        """What all engines that are alive have; empty while there is none."""
        found = [life.facts.features for life in self._lives.values()]
        return frozenset[Feature]().union(*found).intersection(*found)

    def seen(self, engine_id: EngineId) -> Seen | None:
        """What a living engine said last; None for one that is not."""
        life = self._lives.get(engine_id)
        if life is None:
            return None
        return Seen(life.facts, life.load, life.hit_rate, _median(life.tokens_s), _median(life.prefills_s))

    async def join(self, engine_id: EngineId, engine: Engine | None = None) -> Capabilities:
        """Take in an engine as it is; one that was known is taken to have started anew.

        EngineError when it does not answer, or serves an older version than the deployed one.
        """
        engine = engine or self._engines[engine_id]
        facts = await engine.capabilities()
        version, deployed = version_of(engine_id, facts), self._gate.deployed
        if deployed is not None and version < deployed:
            raise EngineError(
                f"engine {engine_id} serves version {version}, and {deployed} is deployed; "
                "start it with the weights of that version"
            )
        if (before := self._lives.pop(engine_id, None)) is not None:
            _end_calls(before)
        self._engines[engine_id] = engine
        self._lives[engine_id] = _Life(engine_id, engine, facts)
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
                peers=f"{facts.kind} {facts.dtype} {facts.threads}",
                tells_kv_age=Feature.KV_AGE in facts.features,
            )
        )
        return facts

    def lose(self, engine_id: EngineId, reason: str) -> None:
        """It is known to be gone: its programs go on elsewhere."""
        if (life := self._lives.get(engine_id)) is not None:
            self._lose(life, reason)

    def forget(self) -> None:
        """None is alive as far as we are concerned; nobody is told."""
        for life in self._lives.values():
            _end_calls(life)
        self._lives.clear()

    def quarantined(self, engine_id: EngineId, reason: str) -> None:
        """It failed to take in a version."""
        if (life := self._lives.get(engine_id)) is not None:
            life.ends(Trouble(reason, is_lost=False))

    def requests_on(self, engine_id: EngineId) -> list[str]:
        """The ids of those that wait for their end."""
        life = self._lives.get(engine_id)
        return list(life.calls.values()) if life is not None else []

    def recovered(self, engine_id: EngineId) -> None:
        """It took in a later version."""
        if (life := self._lives.get(engine_id)) is not None:
            life.trouble, life.troubled = None, anyio.Event()

    async def until_troubled(self, engine_id: EngineId) -> Trouble:
        """Wait until it is lost or quarantined."""
        life = self._lives.get(engine_id)
        if life is None:
            return Trouble("it is not in the fleet", is_lost=True)
        await life.troubled.wait()
        assert life.trouble is not None
        return life.trouble

    async def generate(
        self, engine_id: EngineId, request: GenerateRequest, spans: Spans | None = None
    ) -> GenerateReply | None:
        """Sample one turn; None when the engine was lost meanwhile, and EngineError when it refused.

        `spans` is called with tokens as they come, until the engine is lost.
        """
        life = self._lives.get(engine_id)
        if life is None:
            return None
        reply: GenerateReply | None = None
        failure: EngineError | None = None
        served = self._gate.version(engine_id)
        heard = spans and partial(self._hear, life, served, spans)
        with anyio.CancelScope() as call:
            life.calls[call] = request.request_id
            try:
                reply = await life.engine.generate(request, spans=heard)
            except EngineError as error:
                failure = error
            finally:
                life.calls.pop(call, None)
        if failure is not None and not await self._is_lost(life):
            raise failure
        if reply is not None:
            self._lose_if_older(life, served, reply.versions)
        if reply is None or not self._is_current(life):
            return None
        life.replied(reply)
        return reply

    def _hear(self, life: _Life, served: Version | None, spans: Spans, span: WireSpan) -> None:
        self._lose_if_older(life, served, [span])
        if self._is_current(life):
            spans(span)

    def _lose_if_older(
        self, life: _Life, served: Version | None, sampled: Iterable[WireSpan | WireVersionSpan]
    ) -> None:
        """`served`: the version of the engine when it was asked."""
        if served is not None and any(Version.parse(span.version) < served for span in sampled):
            self._lose(life, f"it has started anew: it sampled with older weights than {served}")

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

    async def probe(self, engine_id: EngineId) -> None:
        """Report what a short request costs there."""
        life, cost = self._lives.get(engine_id), None
        if life is None:
            return
        self._probes += 1
        texts = life.facts.tokenizer_size or life.facts.vocabulary_size
        request = GenerateRequest(
            request_id=f"probe/{self._probes}",
            program_id=f"probe/{self._probes}",
            # Other tokens each time: what is cached costs nothing.
            token_ids=[(self._probes * _PROBE_TOKENS + i) % texts for i in range(_PROBE_TOKENS)],
            max_new_tokens=_PROBE_NEW_TOKENS,
            hold=False,
        )
        with suppress(EngineError):
            cost = cost_of(await life.engine.generate(request))
        self._feed(Probed(engine_id, cost))

    async def keep_polling(self) -> None:
        """Tell the scheduler now and then what the engines say of themselves."""
        async with anyio.create_task_group() as group:
            while True:
                await anyio.sleep(_POLL_S)
                for life in self._lives.values():
                    if not life.is_asked:
                        group.start_soon(self._poll, life)

    async def look(self) -> None:
        """Ask every engine now how it is; what does not answer soon stays as it was."""
        with anyio.move_on_after(_LOOK_S):
            async with anyio.create_task_group() as group:
                for life in self._lives.values():
                    if not life.is_asked:
                        group.start_soon(self._poll, life)

    async def _poll(self, life: _Life) -> None:
        life.is_asked, load = True, None
        try:
            with anyio.move_on_after(self._answer_s):
                load = await life.engine.load()
        except EngineError:
            pass
        finally:
            life.is_asked = False
        if load is None:
            # What it has to say of its load is no matter of life; that it says nothing at all is.
            await self._is_lost(life)
        elif life.has_started_anew(load):
            self._lose(life, "it has started anew: what it counts has become less")
        elif self._is_current(life):
            self._feed(life.report(load))

    async def _is_lost(self, life: _Life) -> bool:
        """Ask the engine, unless that is known already."""
        if self._is_current(life):
            try:
                with anyio.fail_after(self._answer_s):
                    await life.engine.capabilities()
            except (EngineError, TimeoutError) as error:
                self._lose(life, str(error) or "no answer")
        return not self._is_current(life)

    def _lose(self, life: _Life, reason: str) -> None:
        if self._is_current(life):
            _log.warning("engine %s is lost: %s", life.id, reason)
            del self._lives[life.id]
            self._lives_changed()
            _end_calls(life)
            self._feed(EngineLost(life.id))
            life.ends(Trouble(reason, is_lost=True))
            if not self._lives:
                self._deserted(f"engine {life.id} is lost: {reason}")

    def _lives_changed(self) -> None:
        lengths = (life.facts.context_tokens for life in self._lives.values())
        self.context_tokens = min(lengths, default=self.context_tokens)

    def _is_current(self, life: _Life) -> bool:
        return self._lives.get(life.id) is life


def version_of(engine_id: EngineId, facts: Capabilities) -> Version:
    """What the engine serves; EngineError for a label that is none of ours."""
    try:
        return Version.parse(facts.version)
    except ValueError as error:
        raise EngineError(
            f"engine {engine_id}: capabilities: version {facts.version!r} is not EPOCH.NUMBER; bring it to "
            "a version of this run first"
        ) from error


def _median(values: Iterable[float]) -> float | None:
    some = list(values)
    return median(some) if some else None


def _end_calls(life: _Life) -> None:
    for call in life.calls:
        call.cancel()
