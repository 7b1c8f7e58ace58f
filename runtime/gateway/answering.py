"""From a call that was understood to the response of it, at once or as a stream."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial

import anyio
from aiohttp import web

from sostenuto.errors import EngineError, SostenutoError, lone_error
from sostenuto.runtime.engines.wire import Spans, WireSpan
from sostenuto.runtime.gateway.dialects.dialect import Call, Dialect, Live, LiveDialect, Served
from sostenuto.runtime.gateway.identity import Identity
from sostenuto.runtime.gateway.refusing import as_refused, dumped
from sostenuto.runtime.gateway.sessions import Sessions
from sostenuto.runtime.gateway.turn import Ask, Refused, Told
from sostenuto.scheduler.requirements import Requirement
from sostenuto.types import Purpose

ID = web.RequestKey("id", str)
"""Of a request, as clients and logs know it."""
REQUEST_IDS: tuple[str, ...] = ("X-Request-ID", "Request-Id")
"""As OpenAI's clients look for it, and Anthropic's."""
PROGRAM = "X-Sostenuto-Program"
RECORD = "X-Sostenuto-Record"
WAITED = "X-Sostenuto-Waited"
VERSION = "X-Sostenuto-Version"
REQUIRES = "X-Sostenuto-Requires"

_UNREAD_S = 300.0
"""A client that reads nothing for so long has gone."""


@dataclass(slots=True)
class Answer:
    """One request on its way."""

    sessions: Sessions
    identity: Identity
    call: Call
    once: str
    join: bool
    requires: Requirement | None = None
    program_id: str = ""
    told: list[Told] = field(default_factory=list[Told])

    async def run(self, spans: Spans | None = None) -> None:
        """Sample every ask of the call, side by side; `spans` hears of the tokens of a single one."""
        asks = self.call.asks
        if len(asks) == 1:
            self.told = [await self._one(0, spans)]
            return
        self._check_many()
        told: list[Told | None] = [None] * len(asks)

        async def one(index: int) -> None:
            told[index] = await self._one(index)

        with lone_error():
            async with anyio.create_task_group() as group:
                for index in range(len(asks)):
                    group.start_soon(one, index)
        self.told = [one for one in told if one is not None]

    async def _one(self, index: int, spans: Spans | None = None) -> Told:
        once = f"{index}/{self.once}" if self.once else ""
        ask = replace(self.call.asks[index], requires=self.requires)
        try:
            resident, told = await self.sessions.ask(
                self.identity, ask, once=once, join=self.join, spans=spans
            )
        except EngineError as error:
            raise _of_grammar(error, ask) or error from None
        self.program_id = resident.session.id
        chain = self.call.chain
        if chain is not None and chain.past is not None:
            resident.replies.keep(self.call.id, chain.past(self.call.known, told))
        return told

    def _check_many(self) -> None:
        resident = self.sessions.find(self.identity.name)
        if resident is not None and resident.session.terms.purpose is Purpose.TRAIN:
            raise Refused(
                "n: a program that is trained takes one choice at a time, as only one can be acted on; "
                "leave it out",
                field="n",
                code="not_in_training",
            )

    def headers(self) -> dict[str, str]:
        """What the scheduler did for the call."""
        waited: dict[str, float] = {}
        for told in self.told:
            for reason, seconds in told.waited_s.items():
                waited[reason] = max(waited.get(reason, 0.0), seconds)
        shown = ", ".join(f"{reason}={seconds:.3f}" for reason, seconds in sorted(waited.items()))
        found = {
            PROGRAM: self.program_id,
            RECORD: self.told[0].standing.value,
            VERSION: str(min((told.version for told in self.told if told.version), default="")),
        }
        return found | ({WAITED: shown} if shown else {})


def _of_grammar(error: EngineError, ask: Ask) -> Refused | None:
    """A grammar that an engine does not take, under the key that asked for it."""
    if ask.sampling.grammar is None or getattr(error, "status", None) != 400:
        return None
    return Refused(f"{ask.held_by}: its schema cannot be held to here ({error})", field=ask.held_by)


async def answered(
    request: web.Request, answer: Answer, dialect: Dialect, served: Served, *, keep_alive_s: float
) -> web.StreamResponse:
    """The response to a call; whatever fails before a stream has begun is raised."""
    if not answer.call.streams:
        await answer.run()
        body = dialect.reply(answer.call, answer.told, served)
        return web.Response(body=dumped(body), content_type="application/json", headers=answer.headers())
    return await _streamed(request, answer, dialect, served, keep_alive_s)


async def _streamed(
    request: web.Request, answer: Answer, dialect: Dialect, served: Served, keep_alive_s: float
) -> web.StreamResponse:
    live = dialect.live(answer.call, served) if isinstance(dialect, LiveDialect) else None
    stream = _Stream(request, keep_alive_s, dialect.keep_alive)
    try:
        await stream.run(partial(answer.run, partial(stream.hear, live) if live else None))
        (told, *_) = answer.told
        events = live.end(told) if live else dialect.events(answer.call, answer.told, served)
    except SostenutoError as error:
        if not stream.response.prepared:
            raise
        await stream.write(dialect.error_event(as_refused(error)))
    else:
        if not stream.response.prepared:
            stream.response.headers.update(answer.headers())
        for event in events:
            await stream.write(event)
    await stream.response.write_eof()
    return stream.response


class _Stream:
    """A response of server-sent events."""

    def __init__(self, request: web.Request, keep_alive_s: float, keep_alive: bytes) -> None:
        self._request = request
        self._keep_alive_s = keep_alive_s
        self._keep_alive = keep_alive
        self._pending: list[bytes] = []
        self._news = anyio.Event()
        self._is_over = False
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                **dict.fromkeys(REQUEST_IDS, request[ID]),
            }
        )

    def hear(self, live: Live, span: WireSpan) -> None:
        """Tokens that were sampled just now."""
        self._pending += live.span(span)
        if self._pending:
            self._news.set()

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work, and tell what is heard meanwhile; that it goes on, where nothing is."""

        async def worked() -> None:
            await work()
            self._is_over = True
            self._news.set()

        with lone_error():
            async with anyio.create_task_group() as group:
                group.start_soon(worked)
                while not self._is_over or self._pending:
                    await self._tell_next()

    async def write(self, data: bytes) -> None:
        """ConnectionError for a client that takes nothing for a long time."""
        if not self.response.prepared:
            await self.response.prepare(self._request)
        with anyio.move_on_after(_UNREAD_S) as unread:
            await self.response.write(data)
        if unread.cancelled_caught:
            raise ConnectionResetError("the client does not read")

    async def _tell_next(self) -> None:
        with anyio.move_on_after(self._keep_alive_s):
            await self._news.wait()
        is_silent, self._news = not self._news.is_set(), anyio.Event()
        if pending := b"".join(self._pending):
            self._pending.clear()
            await self.write(pending)
        elif is_silent:
            await self.write(self._keep_alive)
