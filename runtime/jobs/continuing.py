"""Turns from histories among the whole rollouts of a job: which draw is one, and who runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio
import anyio.to_thread
from pydantic import BaseModel

from sostenuto.envs.task import Draw, Tasks
from sostenuto.records import Trajectory
from sostenuto.runtime.dispatcher import Dispatcher
from sostenuto.runtime.jobs.histories import load_histories
from sostenuto.runtime.jobs.job import RLJob, TaskSource
from sostenuto.runtime.jobs.teacher import assigned
from sostenuto.runtime.program import History, ProgramSpec
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rollouts import Runner


class _Row(BaseModel):
    """What stands for a history among tasks."""

    id: str


class Mixed:
    """A TaskSource: at every draw the source comes up that is furthest behind its share."""

    def __init__(self, sources: Sequence[tuple[float, TaskSource]]) -> None:
        """With their shares; a share of zero never comes up."""
        self._sources = [(share, source) for share, source in sources if share > 0]
        self._places: list[tuple[int, int]] = []
        """Of each draw so far: which source, and which of its own draws."""
        self._drawn = [0] * len(self._sources)

    def at(self, ordinal: int) -> Draw[Any]:
        """The same draw for the same ordinal, always; IndexError beyond the end of the source it is of."""
        while len(self._places) <= ordinal:
            self._places.append(self._next())
        source, own = self._places[ordinal]
        return replace(self._sources[source][1].at(own), ordinal=ordinal)

    def _next(self) -> tuple[int, int]:
        count = len(self._places) + 1
        behind = [share * count - drawn for (share, _), drawn in zip(self._sources, self._drawn, strict=True)]
        source = behind.index(max(behind))
        self._drawn[source] += 1
        return source, self._drawn[source] - 1


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
