"""A vLLM server that runs unmodified, as an engine of ours.

    async with VllmEngine(EngineId("e0"), "http://127.0.0.1:8000", model=folder, transport=disk) as engine:
        reply = await engine.generate(request)

- Every call ends by its deadline, and every failure is an EngineError with engine, call and remedy.
- Cancelling `generate` aborts exactly that request.
- After an update that is not whole or not verified nothing that the engine sampled is given out.
- vLLM keeps KV by last use and promises nothing: there is no HOLD, and `release` does nothing.
"""

import hashlib
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

import anyio
import anyio.lowlevel

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.flights import Flight, Flights, waiting_for_it, without_tokens
from sostenuto.runtime.engines.http import EngineHttp, HttpRefusal
from sostenuto.runtime.engines.telling import Telling
from sostenuto.runtime.engines.terms import AS_IT_SAYS, UNKNOWN, Terms
from sostenuto.runtime.engines.vllm.bodies import Place, engine_ids, generate_body, score_body
from sostenuto.runtime.engines.vllm.checks import Checks
from sostenuto.runtime.engines.vllm.facts import UNLABELLED, Facts, Route
from sostenuto.runtime.engines.vllm.metrics import Metrics, read_metrics
from sostenuto.runtime.engines.vllm.pausing import Pausing
from sostenuto.runtime.engines.vllm.probing import look, try_out
from sostenuto.runtime.engines.vllm.replies import Gathered, Scored, score_reply
from sostenuto.runtime.engines.vllm.transports import Transport
from sostenuto.runtime.engines.vllm.updating import Updating, WeightInfo
from sostenuto.runtime.engines.wire import (
    Capabilities,
    CommitReply,
    CommitRequest,
    Feature,
    GenerateReply,
    GenerateRequest,
    Load,
    PauseMode,
    ScoreReply,
    ScoreRequest,
    Spans,
)
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import EngineId, ProgramId

_UNAVAILABLE = 503
_SALT_BYTES = 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long an answer may take."""

    control_s: float = 30.0
    generate_s: float = 3600.0
    update_s: float = 600.0
    """Of each call that moves weights, of a pause until what runs has ended, and of a trial request."""


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, as far as the server does not say."""

    name: str | None = None
    """Of the model; None: the only one."""
    version: str = "0.0"
    """Of the weights that it was started with, where these are known."""
    any_release: bool = False
    """Also a release of vLLM that this adapter was not read from."""
    terms: Terms = AS_IT_SAYS


