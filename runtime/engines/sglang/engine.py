"""An SGLang server that runs unmodified, as an engine of ours.

    async with SGLangEngine(EngineId("e0"), "http://127.0.0.1:30000", model=folder, transport=disk) as engine:
        reply = await engine.generate(request)

- Every call ends by its deadline, and every failure is an EngineError with engine, call and remedy.
- Cancelling `generate` aborts exactly that request.
- After an update that is not whole or not verified nothing that the engine sampled is given out.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import anyio

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.flights import Flight, Flights, waiting_for_it, without_tokens
from sostenuto.runtime.engines.http import EngineHttp, HttpRefusal
from sostenuto.runtime.engines.sameness import check_same_model
from sostenuto.runtime.engines.sglang.bodies import (
    Place,
    generate_body,
    is_truncated,
    score_body,
)
from sostenuto.runtime.engines.sglang.checks import Checks
from sostenuto.runtime.engines.sglang.facts import Facts, ServerInfo
from sostenuto.runtime.engines.sglang.load import Loads, Totals, current_load
from sostenuto.runtime.engines.sglang.names import Names, Sessions
from sostenuto.runtime.engines.sglang.pausing import Pausing
from sostenuto.runtime.engines.sglang.probing import look, try_out
from sostenuto.runtime.engines.sglang.replies import Asked, Generated, generate_reply, score_reply
from sostenuto.runtime.engines.sglang.streaming import Stream
from sostenuto.runtime.engines.sglang.transports import Transport
from sostenuto.runtime.engines.sglang.updating import Updating
from sostenuto.runtime.engines.telling import Telling
from sostenuto.runtime.engines.terms import AS_IT_SAYS, UNKNOWN, Terms
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

_POLL_S = 0.05

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Keys:
    """What the server asks for; empty where it asks for none."""

    api: str = ""
    admin: str = ""
    """Where it has one of its own for what changes the server."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long an answer may take."""

    control_s: float = 30.0
    generate_s: float = 3600.0
    update_s: float = 600.0
    """Of each call that moves weights, of a flush that waits for requests, and of each request that tries a
    feature for the first time, for which some servers compile."""


