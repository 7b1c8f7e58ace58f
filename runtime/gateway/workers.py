"""Engines that a trainer brings: slime's worker routes over whatever lets engines come and go."""

import re
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol, get_args

from aiohttp import web
from pydantic import ValidationError

from sostenuto.errors import ConfigError
from sostenuto.runtime.config import EngineEntry
from sostenuto.runtime.gateway.dialects.dialect import Json
from sostenuto.runtime.gateway.keys import Scope
from sostenuto.runtime.gateway.refusing import json_reply
from sostenuto.runtime.gateway.server import Gateway, Handler, require
from sostenuto.runtime.gateway.turn import Refused

Kind = Literal["sglang", "vllm"]
_REMOVAL_S = 60.0
"""Within which turns that run on a removed engine may end."""


class Workers(Protocol):
    """Engines over HTTP, by address."""

    async def add(self, url: str, kind: Kind) -> None:
        """ConfigError or EngineError, and nothing has changed, when it does not join."""
        ...

    async def remove(self, url: str) -> None:
        """ConfigError for one that is not there, or the last one."""
        ...

    def urls(self) -> list[str]: ...


class Pool(Protocol):
    """What an EnginePool does."""

    @property
    def entries(self) -> list[EngineEntry]: ...

    async def add(self, entry: EngineEntry) -> None: ...

    async def remove(self, entry_id: str, *, within_s: float) -> None: ...


class PoolWorkers:
    """Implements `Workers` over the engines of a run."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def add(self, url: str, kind: Kind) -> None:
        await self._pool.add(_entry(url, kind))

    async def remove(self, url: str) -> None:
        found = next((entry.id for entry in self._pool.entries if entry.url == url.rstrip("/")), None)
        if found is None:
            raise ConfigError(f"url: {url!r} is no worker; there are {', '.join(self.urls()) or 'none'}")
        await self._pool.remove(found, within_s=_REMOVAL_S)

    def urls(self) -> list[str]:
        return [entry.url for entry in self._pool.entries if entry.url is not None]


def _entry(url: str, kind: Kind) -> EngineEntry:
    url = url.rstrip("/")
    name = re.sub(r"[^A-Za-z0-9.]+", "-", url.partition("://")[2])
    try:
        return EngineEntry(kind=kind, id=f"{kind}-{name}", url=url)
    except ValidationError:
        raise ConfigError(
            f"url: {url[:200]!r} is no address of an engine; give one such as http://gpu-1:8000"
        ) from None


Act = Callable[[web.Request, Workers], Awaitable[Json]]


def worker_routes(gateway: Gateway, workers: Workers | None) -> list[web.RouteDef]:
    """They need the scope `admin`.  Without `workers` each is refused."""

    def handler(act: Act) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            require(gateway.grantee(request), Scope.ADMIN)
            if workers is None:
                raise Refused(
                    "the engines here belong to a job; change them with Runtime.add_engine and remove_engine",
                    status=501,
                    code="no_workers",
                )
            return json_reply(await act(request, workers))

        return handle

    return [
        web.post("/add_worker", handler(_add)),
        web.post("/remove_worker", handler(_remove)),
        web.get("/list_workers", handler(_list)),
    ]


async def _add(request: web.Request, workers: Workers) -> Json:
    kind, url = request.query.get("kind", "sglang"), _url(request)
    if kind not in get_args(Kind):
        raise Refused(f"kind: {kind[:80]!r} is none; give sglang or vllm", field="kind")
    await workers.add(url, "vllm" if kind == "vllm" else "sglang")
    return {"status": "success", "url": url}


async def _remove(request: web.Request, workers: Workers) -> Json:
    url = _url(request)
    await workers.remove(url)
    return {"status": "success", "url": url}


async def _list(request: web.Request, workers: Workers) -> Json:
    del request
    return {"urls": workers.urls()}


def _url(request: web.Request) -> str:
    url = request.query.get("url", "")
    if not url:
        raise Refused("url: it is missing; give the engine's address as ?url=http://HOST:PORT", field="url")
    return url
