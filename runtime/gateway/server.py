"""The gateway's HTTP server: every dialect over the same programs.

- Bad input is 400 with the key that is wrong, an unknown key 401, too much 429 with a time to try again,
  an engine's failure 503; never 500 on input.  Each in the form of the caller's dialect.
- A handler whose client goes away is cancelled, and gives back all that it held.
- While a program waits, a stream stays alive with comments; headers say what a reply waited for.
"""

import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from secrets import token_hex
from socket import socket
from ssl import SSLContext
from typing import cast

import anyio
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic_core import from_json

from sostenuto.errors import ConfigError, SostenutoError
from sostenuto.runtime.gateway.answering import ID, REQUEST_IDS, REQUIRES, Answer, answered
from sostenuto.runtime.gateway.dialects.dialect import Call, Dialect, Json, Served
from sostenuto.runtime.gateway.identity import Identity, Strength, identify
from sostenuto.runtime.gateway.keys import EVERYTHING, PREFIX, Grantee, Keys, Scope
from sostenuto.runtime.gateway.meters import Meters
from sostenuto.runtime.gateway.refusing import as_refused, json_reply, plain_error
from sostenuto.runtime.gateway.replies import past_of
from sostenuto.runtime.gateway.sessions import Sessions
from sostenuto.runtime.gateway.turn import Refused
from sostenuto.scheduler.requirements import Requirement

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_CLOSE_S = 2.0
_GONE = 499
"""A status for counting: the client went away."""
OF_PROGRAM = "/p/{program}"
"""Before a path: the program that it is of."""

_log = logging.getLogger(__name__)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Bytes that are no HTTP are answered, and whoever sends many fills no log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


