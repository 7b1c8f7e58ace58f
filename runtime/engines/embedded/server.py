"""The HTTP surface of `wire` on a Unix socket.  A client that goes away aborts what it asked for."""

import os
import socket
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread
from aiohttp import web
from pydantic import BaseModel, ValidationError

from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.streaming import streamed
from sostenuto.runtime.engines.embedded.turn import Turn
from sostenuto.runtime.engines.embedded.worker import Worker
from sostenuto.runtime.engines.wire import (
    AdapterRequest,
    CommitReply,
    CommitRequest,
    GenerateReply,
    GenerateRequest,
    PauseMode,
    Sampling,
    ScoreReply,
    ScoreRequest,
    Wire,
)
from sostenuto.trainer.publication.manifest import Manifest

if TYPE_CHECKING:
    from sostenuto.runtime.engines.embedded.grammar.guide import Guide

_BODY_BYTES = 64 << 20
_PATH_BYTES = 107  # sun_path less its terminator

Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _RequestId(Wire):
    request_id: str


class _ProgramId(Wire):
    program_id: str


class _AdapterName(Wire):
    name: str


class _VersionName(Wire):
    version: str


class _Mode(Wire):
    mode: PauseMode


class Server:
    """Routes; each hands its request to the engine's thread and answers with what comes back."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._updating = anyio.Lock()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[_refusals], client_max_size=_BODY_BYTES)
        app.router.add_get("/capabilities", self._capabilities)
        app.router.add_get("/load", self._load)
        posts: dict[str, Handler] = {
            "/generate": self._generate, "/abort": self._abort, "/release": self._release,
            "/score": self._score, "/update/prepare": self._prepare, "/update/commit": self._commit,
            "/update/abandon": self._abandon, "/adapters/load": self._load_adapter,
            "/adapters/unload": self._unload_adapter, "/flush": self._flush,
            "/offload": self._offload, "/restore": self._restore,
            "/pause": self._pause, "/resume": self._resume,
        }  # fmt: skip
        for path, handler in posts.items():
            app.router.add_post(path, handler)
        return app

    async def _capabilities(self, _request: web.Request) -> web.Response:
        return _reply(await self._worker.ask(lambda core: core.capabilities()))

    async def _load(self, _request: web.Request) -> web.Response:
        return _reply(await self._worker.ask(lambda core: core.load()))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await _parsed(request, GenerateRequest)
        guide = await self._guide(body.sampling)
        if request.query.get("stream") == "1":
            return await streamed(request, lambda told: self._sampled(body, guide, told))
        return _reply(await self._sampled(body, guide, lambda _: None))

    async def _sampled(
        self, body: GenerateRequest, guide: "Guide | None", told: Callable[[Turn], None]
    ) -> GenerateReply:
        """What the engine answers; `told` is called on its thread with the turn that it queues."""
        try:
            return await self._worker.request(lambda core, answer: told(core.submit(body, answer, guide)))
        except anyio.get_cancelled_exc_class():
            # Nobody waits for the tokens, and nobody is left who would release the KV.
            self._worker.post(lambda core: core.abort(body.request_id, hold=False))
            raise

    async def _guide(self, sampling: Sampling) -> "Guide | None":
        """Compiled here, so that the engine's thread never waits for it."""
        if sampling.grammar is None:
            return None
        grammars = await self._worker.ask(lambda core: core.grammars)
        return await grammars.guide(sampling.grammar, frozenset(sampling.stop_token_ids))

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _parsed(request, _RequestId)
        await self._worker.ask(lambda core: core.abort(body.request_id))
        return web.json_response({})

    async def _release(self, request: web.Request) -> web.Response:
        body = await _parsed(request, _ProgramId)
        await self._worker.ask(lambda core: core.release(body.program_id))
        return web.json_response({})

    async def _offload(self, request: web.Request) -> web.Response:
        body = await _parsed(request, _ProgramId)
        await self._worker.ask(lambda core: core.offload(body.program_id))
        return web.json_response({})

    async def _restore(self, request: web.Request) -> web.Response:
        body = await _parsed(request, _ProgramId)
        await self._worker.ask(lambda core: core.restore(body.program_id))
        return web.json_response({})

    async def _flush(self, _request: web.Request) -> web.Response:
        await self._worker.ask(lambda core: core.flush())
        return web.json_response({})

    async def _pause(self, request: web.Request) -> web.Response:
        body = await _parsed(request, _Mode)
        await self._worker.request(lambda core, answer: core.pause(body.mode, answer))
        return web.json_response({})

    async def _resume(self, _request: web.Request) -> web.Response:
        await self._worker.ask(lambda core: core.resume())
        return web.json_response({})

    async def _score(self, request: web.Request) -> web.Response:
        body = await _parsed(request, ScoreRequest)
        reply: ScoreReply = await self._worker.request(lambda core, answer: core.score(body, answer))
        return _reply(reply)

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await _parsed(request, AdapterRequest)
        adapters = await self._worker.ask(lambda core: core.adapters)
        adapter = await anyio.to_thread.run_sync(adapters.read, body)
        return _reply(await self._worker.ask(lambda core: core.adapters.put(adapter)))

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        body = await _parsed(request, _AdapterName)
        await self._worker.ask(lambda core: core.adapters.drop(body.name))
        return web.json_response({})

    async def _prepare(self, request: web.Request) -> web.Response:
        manifest = await _parsed(request, Manifest)
        weights = await self._worker.ask(lambda core: core.weights)
        async with self._updating:
            await anyio.to_thread.run_sync(weights.stage, manifest)
        return web.json_response({})

    async def _commit(self, request: web.Request) -> web.Response:
        body = await _parsed(request, CommitRequest)
        async with self._updating:
            reply: CommitReply = await self._worker.ask(lambda core: core.commit(body))
        return _reply(reply)

    async def _abandon(self, request: web.Request) -> web.Response:
        body = await _parsed(request, _VersionName)
        async with self._updating:
            await self._worker.ask(lambda core: core.weights.abandon(body.version))
        return web.json_response({})


