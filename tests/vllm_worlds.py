"""A fake vLLM with an adapter's needs around it, and what can go wrong with it."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
from aiohttp import web
from benchmarks.vllm_weights import manifest_of

from fakes_vllm import FakeVllm, fake_vllm
from fakes_vllm_model import make_fake_folder
from sostenuto.runtime.engines.vllm.engine import Deadlines, Served, VllmEngine
from sostenuto.runtime.engines.vllm.transports import Disk, Transport
from sostenuto.runtime.engines.wire import CommitRequest, GenerateReply
from sostenuto.types import EngineId
from vllm_targets import request

LONG = 400

Worlds = Callable[..., AbstractAsyncContextManager["World"]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class World:
    fake: FakeVllm
    url: str
    model: Path
    other: Path
    updates: Path

    def engine(
        self,
        *,
        key: str = "",
        transport: Transport | None = None,
        served: Served | None = None,
        generate_s: float = 20,
    ) -> VllmEngine:
        return VllmEngine(
            EngineId("e0"),
            self.url,
            model=self.model,
            transport=transport or Disk(self.updates, self.model),
            api_key=key,
            deadlines=Deadlines(control_s=5, generate_s=generate_s, update_s=5),
            served=served or Served(),
        )


def worlds_in(place: Path) -> Worlds:
    """Each call opens one, with these settings of the fake."""

    @asynccontextmanager
    async def open_world(**settings: object) -> AsyncGenerator[World]:
        model, other = (make_fake_folder(place / name, seed) for seed, name in enumerate("mo"))
        async with fake_vllm(model, **settings) as (fake, url):
            yield World(fake, url, model, other, place / "updates")

    return open_world


async def update(engine: VllmEngine, folder: Path, version: str) -> None:
    await engine.prepare_update(manifest_of(folder, version))
    await engine.commit_update(CommitRequest(version=version))


async def into(replies: list[GenerateReply], engine: VllmEngine, name: str, tokens: int = LONG) -> None:
    replies.append(await engine.generate(request(name, max_new_tokens=tokens)))


async def until_sampled(fake: FakeVllm, tokens: int) -> None:
    while not fake.running or len(fake.running[-1].sampled) < tokens:  # noqa: ASYNC110
        await anyio.sleep(0.005)


def saying(content: str | bytes) -> Handler:
    body = content.encode() if isinstance(content, str) else content

    async def say(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    return say


def refusing(status: int, message: str) -> Handler:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": message}}, status=status)

    return refuse


async def silent(_: web.Request) -> web.StreamResponse:
    await anyio.sleep_forever()
    raise AssertionError