_log.addFilter(_is_worth_a_line)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """One method for each thing that all routes share."""

    def __init__(
        self,
        sessions: Sessions,
        served: Served,
        keys: Keys,
        *,
        body_bytes: int,
        keep_alive_s: float,
        is_guarded: bool,
    ) -> None:
        """`is_guarded`: nobody may do anything without a key; else only minted keys are looked at."""
        self.sessions = sessions
        self.served = served
        self.keys = keys
        self.meters = Meters()
        self._body_bytes = body_bytes
        self._keep_alive_s = keep_alive_s
        self._is_guarded = is_guarded

    def application(self, routes: list[web.RouteDef]) -> web.Application:
        app = web.Application(client_max_size=self._body_bytes, middlewares=[self._guarded])
        app.add_routes(routes)
        return app

    def model_call(self, dialect: Dialect) -> Handler:
        """The handler of a route on which a model is called in `dialect`."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await self._model_call(request, dialect)
            except (SostenutoError, web.HTTPException) as error:
                refused = as_refused(error)
                return json_reply(dialect.error(refused), refused)

        return handle

    def question(self, dialect: Dialect, answer: Callable[[Json, Served], Json]) -> Handler:
        """The handler of a route that answers about a body in `dialect` without a model."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                require(self.grantee(request), Scope.AGENT)
                return json_reply(answer(object_of(await body_of(request)), self.served))
            except (SostenutoError, web.HTTPException) as error:
                refused = as_refused(error)
                return json_reply(dialect.error(refused), refused)

        return handle

    async def _model_call(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        grantee = self.grantee(request)
        require(grantee, Scope.AGENT)
        raw = await body_of(request)
        body = object_of(raw)
        identity = self._identity(request, grantee, body)
        call = self._in_role(self._chained(dialect.read(body, self.served), identity), body)
        once, join = _once(request, raw)
        answer = Answer(self.sessions, identity, call, once=once, join=join, requires=_required(request))
        try:
            return await answered(request, answer, dialect, self.served, keep_alive_s=self._keep_alive_s)
        finally:
            self.meters.sampled(answer.told)

    def _in_role(self, call: Call, body: Json) -> Call:
        """The call in the role that its body names as the model."""
        model: object = body.get("model")
        if not isinstance(model, str) or model not in self.served.roles:
            return call
        return replace(call, asks=tuple(replace(ask, role=model) for ask in call.asks))

    def _chained(self, call: Call, identity: Identity) -> Call:
        """The call with what it goes on from; Refused when that is not here."""
        if call.chain is None:
            return call
        resident = self.sessions.resident(identity)
        past = past_of(resident.replies if resident else None, call.chain.previous)
        ask, known = call.chain.ask(past)
        return replace(call, asks=(ask,), known=known)

    def grantee(self, request: web.Request) -> Grantee:
        """Whom the request's key belongs to; Refused (401) for one that is not known."""
        key = key_of(request)
        found = self.keys.find(key) if key else None
        if found is None and not self._is_guarded and not key.startswith(PREFIX):
            return EVERYTHING
        if found is None:
            what = "the key is not known here" if key else "a key is missing"
            raise Refused(
                f"{what}; give one as `Authorization: Bearer KEY` or `x-api-key`",
                status=401,
                code="invalid_api_key",
            )
        if found.is_over:
            raise Refused(
                f"the program of this key, {found.program}, is over; ask its owner for another key",
                status=401,
                code="program_over",
            )
        return found

    def _identity(self, request: web.Request, grantee: Grantee, body: Json) -> Identity:
        if grantee.program is not None:
            # Whatever else the client says of itself, the key was made for this program.
            return Identity(grantee.program, Strength.KEY)
        return identify(request.headers, request.match_info.get("program"), body)

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every request has an id, and every failure a body."""
        given = request.headers.get(REQUEST_IDS[0], "")
        request_id = given if _REQUEST_ID.fullmatch(given) else token_hex(8)
        request[ID] = request_id
        began_s, status = anyio.current_time(), _GONE
        try:
            response = await _explained(request, handler)
            status = response.status
        finally:
            self.meters.answered(_route_of(request), status, anyio.current_time() - began_s)
        if not response.prepared:
            response.headers.update(dict.fromkeys(REQUEST_IDS, request_id))
        return response


async def _explained(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (SostenutoError, web.HTTPException) as error:
        refused = as_refused(error)
        return json_reply(plain_error(refused), refused)


def _route_of(request: web.Request) -> str:
    """The path as it was registered, without the program that it is of."""
    resource = request.match_info.route.resource
    return resource.canonical.removeprefix(OF_PROGRAM) if resource is not None else "none"


@asynccontextmanager
async def listening(app: web.Application, sock: socket, tls: SSLContext | None) -> AsyncGenerator[None]:
    """Answer on the socket within the block."""
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSE_S, logger=_log
    )
    await runner.setup()
    try:
        await web.SockSite(runner, sock, ssl_context=tls).start()
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()


def key_of(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("x-api-key", "").strip()


def require(grantee: Grantee, scope: Scope) -> None:
    if not grantee.may(scope):
        raise Refused(
            f"this key may not do that; it needs the scope {scope.value!r}", status=403, code="forbidden"
        )


async def body_of(request: web.Request) -> bytes:
    """Refused for a body that cannot be read."""
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        raise Refused(f"body: it cannot be read: {error}") from None


def object_of(raw: bytes) -> Json:
    """The body as a JSON object; Refused for anything else."""
    try:
        value: object = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"body: it is no JSON: {str(error)[:200]}", field="body") from None
    if not isinstance(value, dict):
        raise Refused(f"body: give a JSON object, not {type(value).__name__}", field="body")
    return cast("Json", value)


def _required(request: web.Request) -> Requirement | None:
    """Which versions the client takes."""
    text = request.headers.get(REQUIRES)
    try:
        return None if text is None else Requirement.parse(text.strip())
    except ConfigError as error:
        raise Refused(f"{REQUIRES}: {error}", field=REQUIRES) from error


def _once(request: web.Request, raw: bytes) -> tuple[str, bool]:
    """What makes a call the same as another, and whether one may have come before."""
    given = request.headers.get("Idempotency-Key", "")
    retries = request.headers.get("x-stainless-retry-count", "")
    if not given and not retries:
        return "", False
    body = sha256(raw).hexdigest()
    return f"{given}/{request.path}/{body}", bool(given) or retries not in {"", "0"}
