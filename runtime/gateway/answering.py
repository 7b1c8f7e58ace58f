"""From a call that was understood to the response of it, at once or as a stream."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
from aiohttp import web

from sostenuto.errors import SostenutoError, lone_error
from sostenuto.runtime.gateway.dialects.dialect import Call, Dialect, Served
from sostenuto.runtime.gateway.identity import Identity
from sostenuto.runtime.gateway.refusing import as_refused, dumped
from sostenuto.runtime.gateway.sessions import Sessions
from sostenuto.runtime.gateway.turn import Refused, Told
from sostenuto.types import Purpose

ID = web.RequestKey("id", str)
"""Of a request, as clients and logs know it."""
REQUEST_IDS: tuple[str, ...] = ("X-Request-ID", "Request-Id")
"""As OpenAI's clients look for it, and Anthropic's."""
PROGRAM = "X-Sostenuto-Program"
RECORD = "X-Sostenuto-Record"
WAITED = "X-Sostenuto-Waited"
VERSION = "X-Sostenuto-Version"


@dataclass(slots=True)
class Answer:
    """One request on its way."""

    sessions: Sessions
    identity: Identity
    call: Call
    once: str
    join: bool
    program_id: str = ""
    told: list[Told] = field(default_factory=list[Told])

    async def run(self) -> None:
        """Sample every ask of the call, side by side."""
        asks = self.call.asks
        if len(asks) == 1:
            self.told = [await self._one(0)]
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

    async def _one(self, index: int) -> Told:
        once = f"{index}/{self.once}" if self.once else ""
        resident, told = await self.sessions.ask(
            self.identity, self.call.asks[index], once=once, join=self.join
        )
        self.program_id = resident.session.id
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
            VERSION: min(told.version for told in self.told),
        }
        return found | ({WAITED: shown} if shown else {})


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
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    response.headers.update(dict.fromkeys(REQUEST_IDS, request[ID]))

    async def keep_alive() -> None:
        if not response.prepared:
            await response.prepare(request)
        await response.write(dialect.keep_alive)

    try:
        await _meanwhile(answer.run, keep_alive, every_s=keep_alive_s)
        events = dialect.events(answer.call, answer.told, served)
    except SostenutoError as error:
        if not response.prepared:
            raise
        await response.write(dialect.error_event(as_refused(error)))
    else:
        if not response.prepared:
            response.headers.update(answer.headers())
            await response.prepare(request)
        for event in events:
            await response.write(event)
    await response.write_eof()
    return response


async def _meanwhile(
    work: Callable[[], Awaitable[None]], tick: Callable[[], Awaitable[None]], *, every_s: float
) -> None:
    """Run `work`, and `tick` as long as that takes."""

    async def ticking() -> None:
        while True:
            await anyio.sleep(every_s)
            await tick()

    with lone_error():
        async with anyio.create_task_group() as group:
            group.start_soon(ticking)
            await work()
            group.cancel_scope.cancel()