class SGLangEngine:
    """Implements `Engine`."""

    def __init__(
        self,
        engine_id: EngineId,
        url: str,
        *,
        model: Path,
        transport: Transport,
        keys: Keys = Keys(),
        deadlines: Deadlines = Deadlines(),
        terms: Terms = AS_IT_SAYS,
    ) -> None:
        """`model`: the folder of the served model."""
        self.engine_id = engine_id
        self._http, self._admin = (
            EngineHttp(engine_id, url, kind="sglang", api_key=key, control_timeout_s=deadlines.control_s)
            for key in (keys.api, keys.admin or keys.api)
        )
        self._folder = model
        self._deadlines = deadlines
        self._pausing = Pausing(self._admin, self._drained)
        self._terms = terms
        self._updating = Updating(
            self._admin, self._pausing, transport,
            within_s=deadlines.update_s, start_is_known=terms.start_is_known,
        )  # fmt: skip
        self._flights = Flights()
        self._names = Names()
        self._sessions = Sessions(self._names)
        self._totals = Totals()
        self._checks = Checks(f"engine {engine_id} (sglang at {self._http.url})")
        self._learning = anyio.Lock()
        self._facts: Facts | None = None
        self._version = ""
        self._namespace = ""
        """KV that was computed under another one is never found again."""

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        await self._admin.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._admin.__aexit__()
        await self._http.__aexit__()

    async def capabilities(self) -> Capabilities:
        """What the server is and can do; tried with small requests once in each of its lives."""
        if self._facts is not None and self._updating.is_swapping:
            # Its scheduler answers nothing while it loads; the update has deadlines of its own.
            return self._said(self._facts)
        async with self._learning:
            model, server = await look(self._http)
            if self._facts is None or self._facts.server.started != server.started:
                check_same_model(model.model_path, self._folder, self._http.where("/model_info"))
                if self._terms.start_is_known:
                    self._checks.version(model.weight_version)
                self._facts = await self._try_out(server)
                self._begin_life(model.weight_version)
            if self._updating.is_known:
                self._check_believed()
                self._checks.version(model.weight_version)
            self._version = model.weight_version if self._updating.is_known else UNKNOWN
            return self._said(self._facts)

    async def load(self) -> Load:
        facts = await self._known()
        said = (await self._http.get("/v1/loads", query={"include": "core"})).read(Loads)
        return current_load(
            said, facts, self._totals, self._sessions,
            updates=self._updating.updates, busy_s=self._flights.busy_s(), pause_s=self._pausing.paused_s(),
        )  # fmt: skip

    async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
        """Sample one turn.  A cancelled call aborts the request in the engine.

        `spans` is called with tokens as they come, those after an update or of a truncated distribution
        only at the end; all of them are in the reply, too.
        """
        facts = await self._known()
        self._check_believed()
        self._checks.generate(request, facts, served=self._version)
        with self._flights.under_way(request, self._names.of(request.request_id)) as flight:
            await self._until_open(lambda: flight.is_given_up)
            if flight.is_given_up:
                return without_tokens()
            self._check_believed()
            return await self._generate(flight, facts, spans)

    async def abort(self, request_id: str) -> None:
        """End one request early; its `generate` answers with the tokens it has.

        While the engine stands still, a request that runs ends when it goes on.
        """
        flight = self._flights.get(request_id)
        if flight is None or flight.is_given_up:
            return
        flight.is_given_up = True
        self._pausing.look_again()
        if flight.is_sent and self._pausing.is_open:
            await self._abort(flight)

    async def release(self, program_id: ProgramId) -> None:
        """Give up the KV of a program.  Idempotent."""
        session_id = self._sessions.release(program_id)
        if session_id is not None:
            await self._http.post("/close_session", {"session_id": session_id}, repeatable=True)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Log-probabilities of given tokens; waits its turn, so its deadline is that of `generate`."""
        facts = await self._known()
        self._checks.score(request, facts)
        await self._until_open(lambda: False)
        self._check_believed()
        place = Place(self._names.of("score"), self._extra_key(""))
        body = score_body(request, facts, place)
        answer = await self._http.post("/generate", body, within_s=self._deadlines.generate_s)
        self._check_believed()
        return score_reply(answer.read(Generated), request, answer.where)

    async def prepare_update(self, manifest: Manifest) -> None:
        """Write the new weights where the server can read them; decoding goes on."""
        await self._updating.prepare(manifest.of_model)

    async def prepare_start(self, version: str) -> None:
        """The weights of `model` itself, as this version; the server reads them at the next commit."""
        await self._updating.prepare_start(version)

    async def commit_update(self, request: CommitRequest) -> CommitReply:
        """Swap to the prepared version between two steps.

        To compute running requests anew, SGLang has to drop all KV; with `running="continue"`,
        `held="drop"` makes it unreachable for later turns.
        """
        await self._known()
        drops = request.held == "drop" or request.running == "recompute"
        recomputed = len(self._flights) if request.running == "recompute" else 0
        try:
            stood_s = await self._updating.commit(request)
        except EngineError:
            await self._abort_unbelieved()
            raise
        self._version = request.version
        dropped = self._drop_held() if drops else 0
        return CommitReply(
            version=request.version, pause_s=stood_s, recomputed_requests=recomputed, dropped_programs=dropped
        )

    async def abandon_update(self, version: str) -> None:
        await self._updating.abandon(version)

    async def flush(self) -> None:
        """Drop every KV; waits until no request runs.  What is left of it is unreachable at once."""
        self._drop_held()
        await self._updating.flush()

    async def pause(self, mode: PauseMode) -> None:
        """Idempotent.  Requests that come meanwhile wait for `resume`."""
        await self._known()
        await self._pausing.pause(mode)

    async def resume(self) -> None:
        """Idempotent."""
        await self._pausing.resume()
        for flight in self._flights.sent():
            if flight.is_given_up:
                await self._abort(flight)

    async def offload(self, program_id: ProgramId) -> None:
        """SGLang moves KV to its lower tier by itself; always an EngineError."""
        await self._lacks(Feature.OFFLOAD, program_id)

    async def restore(self, program_id: ProgramId) -> None:
        """As `offload`."""
        await self._lacks(Feature.OFFLOAD, program_id)

    async def _generate(self, flight: Flight, facts: Facts, spans: Spans | None) -> GenerateReply:
        request = flight.request
        holds = request.hold and Feature.HOLD in facts.features
        session = self._sessions.of(ProgramId(request.program_id)) if holds else None
        key = self._extra_key(request.salt)
        session_id = session.session_id if session else None
        body = generate_body(request, facts, Place(flight.rid, key, session_id, spans is not None))
        before_s, flight.is_sent = self._pausing.paused_s(), True
        telling = spans and self._telling(spans, request)
        try:
            answer, where = await self._answer(body, telling, facts)
        except HttpRefusal:
            raise
        except (anyio.get_cancelled_exc_class(), EngineError):
            # Its deadline, too, leaves it running in the engine.
            with anyio.CancelScope(shield=True):
                await self._forsake(flight)
            raise
        self._check_believed()
        pause_s = self._pausing.paused_s() - before_s
        asked = Asked(where, flight.rid, request, facts.model.experts_a_token, pause_s)
        reply = generate_reply(answer, asked)
        self._checks.versions(reply, request)
        if telling is not None:
            telling.end(reply)
        self._totals.count(reply)
        if session is not None:
            session.tokens = len(request.token_ids) + len(reply.token_ids)
        elif not request.hold:
            await self.release(ProgramId(request.program_id))
        return reply

    async def _until_open(self, is_given_up: Callable[[], bool]) -> None:
        with waiting_for_it(self._deadlines.generate_s, self._checks.error):
            await self._pausing.until_open(is_given_up)

    def _telling(self, spans: Spans, request: GenerateRequest) -> Telling:
        # What is kept of a truncated distribution is made out from the whole answer.
        version, updating, is_whole = self._version, self._updating, not is_truncated(request.sampling)

        def is_certain() -> bool:
            return is_whole and self._version == version and not updating.is_under_way and not updating.doubt

        return Telling(spans, version=version, is_certain=is_certain, where=self._http.where("/generate"))

    async def _answer(
        self, body: dict[str, object], telling: Telling | None, facts: Facts
    ) -> tuple[Generated, str]:
        """The whole answer, and the call's name for errors."""
        if telling is None:
            answer = await self._http.post("/generate", body, within_s=self._deadlines.generate_s)
            return answer.read(Generated), answer.where
        where = self._http.where("/generate")
        incremental = facts.server.incremental_streaming_output
        stream = Stream(telling, where, is_incremental=incremental)
        await self._http.stream("/generate", body, stream.take, within_s=self._deadlines.generate_s)
        return stream.whole(), where

    async def _forsake(self, flight: Flight) -> None:
        """Nobody waits for the tokens, and nobody is left who would release the KV."""
        flight.is_given_up = True
        try:
            if self._pausing.is_open:
                await self._abort(flight)
            await self.release(ProgramId(flight.request.program_id))
        except EngineError as error:
            _log.warning("a cancelled request may run to its end: %s", error)

    async def _abort(self, flight: Flight) -> None:
        await self._admin.post("/abort_request", {"rid": flight.rid, "abort_all": False}, repeatable=True)

    async def _abort_unbelieved(self) -> None:
        """What runs on weights that are not known is given out to nobody: let it end."""
        if self._updating.doubt:
            for flight in self._flights.sent():
                with suppress(EngineError):
                    await self._abort(flight)

    async def _known(self) -> Facts:
        if self._facts is None:
            await self.capabilities()
        assert self._facts is not None
        return self._facts

    async def _try_out(self, server: ServerInfo) -> Facts:
        within_s = self._deadlines.update_s
        return await try_out(self._http, server, self._names, self._folder, within_s=within_s)

    def _said(self, facts: Facts) -> Capabilities:
        return self._terms.applied_to(facts.capabilities(self._version))

    def _begin_life(self, version: str) -> None:
        self._updating.restarted()
        self._namespace, self._version = version, version
        self._sessions.forget()

    def _drop_held(self) -> int:
        """Make all KV unreachable for requests that start from now on; how many programs had some."""
        self._namespace = self._names.of(self._version)
        return self._sessions.forget()

    def _extra_key(self, salt: str) -> str:
        # No length of either can make two different pairs the same.
        return f"{len(self._namespace)}:{self._namespace}{salt}"

    async def _drained(self) -> None:
        """Return when no request runs or waits in the engine."""
        await self._flights.until_none_is_sent()
        while True:
            said = (await self._http.get("/v1/loads", query={"include": "core"})).read(Loads)
            if not said.requests:
                return
            await anyio.sleep(_POLL_S)

    def _check_believed(self) -> None:
        if why := self._updating.disbelief:
            raise self._checks.error(
                f"nothing it samples is believed: {why}; publish a whole version, or start it again"
            )

    async def _lacks(self, feature: Feature, program_id: ProgramId) -> None:
        del program_id
        self._checks.features([feature], await self._known())
