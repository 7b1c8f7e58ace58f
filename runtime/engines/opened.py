"""From an entry of the configuration to an engine that can be opened, any number of times.

An embedded engine is started anew each time, with the weights of the job's model folder; one that runs
already is connected to, and has to be given them.  In either case it may serve another version than the one
that is deployed: whoever opens it sees to that.
"""

import os
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from sostenuto.runtime.config import EngineEntry, EngineSettings, RuntimeConfig
from sostenuto.runtime.engines.client import Tap, launch_embedded
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.reached import key_of, reach
from sostenuto.types import EngineId, Version

_SOCKET = "engine.sock"
_LONGEST_SOCKET_BYTES = 107
"""That the path of a Unix socket can have."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine that serves."""

    engine: Engine
    ended: Callable[[], Awaitable[str]]
    """Returns why, once its process has ended; of one that is not ours, never."""
    prepare_start: Callable[[str], Awaitable[None]] | None = None
    """Prepares the weights of the model's folder as this version.  None: it was started with them."""


@dataclass(frozen=True, slots=True)
class Source:
    """One engine as it can be opened."""

    id: EngineId
    kind: str
    open: Callable[[], AbstractAsyncContextManager[Opened]]
    """EngineError when it does not serve."""
    restarts: int | None
    """How often it is opened again within ten minutes.  None: it is not ours to start, and waited for."""
    url: str = ""
    """Where it listens, of one that is not ours."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What the engines of one job have in common."""

    job: str
    folder: Path
    """Of the model."""
    version: Version
    """What its weights are called."""
    settings: EngineSettings
    """Of embedded engines whose entry says nothing else."""
    logs: Path
    weights: Path
    """Folder for versions that engines read from disk, where their entries name no other."""
    tap: Tap | None = None
    as_started: bool = False
    """Whether an engine elsewhere is used with what it serves, and never given weights."""


def entries_of(config: RuntimeConfig) -> list[EngineEntry]:
    """The configured engines, each with an id of its own."""
    if config.engines:
        taken = {entry.id for entry in config.engines}
        return [entry if entry.id else _numbered(entry, taken) for entry in config.engines]
    if config.engine.replicas == 1:
        return [EngineEntry(id="engine")]
    return [EngineEntry(id=f"engine-{number}") for number in range(config.engine.replicas)]


def _numbered(entry: EngineEntry, taken: set[str]) -> EngineEntry:
    """Give it the first free name of its kind; `taken` has it afterwards."""
    number = next(n for n in range(len(taken) + 1) if f"{entry.kind}-{n}" not in taken)
    name = f"{entry.kind}-{number}"
    taken.add(name)
    return entry.model_copy(update={"id": name})


def id_of(entry: EngineEntry, ground: Ground) -> EngineId:
    """Its name within the run."""
    return EngineId(f"{ground.job}-{entry.id}")


def source_of(entry: EngineEntry, ground: Ground) -> Source:
    """How the engine is opened; ConfigError for one whose key is not there."""
    engine_id = id_of(entry, ground)
    if entry.kind == "embedded":
        restarts = ground.settings.restarts
        return Source(engine_id, entry.kind, lambda: _launched(engine_id, entry, ground), restarts)
    key, model = key_of(entry), ground.folder.absolute()
    weights = (entry.weights or ground.weights).absolute() / entry.id

    @asynccontextmanager
    async def reached() -> AsyncGenerator[Opened]:
        given = ground.as_started
        async with reach(engine_id, entry, key, model, weights, as_started=given) as engine:
            yield Opened(engine, _never, engine.prepare_start)

    return Source(engine_id, entry.kind, reached, None, entry.url or "")


async def _never() -> str:
    await anyio.sleep_forever()
    raise AssertionError


@asynccontextmanager
async def _launched(engine_id: EngineId, entry: EngineEntry, ground: Ground) -> AsyncGenerator[Opened]:
    common = ground.settings
    with _socket_folder(ground.logs) as folder:
        settings = EmbeddedSettings(
            model=ground.folder,
            socket=folder / _SOCKET,
            kv_tokens=entry.kv_tokens or common.kv_tokens,
            concurrency=entry.concurrency or common.concurrency,
            threads=entry.threads or common.threads,
            dtype=entry.dtype or common.dtype,
            version=str(ground.version),
            device=entry.device or common.device,
            speculation=common.speculation,
            draft_model=common.draft_model,
            draft_tokens=common.draft_tokens,
            quantization=common.quantization,
            lower_tokens=common.lower_tokens,
            lower_folder=common.lower_folder or ground.logs,
        )
        async with launch_embedded(settings, engine_id=engine_id, tap=ground.tap) as client:
            yield Opened(client, client.until_ended)


@contextmanager
def _socket_folder(logs: Path) -> Generator[Path]:
    """Where the engine's socket is, and its log: with the logs of the run, which outlive it."""
    folder = Path(tempfile.mkdtemp(prefix="engine-", dir=logs.absolute()))
    if len(os.fsencode(folder / _SOCKET)) <= _LONGEST_SOCKET_BYTES:
        yield folder
        return
    folder.rmdir()
    with tempfile.TemporaryDirectory(prefix="sostenuto-", ignore_cleanup_errors=True) as elsewhere:
        yield Path(elsewhere)
