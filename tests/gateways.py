"""A gateway on the real dispatcher, over a socket; the engine follows a script."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from fakes import FakeTools
from scripted import ENGINE, Script, ScriptedEngine, says
from sostenuto.records import Trajectory, validate
from sostenuto.runtime.config import GatewaySettings
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.gateway.opening import OpenGateway, open_gateway
from sostenuto.runtime.gateway.routes import Controls
from sostenuto.runtime.gateway.weights import open_weights
from sostenuto.runtime.gateway.workers import Workers
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import GroupId, ProgramId

Json = dict[str, Any]

LOOK: Json = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
HELLO: list[Json] = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Hello"}]


def always(text: str) -> Script:
    return lambda _: [says(text)]


@dataclass
class Ended:
    """Implements `Books`."""

    open: set[str] = field(default_factory=set[str])
    records: list[Trajectory] = field(default_factory=list[Trajectory])

    def begun(self, program_id: ProgramId, group_id: GroupId) -> None:
        del group_id
        self.open.add(program_id)

    def ended(self, trajectory: Trajectory) -> None:
        validate(trajectory)
        self.open.discard(trajectory.program_id)
        self.records.append(trajectory)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    json: Any


@dataclass(frozen=True)
class Front:
    """A gateway, and a client of it."""

    gateway: OpenGateway
    engine: ScriptedEngine
    dispatcher: Dispatcher
    ended: Ended
    http: aiohttp.ClientSession

    async def post(
        self, path: str, body: object, headers: dict[str, str] | None = None, *, data: bytes | None = None
    ) -> Reply:
        sent = {"data": data} if data is not None else {"json": body}
        async with self.http.post(self.gateway.url + path, headers=headers, **sent) as response:  # pyright: ignore[reportArgumentType]
            return await read_reply(response)

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        async with self.http.get(self.gateway.url + path, headers=headers) as response:
            return await read_reply(response)

    async def chat(
        self, messages: Sequence[Json], *, headers: dict[str, str] | None = None, **more: object
    ) -> Reply:
        body = {"model": "default", "messages": list(messages), **more}
        return await self.post("/v1/chat/completions", body, headers)

    @property
    def resident(self) -> int:
        """Programs in the scheduler."""
        return len(self.dispatcher.scheduler.snapshot().phases)


def events_of(body: bytes) -> list[Any]:
    """Of a stream of server-sent events without names."""
    lines = [line for line in body.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]" for line in lines]


async def read_reply(response: aiohttp.ClientResponse) -> Reply:
    body = await response.read()
    is_json = response.content_type == "application/json"
    return Reply(response.status, dict(response.headers), body, await response.json() if is_json else None)


@asynccontextmanager
async def fronted(
    model: Path,
    script: Script,
    *,
    settings: GatewaySettings | None = None,
    environment: dict[str, str] | None = None,
    engine: dict[str, Any] | None = None,
    scheduler: SchedulerSettings | None = None,
    workers: Workers | None = None,
    published: Path | None = None,
    engine_type: type[ScriptedEngine] = ScriptedEngine,
) -> AsyncGenerator[Front]:
    """Nothing is held by any engine afterwards, and every program has its record."""
    folder = ModelFolder.open(model)
    renderer, ended = open_renderer(folder), Ended()
    scripted = engine_type(renderer, script)
    for name, value in (engine or {}).items():
        setattr(scripted, name, value)
    async with open_dispatcher(
        scheduler or SchedulerSettings(), {ENGINE: scripted}, FakeTools(), renderer
    ) as dispatcher:
        async with (
            open_weights(dispatcher, lambda: dispatcher.version.next(), published)  # noqa: PLW0108 - it rises
            if published
            else nullcontext() as weights,
            open_gateway(
                dispatcher,
                folder,
                ended,
                settings or GatewaySettings(),
                prefix="gateway",
                environment=(environment or {}).get,
                controls=Controls(workers, weights),
            ) as gateway,
            aiohttp.ClientSession() as http,
        ):
            yield Front(gateway, scripted, dispatcher, ended, http)
        assert scripted.held == {}
        assert scripted.decoding == 0
        assert ended.open == set()
        assert dispatcher.scheduler.snapshot().phases == {}
