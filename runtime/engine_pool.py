"""The engines that the jobs of a run work with: as configured, and as changed since.

Embedded engines are started for each job.  Engines that run elsewhere serve one job at a time: its weights
are theirs.
"""

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import anyio

from sostenuto.errors import ConfigError, SostenutoError
from sostenuto.runtime.config import EngineEntry, RuntimeConfig
from sostenuto.runtime.crew import Crew, open_crew
from sostenuto.runtime.dispatcher import Dispatcher
from sostenuto.runtime.engine_view import EngineView, views_of
from sostenuto.runtime.engines.opened import Ground, entries_of, id_of, source_of
from sostenuto.runtime.engines.suits import Requirements


@dataclass(frozen=True, slots=True)
class _Post:
    """The engines of one job, and what they are opened with."""

    crew: Crew
    ground: Ground


class EnginePool:
    """One for a runtime."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._entries = {entry.id: entry for entry in entries_of(config)}
        self._posts: dict[str, _Post] = {}
        self._borrowed_by = ""
        """The job that has the engines that run elsewhere."""

    def __repr__(self) -> str:
        return f"<EnginePool {' '.join(self._entries)} jobs={list(self._posts)}>"

    @property
    def entries(self) -> list[EngineEntry]:
        return list(self._entries.values())

    @asynccontextmanager
    async def crew(self, needs: Requirements, ground: Ground) -> AsyncGenerator[Crew]:
        """A job's engines while the block runs; `begin` opens them.

        ConfigError when another job has those that run elsewhere.
        """
        with self._borrowing(ground.job):
            async with open_crew(needs) as crew:
                yield crew

    @asynccontextmanager
    async def begun(self, crew: Crew, dispatcher: Dispatcher, ground: Ground) -> AsyncGenerator[None]:
        """Open the engines, and have them here while the block runs; EngineError when none of them joins."""
        self._posts[ground.job] = _Post(crew, ground)
        try:
            await crew.begin(dispatcher, [source_of(entry, ground) for entry in self._entries.values()])
            yield
        finally:
            del self._posts[ground.job]

    async def add(self, entry: EngineEntry) -> None:
        """Give one more engine to every job, those that run and those to come.

        ConfigError or EngineError, and nothing has changed, when it does not join one that runs.
        """
        if not entry.id or entry.id in self._entries:
            raise ConfigError(f"engines: id {entry.id!r} is empty or there already; give the engine its own")
        self._refuse_to_share(entry)
        given: list[_Post] = []
        try:
            for post in list(self._posts.values()):
                await post.crew.add(source_of(entry, post.ground))
                given.append(post)
        except SostenutoError:
            for post in given:
                await post.crew.remove(id_of(entry, post.ground), within_s=0)
            raise
        self._entries[entry.id] = entry

    async def remove(self, entry_id: str, *, within_s: float) -> None:
        """Let an engine go from every job.  ConfigError when it is not there, or the last that serves."""
        entry = self._entries.get(entry_id)
        if entry is None:
            raise ConfigError(f"engines: {entry_id!r} is not there; there are {', '.join(self._entries)}")
        if len(self._entries) == 1:
            raise ConfigError(f"engines: {entry_id!r} is the only one; add another one first")
        async with anyio.create_task_group() as group:
            for post in list(self._posts.values()):
                engine_id = id_of(entry, post.ground)
                group.start_soon(lambda post=post, name=engine_id: post.crew.remove(name, within_s=within_s))
        del self._entries[entry_id]

    async def view(self) -> list[EngineView]:
        """Every engine of every job that runs, with what it says of itself now."""
        posts = list(self._posts.items())
        async with anyio.create_task_group() as group:
            for _, post in posts:
                group.start_soon(post.crew.dispatcher.fleet.look)
        return [view for job, post in posts for view in views_of(job, post.crew)]

    def _refuse_to_share(self, entry: EngineEntry) -> None:
        if entry.kind != "embedded" and len(self._posts) > 1:
            raise ConfigError(
                f"engines: {entry.id} runs elsewhere and serves one job, and {len(self._posts)} run"
            )

    @contextmanager
    def _borrowing(self, job: str) -> Generator[None]:
        if all(entry.kind == "embedded" for entry in self._entries.values()):
            yield
            return
        if self._borrowed_by:
            raise ConfigError(
                f"engines: job {self._borrowed_by} has those that run elsewhere; wait for its end, or give "
                "this job a runtime with engines of its own"
            )
        self._borrowed_by = job
        try:
            yield
        finally:
            self._borrowed_by = ""
