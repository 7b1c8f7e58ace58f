"""The tool server's HTTP surface: tools/wire.py over the program table.

- A refusal is always a Refusal; bad input is 400 and names the field, a wrong token is 401.
- Nothing leaves but through the edge.
- A handler whose client goes away is cancelled; what that means for the work is the table's rule.
"""

import hmac
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from secrets import token_hex
from socket import socket
from ssl import SSLContext
from urllib.parse import unquote

import anyio
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from sostenuto.errors import SostenutoError
from sostenuto.sandbox.protocol import Backend
from sostenuto.tools.config import ServerConfig
from sostenuto.tools.edge import Edge
from sostenuto.tools.exposure import listening_socket, server_tls
from sostenuto.tools.host import Hosts
from sostenuto.tools.logs import REQUEST
from sostenuto.tools.machine import supply
from sostenuto.tools.metrics import Metrics
from sostenuto.tools.programs import Programs, open_programs
from sostenuto.tools.reconcile import forget_ownerless, open_state, reclaim_orphans, verify_layers
from sostenuto.tools.recorded import RecordedBackend
from sostenuto.tools.refused import Refused, status_of
from sostenuto.tools.requests import body_of, done, json_response, named, program_id_of
from sostenuto.tools.rests import verify_rests
from sostenuto.tools.sandbox_routes import SandboxRoutes
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.wire import (
    OWNER,
    REQUEST_ID,
    CallRequest,
    Heartbeat,
    PrepareRequest,
    ResumeRequest,
    RewardRequest,
    RungRequest,
    Supply,
)
from sostenuto.types import ToolResult

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def listen(
    config: ServerConfig, backend: Backend, hosts: Hosts, secrets: Secrets
) -> AsyncGenerator[str]:
    """The URL of a server that answers within the block and holds nothing after it.

    What a server before it on the same `state_dir` has left is reclaimed first.
    """
    edge = Edge(secrets, config.output_bytes)
    tls = server_tls(config)
    with listening_socket(config) as listening:
        async with open_state(config) as journal:
            reclaimed = await reclaim_orphans(config, backend, journal)
            await verify_layers(journal, backend.name)
            await verify_rests(journal, backend.name)
            disk = config.sandbox_root or config.state_dir
            metrics = Metrics(None if disk is None else Path(disk))
            recorded = RecordedBackend(backend, journal, metrics)
            await forget_ownerless(recorded, journal.left)
            async with open_programs(config, recorded, hosts, edge, journal, metrics) as programs:
                programs.count("reclaimed_orphans", reclaimed)
                routes = Routes(programs, edge, config, metrics, partial(supply, config, recorded))
                async with _served(routes, config, listening, tls):
                    yield f"{'https' if tls else 'http'}://{config.host}:{listening.getsockname()[1]}"


@asynccontextmanager
async def _served(
    routes: "Routes", config: ServerConfig, listening: socket, tls: SSLContext | None
) -> AsyncGenerator[None]:
    runner = web.AppRunner(
        routes.application(), handler_cancellation=True, access_log=None, shutdown_timeout=config.release_s
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listening, ssl_context=tls).start()
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await routes.close()
            await runner.cleanup()


class Routes:
    """One method for each route."""

    def __init__(
        self,
        programs: Programs,
        edge: Edge,
        config: ServerConfig,
        metrics: Metrics,
        supply: Callable[[], Awaitable[Supply]],
    ) -> None:
        self._programs = programs
        self._edge = edge
        self._metrics = metrics
        self._supply = supply
        self._sandboxes = SandboxRoutes(programs, edge, config)
        self._body_bytes = config.body_bytes
        self._authorization = f"Bearer {config.token}".encode()
        self._metrics_authorization = f"Bearer {config.metrics_token or config.token}".encode()

    async def close(self) -> None:
        """Admit nothing more and release every program."""
        await self._programs.close()

    def application(self) -> web.Application:
        program = "/v1/programs/{program_id}"
        application = web.Application(client_max_size=self._body_bytes, middlewares=[self._answered])
        application.add_routes(
            [
                # The most frequent first: they are looked through in this order.
                web.post(f"{program}/call", self._call),
                *self._sandboxes.routes(program),
                web.post(f"{program}/prepare", self._prepare),
                web.post(f"{program}/resume", self._resume),
                web.post(f"{program}/reward", self._reward),
                web.post(f"{program}/release", self._release),
                web.post(f"{program}/rung", self._rung),
                web.post("/v1/owners/{owner}/heartbeat", self._heartbeat),
                web.get("/v1/state", self._state),
                web.get("/v1/limits", self._limits),
                web.get("/metrics", self._metrics_text),
                web.get("/health", self._health),
            ]
        )
        return application

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer under the request's id, for logs and for whoever asked."""
        request_id = request.headers.get(REQUEST_ID, "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = token_hex(8)
        REQUEST.set(request_id)
        response = await self._checked(request, handler)
        response.headers[REQUEST_ID] = request_id
        return response

    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check token and owner, and turn every refusal, aiohttp's too, into a Refusal."""
        try:
            self._check_token(request)
            if owner := request.headers.get(OWNER):
                self._programs.check_owner(unquote(owner))
            return await handler(request)
        except SostenutoError as error:
            return self._json(self._edge.refusal(error), status=status_of(error))
        except web.HTTPException as error:
            refused = Refused(f"{request.method} {request.path}: {error.reason}", status=error.status)
            return self._json(self._edge.refusal(refused), status=error.status)

    def _check_token(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        right = hmac.compare_digest(given, self._authorization)
        if request.path == "/metrics":
            right |= hmac.compare_digest(given, self._metrics_authorization)
        if not right and request.path != "/health":
            raise Refused("wrong or missing bearer token in the Authorization header", status=401)

    async def _prepare(self, request: web.Request) -> web.Response:
        body = await body_of(request, PrepareRequest)
        return self._json(await self._programs.prepare(program_id_of(request), body))

    async def _resume(self, request: web.Request) -> web.Response:
        body = await body_of(request, ResumeRequest)
        return self._json(await self._programs.resume(program_id_of(request), body))

    async def _call(self, request: web.Request) -> web.Response:
        body = await body_of(request, CallRequest)
        return self._json(await self._programs.call(program_id_of(request), body))

    async def _reward(self, request: web.Request) -> web.Response:
        body = await body_of(request, RewardRequest)
        return self._json(await self._programs.reward(program_id_of(request), body))

    async def _release(self, request: web.Request) -> web.Response:
        await self._programs.release(program_id_of(request))
        return done()

    async def _rung(self, request: web.Request) -> web.Response:
        body = await body_of(request, RungRequest)
        return self._json(await self._programs.move(program_id_of(request), body.rung))

    async def _heartbeat(self, request: web.Request) -> web.Response:
        body = await body_of(request, Heartbeat)
        self._programs.heartbeat(named(request, "owner"), body.lease_s)
        return done()

    async def _state(self, request: web.Request) -> web.Response:
        return self._json(self._programs.state())

    async def _limits(self, request: web.Request) -> web.Response:
        supply = await self._supply()
        return self._json(supply.model_copy(update={"warm_memory_bytes": self._programs.warm_bytes}))

    async def _metrics_text(self, request: web.Request) -> web.Response:
        text = await self._metrics.text(self._programs.state())
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _health(self, request: web.Request) -> web.Response:
        return done()

    def _json(self, value: BaseModel | ToolResult, status: int = 200) -> web.Response:
        return json_response(self._edge, value, status)
