"""An engine and a gateway, each in a process of its own, for as long as a block runs."""

import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import psutil
from anyio.abc import Process

from sostenuto.runtime.quickstart.folder import write_folder
from sostenuto.runtime.quickstart.recipe import ModelShape
from sostenuto.runtime.quickstart.tokenizer import tokenizer_material, train_tokenizer
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder

_SHAPE = ModelShape(layers=2, hidden=32, heads=2, feed_forward=64, context_tokens=1 << 15)
_READY_S = 120.0


@dataclass(frozen=True, slots=True)
class Stand:
    """`url` is the gateway's; `socket` the engine's."""

    url: str
    socket: Path
    gateway: psutil.Process


@asynccontextmanager
async def standing(
    *, token_s: float = 0.0, settings: str = "{}", policy: str = "sostenuto"
) -> AsyncGenerator[Stand]:
    """On an engine that computes nothing and needs `token_s` for a token."""
    with tempfile.TemporaryDirectory(prefix="sostenuto-gateway-") as folder:
        model, socket = Path(folder) / "model", Path(folder) / "engine.sock"
        tokenizer = train_tokenizer(tokenizer_material(1))
        write_folder(model, tokenizer, _SHAPE)
        stop = open_renderer(ModelFolder.open(model)).stop_token_ids[0]
        size = str(tokenizer.get_vocab_size())
        engine = [str(socket), size, str(stop), str(token_s)]
        async with (
            _process("benchmarks.gateway_engine", engine),
            gateway_on(model, socket, policy=policy, settings=settings) as stand,
        ):
            yield stand


@asynccontextmanager
async def gateway_on(
    model: Path, socket: Path, *, policy: str = "sostenuto", settings: str = "{}"
) -> AsyncGenerator[Stand]:
    """A gateway on an engine that is there."""
    arguments = [str(model), str(socket), policy, settings]
    async with _process("benchmarks.gateway_server", arguments) as (process, url):
        yield Stand(url, socket, psutil.Process(process.pid))


@asynccontextmanager
async def _process(module: str, arguments: list[str]) -> AsyncGenerator[tuple[Process, str]]:
    """A process and the line that it says once it is ready."""
    command = [sys.executable, "-m", module, *arguments]
    root = Path(__file__).parent.parent
    async with await anyio.open_process(command, stderr=None, cwd=root) as process:
        try:
            assert process.stdout is not None
            with anyio.fail_after(_READY_S):
                said = await process.stdout.receive()
            yield process, said.decode().strip()
        finally:
            process.terminate()