class VllmEngine:
    """Implements `Engine`."""

    def __init__(
        self,
        engine_id: EngineId,
        url: str,
        *,
        model: Path,
        transport: Transport,
        api_key: str = "",
        deadlines: Deadlines = Deadlines(),
        served: Served = Served(),
    ) -> None:
        """`model`: the folder of the served model."""
        self.engine_id = engine_id
        self._http = EngineHttp(
            engine_id, url, kind="vllm", api_key=api_key, control_timeout_s=deadlines.control_s
        )
        self._folder = model
        self._deadlines = deadlines
        self._served = served
        self._pausing = Pausing(self._http, finish_s=deadlines.update_s)
        known = served.terms.start_is_known
        self._unlabelled = served.version if known else UNKNOWN
        self._updating = Updating(
            self._http, self._pausing, transport,
            within_s=deadlines.update_s, start_is_known=known, forsake=self._forsake_all,
        )  # fmt: skip
        self._flights = Flights()
        self._prefix, self._count = secrets.token_hex(4), count()
        self._checks = Checks(
            f"engine {engine_id} (vllm at {self._http.url})", served.version if known else None
        )
        self._learning = anyio.Lock()
        self._facts: Facts | None = None
        self._version = ""
        self._namespace = ""
        """KV that was computed under another one is never found again."""

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.__aexit__()

    async def capabilities(self) -> Capabilities:
        """What the server is and can do; tried with small requests once in each of its lives."""
        async with self._learning:
            facts = self._facts
            if facts is None or (await self._metrics()).started != facts.server.started:
                facts = await self._learn()
            label = await self._label(facts)
            if label == UNLABELLED and self._version != self._unlabelled:
                # Another life of a server that does not tell when it was started.
                self._begin_life(self._unlabelled)
            self._version = self._version_of(label)
            return self._served.terms.applied_to(facts.capabilities(self._version))

    async def load(self) -> Load:
        facts, metrics = await self._known(), await self._metrics()
        return Load(
            running=metrics.running,
            waiting=metrics.waiting,
            used_kv_tokens=round(metrics.usage * facts.server.kv_tokens),
            held_kv_tokens=0,
            held_programs=0,
            prefilled_tokens=metrics.prompt_tokens - metrics.cached_tokens,
            cached_tokens=metrics.cached_tokens,
            generated_tokens=metrics.generated_tokens,
            updates=self._updating.updates,
            busy_s=self._flights.busy_s(),
            pause_s=self._pausing.paused_s(),
        )

    async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
        """Sample one turn.  A cancelled call aborts the request in the engine.

        `spans` is called with tokens as they come, those after an update only at the end; all of them are
        in the reply, too.
        """
        facts = await self._known()
        self._check_believed()
        self._checks.generate(request, facts, served=self._version)
        with self._flights.under_way(request, self._name(request.request_id)) as flight:
            return await self._generate(flight, facts, spans)

    async def abort(self, request_id: str) -> None:
        """End one request early; its `generate` answers with the tokens it has."""
        flight = self._flights.get(request_id)
        if flight is None:
            return
        flight.is_given_up = True
        self._pausing.look_again()
        if flight.is_sent:
            await self._abort(flight)

    async def release(self, program_id: ProgramId) -> None:
        """Nothing: vLLM takes the KV for others when it needs the room."""
        del program_id
        await anyio.lowlevel.checkpoint()

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Log-probabilities of given tokens; waits its turn, so its deadline is that of `generate`."""
        facts = await self._known()
        self._checks.score(request, facts)
        await self._until_open(lambda: False)
        self._check_believed()
        served = self._version
        body = score_body(request, facts, Place(self._name("score"), self._salt("")))
        answer = await self._http.post(Route.TOKENS, body, within_s=self._deadlines.generate_s)
        self._check_believed()
        return score_reply(
            answer.read(Scored), request, served=served, label=self._checks.version, where=answer.where
        )

    async def prepare_update(self, manifest: Manifest) -> None:
        """Write the new weights where the server can read them; decoding goes on."""
        self._checks.features(await self._lacking(Feature.UPDATE), await self._known())
        await self._updating.prepare(manifest.of_model)

    async def prepare_start(self, version: str) -> None:
        """The weights of `model` itself, as this version; the server reads them at the next commit."""
        self._checks.features(await self._lacking(Feature.UPDATE), await self._known())
        await self._updating.prepare_start(version)

    async def commit_update(self, request: CommitRequest) -> CommitReply:
        """Swap to the prepared version between two steps.

        KV that is dropped is dropped of all programs; how many of them had some is not known.
        """
        recomputed = len(self._flights.sent()) if request.running == "recompute" else 0
        stood_s = await self._updating.commit(request)
        self._version = request.version
        if request.held == "drop":
            self._namespace = request.version
        return CommitReply(
            version=request.version, pause_s=stood_s, recomputed_requests=recomputed, dropped_programs=0
        )

    async def abandon_update(self, version: str) -> None:
        await self._updating.abandon(version)

    async def flush(self) -> None:
        """Drop every KV; EngineError while requests run on some."""
        if not await self._pausing.drop_kv(of_running=False):
            where = self._http.where("/reset_prefix_cache")
            raise EngineError(f"{where}: refused, as requests run; wait for them, or pause with abort before")

    async def pause(self, mode: PauseMode) -> None:
        """Idempotent.  Requests that come meanwhile wait for `resume`."""
        self._checks.features(await self._lacking(Feature.PAUSE), await self._known())
        await self._pausing.pause(mode)

    async def resume(self) -> None:
        """Idempotent."""
        await self._pausing.resume()

    async def offload(self, program_id: ProgramId) -> None:
        """vLLM moves KV to its lower tiers by itself; always an EngineError."""
        del program_id
        self._checks.features([Feature.OFFLOAD], await self._known())

    async def restore(self, program_id: ProgramId) -> None:
        """As `offload`."""
        await self.offload(program_id)

    async def _generate(self, flight: Flight, facts: Facts, spans: Spans | None) -> GenerateReply:
        """Send it, and again where the server refused it because it is paused."""
        deadline_s = anyio.current_time() + self._deadlines.generate_s
        before_s = self._pausing.paused_s()
        while True:
            await self._until_open(lambda: flight.is_given_up)
            if flight.is_given_up:
                return without_tokens()
            self._check_believed()
            where, telling = self._http.where(facts.route), spans and self._telling(spans, facts)
            gathered = Gathered(where, flight.request, self._version, telling, anyio.current_time())
            try:
                await self._send(flight, facts, gathered, deadline_s - anyio.current_time())
                break
            except HttpRefusal as refusal:
                flight.is_sent = False
                if refusal.status != _UNAVAILABLE or not await self._is_only_paused(flight):
                    raise
        self._check_believed()
        pause_s = self._pausing.paused_s() - before_s
        reply = gathered.reply(self._checks.version, pause_s=pause_s)
        self._checks.versions(reply, flight.request)
        if gathered.telling is not None:
            gathered.telling.end(reply)
        return reply

    def _telling(self, spans: Spans, facts: Facts) -> Telling:
        version, updating = self._version, self._updating

        def is_certain() -> bool:
            return self._version == version and not updating.is_under_way and not updating.doubt

        return Telling(spans, version=version, is_certain=is_certain, where=self._http.where(facts.route))

    async def _send(self, flight: Flight, facts: Facts, gathered: Gathered, within_s: float) -> None:
        request = flight.request
        place = Place(flight.rid, self._salt(request.salt), streams_tokens=gathered.telling is not None)
        body = generate_body(request, facts, place)
        flight.is_sent = True
        try:
            await self._http.stream(facts.route, body, gathered.take, within_s=within_s)
        except HttpRefusal:
            raise
        except (anyio.get_cancelled_exc_class(), EngineError):
            # Its deadline, too, leaves it running in the engine.
            with anyio.CancelScope(shield=True), suppress(EngineError):
                await self._abort(flight)
            raise

    async def _is_only_paused(self, flight: Flight) -> bool:
        was_paused = False
        if (await self._known()).server.has_controls:
            with waiting_for_it(self._deadlines.generate_s, self._checks.error):
                was_paused = await self._pausing.until_resumed(lambda: flight.is_given_up)
        return was_paused

    async def _until_open(self, is_given_up: Callable[[], bool]) -> None:
        with waiting_for_it(self._deadlines.generate_s, self._checks.error):
            await self._pausing.until_open(is_given_up)

    async def _abort(self, flight: Flight) -> None:
        """Never with an empty list: that would abort every request."""
        facts = await self._known()
        route = "/inference/v1/abort_requests" if facts.route is Route.TOKENS else "/abort_requests"
        await self._http.post(route, {"request_ids": engine_ids(facts.route, flight.rid)})

    async def _forsake_all(self) -> None:
        """What ran on weights that are not known is given out to nobody: let it end."""
        for flight in self._flights.sent():
            with suppress(EngineError):
                await self._abort(flight)

    async def _known(self) -> Facts:
        if self._facts is None:
            await self.capabilities()
        assert self._facts is not None
        return self._facts

    async def _learn(self) -> Facts:
        server = await look(self._http, self._served.name, any_release=self._served.any_release)
        facts = await try_out(self._http, server, self._folder, within_s=self._deadlines.update_s)
        self._begin_life(self._version_of(await self._label(facts)))
        self._facts = facts
        return facts

    def _begin_life(self, version: str) -> None:
        self._updating.restarted()
        self._version, self._namespace = version, version

    def _version_of(self, label: str) -> str:
        return self._checks.version(label) if self._updating.is_known else UNKNOWN

    async def _metrics(self) -> Metrics:
        answer = await self._http.get("/metrics")
        return read_metrics(answer.text(), answer.where)

    async def _label(self, facts: Facts) -> str:
        """What the engine calls its weights."""
        if not facts.server.has_controls:
            return UNLABELLED
        return (await self._http.get("/weight_info")).read(WeightInfo).weight_version

    async def _lacking(self, feature: Feature) -> list[Feature]:
        return [] if feature in (await self._known()).features else [feature]

    def _salt(self, salt: str) -> str:
        """vLLM takes no long ones and not every character."""
        named = f"{len(self._namespace)}:{self._namespace}{salt}"
        return hashlib.blake2b(named.encode(), digest_size=_SALT_BYTES).hexdigest()

    def _name(self, name: str) -> str:
        """An id in the engine that was never given before."""
        return f"{self._prefix}-{next(self._count)}-{name}"

    def _check_believed(self) -> None:
        if why := self._updating.disbelief:
            raise self._checks.error(
                f"nothing it samples is believed: {why}; publish a whole version, or start it again"
            )
