"""An engine that only scores: a teacher's, or a reward model's."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread

from sostenuto.runtime.config import EngineEntry, EngineSettings
from sostenuto.runtime.engines.opened import Ground, source_of
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.suits import Requirements
from sostenuto.runtime.jobs.workshop import Premises
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.types import Version

_START = Version(0, 0)
_KV_TOKENS = 1024
"""It scores beside its pool."""


@asynccontextmanager
async def open_scoring_engine(
    directory: Path, entry: EngineEntry, premises: Premises, *, job: str, name: str, tokens: int | None = None
) -> AsyncGenerator[Engine]:
    """One of our own with the model of `directory`, or one that serves it already, called `name`.

    `tokens`: of the longest text, if that is known.  EngineError for one that does not serve the model.
    """
    folder = await anyio.to_thread.run_sync(ModelFolder.open, directory)
    common, run = premises.config.engine, premises.run
    settings = EngineSettings(kv_tokens=_KV_TOKENS, dtype=common.dtype, device=common.device)
    called = entry.model_copy(update={"id": entry.id or name})
    ground = Ground(job, folder.path, _START, settings, run.logs, run.weights, premises.tap, as_started=True)
    source = source_of(called, ground)
    async with source.open() as opened:
        facts = await opened.engine.capabilities()
        Requirements.of(folder, _START, tokens).check(source.id, facts)
        yield opened.engine