def bind(path: Path) -> socket.socket:
    """A Unix socket at `path` for its owner alone, or Refusal.  A dead engine's socket is replaced."""
    if len(os.fsencode(path)) > _PATH_BYTES:
        message = f"socket path {path} is longer than {_PATH_BYTES} bytes"
        raise Refusal(400, "socket", message, "use a shorter run directory, for example under /tmp")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        _clear(path)
        listener.bind(str(path))
        # Listening from here on: a second engine sees that the path is taken, an early client waits.
        listener.listen(128)
    except OSError as exc:
        listener.close()
        message = f"socket path {path}: {exc.strerror}"
        raise Refusal(400, "socket", message, "use a path in a directory that can be written") from exc
    except Refusal:
        listener.close()
        raise
    finally:
        os.umask(previous)
    return listener


def _clear(path: Path) -> None:
    """Remove the socket of a process that no longer listens."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise Refusal(400, "socket", f"socket path {path} is a file", "use another path")
        with socket.socket(socket.AF_UNIX) as probe, suppress(ConnectionRefusedError):
            probe.connect(str(path))
            message = f"socket path {path} is in use by a process that listens"
            raise Refusal(400, "socket", message, "end that process, or use another path")
        path.unlink()


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refusal as refusal:
        return web.json_response(refusal.body(), status=refusal.status)


async def _parsed(request: web.Request, body: type[Body]) -> Body:
    try:
        return body.model_validate_json(await request.read())
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"])) or "body"
        remedy = f"send a {body.__name__.lstrip('_')} as JSON"
        raise Refusal(400, "malformed", f"{field}: {first['msg']}", remedy) from exc


def _reply(body: BaseModel) -> web.Response:
    return web.Response(body=body.model_dump_json().encode(), content_type="application/json")
