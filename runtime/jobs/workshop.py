"""Everything that one job works with, opened together and closed in the other order."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from sostenuto.errors import lone_error
from sostenuto.records import Trajectory
from sostenuto.runtime.agent_runner import AgentRunner
from sostenuto.runtime.config import RuntimeConfig
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.engine_pool import EnginePool
from sostenuto.runtime.engines.client import Tap
from sostenuto.runtime.engines.opened import Ground
from sostenuto.runtime.engines.suits import Requirements
from sostenuto.runtime.gateway.opening import open_gateway
from sostenuto.runtime.inspection import Sighting, oldest_of
from sostenuto.runtime.jobs.events import JobEvent
from sostenuto.runtime.jobs.late import AwaitedRewards
from sostenuto.runtime.jobs.rewarding import LateRewards
from sostenuto.runtime.journal import Journal, VersionPublished
from sostenuto.runtime.ledger import Ledger
from sostenuto.runtime.program import ProgramSpec, Timeouts, ToolServer
from sostenuto.runtime.publishing import Publication, UpdatePolicy
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.runtime.rollouts import Rollouts, Runner
from sostenuto.runtime.run_directory import RunDirectory
from sostenuto.runtime.simulation.traces.recorder import TraceRecorder
from sostenuto.scheduler.actions import ToolServerJoined
from sostenuto.scheduler.update_terms import DEFAULT, UpdateTerms
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import Limits, ProgramId, Version

Say = Callable[[JobEvent], None]
Around = Callable[[Runner, Dispatcher], Runner]
"""Wraps whoever runs a job's programs."""


class Engaging(Protocol):
    """What a job says of the engines that it needs."""

    @property
    def name(self) -> str: ...

    @property
    def limits(self) -> Limits: ...

    def model_folder(self) -> Path: ...


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
    engines: EnginePool
    awaited: AwaitedRewards = field(default_factory=AwaitedRewards)
    """Programs whose rewards come after their end."""
    tap: Tap | None = None
    """Sees the bytes on the engine's socket; for checks that compare records with them."""

    def awaiting(self, rule: LateRewards | None, say: Say, around: Around | None = None) -> Around:
        """`around`, and beyond it the wait for rewards that come after a program's end."""

        def awaiting(runner: Runner, dispatcher: Dispatcher) -> Runner:
            inner = around(runner, dispatcher) if around else runner
            return self.awaited.around(inner, rule, dispatcher.around.renderer, say)

        return awaiting


@dataclass(frozen=True, slots=True)
class Workshop:
    """One job's engines and programs."""

    premises: Premises
    renderer: Renderer
    dispatcher: Dispatcher
    rollouts: Rollouts

    async def oldest_of(self, programs: Sequence[ProgramId]) -> Sighting | None:
        """What the first submitted of them does."""
        return await oldest_of(self.dispatcher, self.premises.tools, programs)

    async def publish(self, manifest: Manifest, *, step: int) -> Publication:
        """Open a version on every engine and note it in the journal."""
        publication = await self.dispatcher.publish(manifest)
        self.premises.journal.write(VersionPublished(publication.version, step))
        await self.premises.journal.flush()
        return publication


@asynccontextmanager
async def open_workshop(
    premises: Premises,
    job: Engaging,
    *,
    at_update: UpdateTerms = DEFAULT,
    agents: frozenset[str] = frozenset(),
    around: Around | None = None,
) -> AsyncGenerator[Workshop]:
    """Start the job's engines on its model folder, and a dispatcher on the engines.

    `agents`: the classes whose programs drive themselves, and find their model behind a gateway of the job's.
    `around`: gives whoever runs them in place of the usual one.
    """
    config = premises.config
    folder = await anyio.to_thread.run_sync(ModelFolder.open, job.model_folder())
    renderer = await anyio.to_thread.run_sync(open_renderer, folder)
    trace = TraceRecorder(config.trace) if config.trace else None
    version = premises.new_version()
    run = premises.run
    ground = Ground(job.name, folder.path, version, config.engine, run.logs, run.weights, premises.tap)
    needs = Requirements.of(folder, version, job.limits.total_tokens)
    with lone_error():
        async with (
            premises.engines.crew(needs, ground) as crew,
            open_dispatcher(
                config.scheduler,
                {},
                premises.tools,
                renderer,
                timeouts=Timeouts(engine_return_s=config.engine_return_s),
                update=UpdatePolicy(at_update),
            ) as dispatcher,
            premises.engines.begun(crew, dispatcher, ground),
        ):
            premises.journal.write(VersionPublished(version, step=0))
            async with _runner(dispatcher, folder, premises, job.name, agents) as runner:
                wrapped = around(runner, dispatcher) if around else runner
                rollouts = Rollouts(wrapped, premises.ledger, premises.journal, trace=trace)
                with premises.limiting(dispatcher.limit):
                    yield Workshop(premises, renderer, dispatcher, rollouts)


class _Either:
    """A Runner, of programs that are driven and of those that drive themselves."""

    def __init__(self, dispatcher: Runner, runner: Runner, agents: frozenset[str]) -> None:
        self._dispatcher = dispatcher
        self._runner = runner
        self._agents = agents

    async def run(self, spec: ProgramSpec) -> Trajectory:
        drives_itself = spec.environment.name in self._agents
        return await (self._runner if drives_itself else self._dispatcher).run(spec)


@asynccontextmanager
async def _runner(
    dispatcher: Dispatcher, folder: ModelFolder, premises: Premises, name: str, agents: frozenset[str]
) -> AsyncGenerator[Runner]:
    if not agents:
        yield dispatcher
        return
    settings = premises.config.gateway
    async with open_gateway(dispatcher, folder, None, settings, prefix=f"{name}/gateway") as gateway:
        yield _Either(dispatcher, AgentRunner(dispatcher, gateway), agents)
