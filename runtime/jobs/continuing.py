"""Turns from histories among the whole rollouts of a job: which draw is one, and who runs it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import anyio
import anyio.to_thread
from pydantic import BaseModel

from sostenuto.envs.task import Tasks
from sostenuto.records import Trajectory
from sostenuto.runtime.dispatcher import Dispatcher
from sostenuto.runtime.jobs.histories import load_histories
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.sources import Mixed, TaskSource
from sostenuto.runtime.jobs.teacher import assigned
from sostenuto.runtime.program import History, ProgramSpec
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rollouts import Runner


class _Row(BaseModel):
    """What stands for a history among tasks."""

    id: str


@dataclass(frozen=True, slots=True)
class Continuations:
    """The histories of one job, by id, and with its tasks."""

    histories: Mapping[str, History]
    source: TaskSource

    def around(self, runner: Runner, dispatcher: Dispatcher) -> Runner:
        """`runner`, but for programs that continue a history: those are the dispatcher's, whoever drives
        the others."""
        return _Continuing(runner, dispatcher, self.histories) if self.histories else runner


class _Continuing:
    """A Runner."""

    def __init__(self, runner: Runner, dispatcher: Dispatcher, histories: Mapping[str, History]) -> None:
        self._runner = runner
        self._dispatcher = dispatcher
        self._histories = histories

    async def run(self, spec: ProgramSpec) -> Trajectory:
        history = self._histories.get(spec.task_id)
        if history is None:
            return await self._runner.run(spec)
        return await self._dispatcher.run(replace(spec, history=history))


async def open_continuations(job: RLJob) -> Continuations:
    """Load the histories of the job; ConfigError when a source of them has none."""
    return await anyio.to_thread.run_sync(_load, job)


def _load(job: RLJob) -> Continuations:
    if not job.prefixes:
        return Continuations({}, job.task_source())
    renderer = open_renderer(ModelFolder.open(job.model_folder()))
    sources: list[tuple[float, TaskSource]] = [
        (1 - sum(prefixes.share for prefixes in job.prefixes), job.task_source())
    ]
    histories: dict[str, History] = {}
    for prefixes in job.prefixes:
        loaded = load_histories(job, prefixes, renderer)
        for history in loaded:
            if not history.teacher:
                assigned(job.teachers, job.env.__name__, history.task)
            histories[history.id] = history
        rows = Tasks([_Row(id=history.id) for history in loaded], where=prefixes.where)
        sources.append((prefixes.share, rows.stream(seed=job.seed)))
    return Continuations(histories, Mixed(sources))
