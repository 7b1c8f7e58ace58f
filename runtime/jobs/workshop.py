"""Everything that one job works with, opened together and closed in the other order."""

import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from sostenuto.errors import lone_error
from sostenuto.runtime.config import RuntimeConfig
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.engines.client import Tap, launch_embedded
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.jobs.events import JobEvent
from sostenuto.runtime.journal import Journal, VersionPublished
from sostenuto.runtime.ledger import Ledger
from sostenuto.runtime.program import ToolServer
from sostenuto.runtime.publishing import Publication, UpdatePolicy
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.runtime.rollouts import Rollouts
from sostenuto.runtime.run_directory import RunDirectory
from sostenuto.runtime.simulation.traces.recorder import TraceRecorder
from sostenuto.scheduler.actions import ToolServerJoined
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import EngineId, Version

_SOCKET = "engine.sock"
_LONGEST_SOCKET_BYTES = 107
"""That the path of a Unix socket can have."""

Say = Callable[[JobEvent], None]


@dataclass(frozen=True, slots=True)
class Premises:
    """What all jobs of a run share."""

    config: RuntimeConfig
    run: RunDirectory
    journal: Journal
    ledger: Ledger
    tools: ToolServer
    isolation: str
    limiting: Callable[[Callable[[ToolServerJoined], None]], AbstractContextManager[None]]
    """Tells, within the block, what sandboxes may take together, whenever that changes."""
    new_version: Callable[[], Version]
    """A version that was never used in this run."""
    tap: Tap | None = None
    """Sees the bytes on the engine's socket; for checks that compare records with them."""


@dataclass(frozen=True, slots=True)
class Workshop:
    """One job's engine and programs."""

    premises: Premises
    renderer: Renderer
    engine: Engine
    dispatcher: Dispatcher
    rollouts: Rollouts

    async def publish(self, manifest: Manifest, *, step: int) -> Publication:
        """Open a version on every engine and note it in the journal."""
        publication = await self.dispatcher.publish(manifest)
        self.premises.journal.write(VersionPublished(publication.version, step))
        await self.premises.journal.flush()
        return publication


@asynccontextmanager
async def open_workshop(
    premises: Premises, folder: Path, *, name: str, keep_kv: bool = False
) -> AsyncGenerator[Workshop]:
    """Start an engine on the model folder and a dispatcher on the engine."""
    config, engine_id = premises.config, EngineId(f"{name}-engine")
    renderer = await anyio.to_thread.run_sync(lambda: open_renderer(ModelFolder.open(folder)))
    trace = TraceRecorder(config.trace) if config.trace else None
    version = premises.new_version()
    with _socket_folder(premises.run) as sockets, lone_error():
        settings = EmbeddedSettings(
            model=folder,
            socket=sockets / _SOCKET,
            kv_tokens=config.engine.kv_tokens,
            concurrency=config.engine.concurrency,
            threads=config.engine.threads,
            dtype=config.engine.dtype,
            version=str(version),
            device=config.engine.device,
            speculation=config.engine.speculation,
            draft_tokens=config.engine.draft_tokens,
            quantization=config.engine.quantization,
        )
        async with (
            launch_embedded(settings, engine_id=engine_id, tap=premises.tap) as engine,
            open_dispatcher(
                config.scheduler,
                {engine_id: engine},
                premises.tools,
                renderer,
                update=UpdatePolicy(keep_kv=keep_kv),
            ) as dispatcher,
        ):
            premises.journal.write(VersionPublished(version, step=0))
            rollouts = Rollouts(dispatcher, premises.ledger, premises.journal, trace=trace)
            with premises.limiting(dispatcher.limit):
                yield Workshop(premises, renderer, engine, dispatcher, rollouts)


@contextmanager
def _socket_folder(run: RunDirectory) -> Generator[Path]:
    """Where the engine's socket is, and its log: with the logs of the run, which outlive it."""
    folder = Path(tempfile.mkdtemp(prefix="engine-", dir=run.logs.absolute()))
    if len(os.fsencode(folder / _SOCKET)) <= _LONGEST_SOCKET_BYTES:
        yield folder
        return
    folder.rmdir()
    with tempfile.TemporaryDirectory(prefix="sostenuto-", ignore_cleanup_errors=True) as elsewhere:
        yield Path(elsewhere)
