"""A gateway on the real embedded engine with random weights, for calls that a grammar forces."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

import rendering_models as small
from engine_models import make_folder
from fakes import FakeTools
from gateways import Ended, Reply, read_reply
from sostenuto.runtime.config import GatewaySettings
from sostenuto.runtime.dispatcher import open_dispatcher
from sostenuto.runtime.engines.client import launch_embedded
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.gateway.opening import OpenGateway, open_gateway
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId

Json = dict[str, Any]
_CONTEXT = 4096


def random_model(folder: Path, template: str, tokenizer: str, kind: str = "llama") -> Path:
    """A model folder with weights, a template and a tokenizer for it."""
    size = Tokenizer.from_str(tokenizer).get_vocab_size()
    make_folder(folder, kind, vocab_size=size + 5, max_position_embeddings=_CONTEXT)
    config = (folder / "config.json").read_text()
    small.write_folder(folder, template, tokenizer)
    (folder / "config.json").write_text(config)
    return folder


@dataclass(frozen=True)
class Real:
    gateway: OpenGateway
    ended: Ended
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Json) -> Reply:
        async with self.http.post(self.gateway.url + path, json=body) as response:
            return await read_reply(response)


@asynccontextmanager
async def real_gateway(
    model: Path, place: Path, settings: GatewaySettings | None = None
) -> AsyncGenerator[Real]:
    """Whose record of each program is valid in the end."""
    folder, ended, id_ = ModelFolder.open(model), Ended(), EngineId("e0")
    embedded = EmbeddedSettings(model=model, socket=place / "e.sock", kv_tokens=4 * _CONTEXT, concurrency=8)
    async with (
        launch_embedded(embedded, engine_id=id_) as engine,
        open_dispatcher(SchedulerSettings(), {id_: engine}, FakeTools(), open_renderer(folder)) as dispatcher,
        open_gateway(
            dispatcher, folder, ended, settings or GatewaySettings(), prefix="g", environment=lambda _: None
        ) as gateway,
        aiohttp.ClientSession() as http,
    ):
        yield Real(gateway, ended, http)
