"""Everything that one job works with, opened together and closed in the other order."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from sostenuto.errors import lone_error
from sostenuto.records import Trajectory
from sostenuto.runtime.agent_runner import AgentRunner
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.engines.opened import Ground
from sostenuto.runtime.engines.suits import Requirements
from sostenuto.runtime.gateway.opening import open_gateway
from sostenuto.runtime.inspection import Sighting, oldest_of
from sostenuto.runtime.jobs.premises import Around as Around
from sostenuto.runtime.jobs.premises import Premises as Premises
from sostenuto.runtime.jobs.premises import Say as Say
from sostenuto.runtime.jobs.roles import Role
from sostenuto.runtime.journal import VersionPublished
from sostenuto.runtime.program import ProgramSpec, Timeouts
from sostenuto.runtime.publishing import Publication, UpdatePolicy
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.runtime.roles_opened import open_roles, terms_of
from sostenuto.runtime.rollouts import Rollouts, Runner
from sostenuto.runtime.simulation.traces.recorder import TraceRecorder
from sostenuto.scheduler.update_terms import DEFAULT, UpdateTerms
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import Limits, ProgramId


class Engaging(Protocol):
    """What a job says of the engines that it needs."""

    @property
    def name(self) -> str: ...

    @property
    def limits(self) -> Limits: ...

    def model_folder(self) -> Path: ...


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
    roles: Sequence[Role] = (),
    around: Around | None = None,
) -> AsyncGenerator[Workshop]:
    """Start the job's engines on its model folder, and a dispatcher on the engines.

    `agents`: the classes whose programs drive themselves, and find their model behind a gateway of the job's.
    `roles`: those that such a program may speak in, beside the policy.
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
            async with _runner(dispatcher, folder, premises, job, agents, roles) as runner:
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
    dispatcher: Dispatcher,
    folder: ModelFolder,
    premises: Premises,
    job: Engaging,
    agents: frozenset[str],
    roles: Sequence[Role],
) -> AsyncGenerator[Runner]:
    if not agents:
        yield dispatcher
        return
    settings, prefix = premises.config.gateway, f"{job.name}/gateway"
    async with (
        open_roles(roles, premises, dispatcher.around.renderer, job=job.name, policy=folder) as others,
        open_gateway(dispatcher, folder, None, settings, prefix=prefix, roles=others) as gateway,
    ):
        yield _Either(dispatcher, AgentRunner(dispatcher, gateway, terms_of(roles)), agents)
