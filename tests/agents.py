"""Agents on the real path: workers, tool server, gateway, dispatcher; the engine follows a script."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import anyio

from scripted import Script, Stage, staged
from sostenuto.runtime.agent_runner import AgentRunner
from sostenuto.runtime.config import GatewaySettings, ToolServerSettings
from sostenuto.runtime.gateway.opening import OpenGateway, open_gateway
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rollouts import Rollouts


@asynccontextmanager
async def hosting(
    directory: Path,
    model: Path,
    script: Script,
    *,
    gateway: GatewaySettings | None = None,
    **more: Any,  # noqa: ANN401 - what `staged` takes
) -> AsyncGenerator[tuple[Stage, OpenGateway]]:
    """A stage whose programs are agents."""
    more.setdefault("tools", ToolServerSettings(unsafe=True))
    async with (
        staged(directory, model, script, **more) as stage,
        open_gateway(
            stage.dispatcher, ModelFolder.open(model), None, gateway or GatewaySettings(), prefix="gateway"
        ) as opened,
    ):
        runner = AgentRunner(stage.dispatcher, opened)
        yield replace(stage, rollouts=Rollouts(runner, stage.ledger, stage.journal)), opened


async def until_there(file: Path) -> None:
    """Wait for what an agent notes; a worker that starts on a busy machine takes its time."""
    with anyio.fail_after(60):
        while not await anyio.Path(file).exists():  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.02)


async def status_with(base_url: str, api_key: str) -> int:
    """What a model call with this key is answered."""
    body = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as http,
        http.post(f"{base_url}/chat/completions", json=body) as response,
    ):
        return response.status
