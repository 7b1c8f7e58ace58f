"""An engine beside a job's own, with a model that never changes: of a teacher, a reward model or a role."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread

from sostenuto.runtime.config import EngineEntry, EngineSettings
from sostenuto.runtime.engines.opened import Ground, source_of
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.suits import Requirements
from sostenuto.runtime.jobs.premises import Premises
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.types import Version

_START = Version(0, 0)
_KV_TOKENS = 1024
"""Of one that only scores, which it does beside its pool."""


@asynccontextmanager
async def open_lone_engine(
    directory: Path,
    entry: EngineEntry,
    premises: Premises,
    *,
    job: str,
    name: str,
    tokens: int | None = None,
    kv_tokens: int = _KV_TOKENS,
) -> AsyncGenerator[Engine]:
    """One of our own with the model of `directory`, or one that serves it already, called `name`.

    `tokens`: of the longest text, if that is known.  `kv_tokens`: where its entry says nothing.
    EngineError for one that does not serve the model.
    """
    folder = await anyio.to_thread.run_sync(ModelFolder.open, directory)
    common, run = premises.config.engine, premises.run
    settings = EngineSettings(kv_tokens=kv_tokens, dtype=common.dtype, device=common.device)
    called = entry.model_copy(update={"id": entry.id or name})
    ground = Ground(job, folder.path, _START, settings, run.logs, run.weights, premises.tap, as_started=True)
    source = source_of(called, ground)
    async with source.open() as opened:
        facts = await opened.engine.capabilities()
        Requirements.of(folder, _START, tokens).check(source.id, facts)
        yield opened.engine
