"""A model behind a gateway: programs that agents from elsewhere drive."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from anyio import to_thread

from sostenuto.errors import ConfigError
from sostenuto.records import Trajectory
from sostenuto.runtime.gateway.opening import OpenGateway, open_gateway
from sostenuto.runtime.gateway.routes import Controls
from sostenuto.runtime.gateway.weights import open_weights
from sostenuto.runtime.gateway.workers import PoolWorkers
from sostenuto.runtime.jobs.workshop import Premises, open_workshop
from sostenuto.runtime.journal import Journal, ProgramEnded, ProgramSubmitted
from sostenuto.runtime.ledger import Ledger
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.types import GroupId, Limits, ProgramId, Purpose

_TASK = "gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeJob:
    """Serve a model to agents from elsewhere."""

    model: str | Path
    """Folder in Hugging Face form."""
    name: str = "serve"
    """Begins the ids of its programs."""
    limits: Limits = field(default_factory=Limits)
    """`total_tokens`: the longest context that its engines have to take."""

    def model_folder(self) -> Path:
        """ConfigError when the model is not a folder on this machine."""
        folder = Path(self.model)
        if not folder.is_dir():
            raise ConfigError(f"model: {folder} is not a folder; give a local folder in Hugging Face form")
        return folder


class ServedBooks:
    """Enters programs of a gateway in ledger and journal."""

    def __init__(self, ledger: Ledger, journal: Journal) -> None:
        self._ledger = ledger
        self._journal = journal

    def begun(self, program_id: ProgramId, group_id: GroupId) -> None:
        self._ledger.submit(program_id)
        self._journal.write(ProgramSubmitted(program_id, group_id, _TASK, Purpose.SERVE))

    def ended(self, trajectory: Trajectory) -> None:
        assert trajectory.outcome is not None
        self._ledger.end(trajectory.program_id, trajectory.outcome)
        self._journal.write(ProgramEnded(trajectory.program_id, trajectory.outcome, trajectory))


@asynccontextmanager
async def serving(job: ServeJob, premises: Premises) -> AsyncGenerator[OpenGateway]:
    """Engines, scheduler and gateway, until the block is left."""
    folder = await to_thread.run_sync(ModelFolder.open, job.model_folder())
    books = ServedBooks(premises.ledger, premises.journal)
    async with (
        open_workshop(premises, job) as shop,
        open_weights(shop.dispatcher, premises.new_version, premises.run.path / "published") as weights,
        open_gateway(
            shop.dispatcher,
            folder,
            books,
            premises.config.gateway,
            prefix=job.name,
            controls=Controls(PoolWorkers(premises.engines), weights),
        ) as gateway,
    ):
        yield gateway
