"""Engines that are opened, die, and are opened again, without processes."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from fakes import FakeEngine, FakeRenderer, FakeTools
from sostenuto.errors import EngineError, EngineKilled
from sostenuto.runtime.crew import Crew, open_crew
from sostenuto.runtime.dispatcher import open_dispatcher
from sostenuto.runtime.engines.opened import Opened, Source
from sostenuto.runtime.engines.suits import Requirements
from sostenuto.runtime.engines.wire import (
    CommitReply,
    CommitRequest,
    GenerateReply,
    GenerateRequest,
    Spans,
)
from sostenuto.runtime.program import Timeouts
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import EngineId, Version

NEEDS = Requirements(
    "model", vocabulary_size=256, tokenizer_size=256, architectures=("Fake",), version=Version(0, 0)
)


def manifest(version: str) -> Manifest:
    return Manifest(version=version, path="none", nbytes=0, tensors=())


@dataclass
class Replica(FakeEngine):
    """Starts with version 0.0, whatever it served before; `did` is what was asked of it, in order."""

    starts_with: str = "0.0"
    start_s: float = 1.0
    refuses: str = ""
    """Why it does not start."""
    killed: int = 0
    """So often it is killed while it starts."""
    stillborn: int = 0
    """So often it is killed as soon as it can be asked."""
    starts: int = 0
    did: list[str] = field(default_factory=list[str])
    staged: str = ""

    def __post_init__(self) -> None:
        self.died = anyio.Event()
        self.version = self.starts_with

    async def starts_up(self) -> None:
        await anyio.sleep(self.start_s)
        if self.refuses:
            raise EngineError(self.refuses)
        if self.killed:
            self.killed -= 1
            raise EngineKilled("engine: its process ended with status -9")
        self.starts += 1
        self.begins_anew()
        if self.stillborn:
            self.stillborn -= 1
            self.dies()

    def begins_anew(self) -> None:
        """As whoever starts it by hand does it."""
        self.died, self.version, self.is_dead = anyio.Event(), self.starts_with, False
        self.held.clear()
        self.did.append("start")

    def dies(self) -> None:
        super().dies()
        self.died.set()

    async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
        self.did.append(f"generate {self.version}")
        return await super().generate(request, spans=spans)

    async def prepare_update(self, manifest: Manifest) -> None:
        self._check_alive()
        await super().prepare_update(manifest)
        self.staged = manifest.version
        self.did.append(f"prepare {manifest.version}")

    async def commit_update(self, request: CommitRequest) -> CommitReply:
        if self.staged != request.version:
            raise EngineError(f"engine: update/commit: {request.version} is not prepared")
        self.did.append(f"commit {request.version}")
        return await super().commit_update(request)


def ours(name: str, replica: Replica, restarts: int = 3) -> Source:
    """An engine that is started for the job."""
    engine_id = EngineId(name)

    @asynccontextmanager
    async def started() -> AsyncGenerator[Opened]:
        await replica.starts_up()

        async def ended() -> str:
            await replica.died.wait()
            return f"engine {engine_id}: its process ended with status -9"

        try:
            yield Opened(replica, ended)
        finally:
            replica.is_dead = True

    return Source(engine_id, "embedded", started, restarts)


def elsewhere(name: str, replica: Replica) -> Source:
    """An engine that runs whether we are there or not."""

    @asynccontextmanager
    async def reached() -> AsyncGenerator[Opened]:
        await replica.capabilities()
        yield Opened(replica, _never)

    return Source(EngineId(name), "vllm", reached, None)


async def _never() -> str:
    await anyio.sleep_forever()
    return ""


@dataclass(frozen=True)
class Manned:
    crew: Crew
    tools: FakeTools

    def states(self) -> dict[str, str]:
        return {keeper.source.id: keeper.standing.value for keeper in self.crew.keepers}

    def assert_nothing_left(self, *replicas: Replica) -> None:
        snapshot = self.crew.dispatcher.scheduler.snapshot()
        assert snapshot.phases == {}
        assert all(state == (0, 0) for state in snapshot.engines.values())
        assert self.tools.live == set()
        assert all((replica.held, replica.decoding) == ({}, 0) for replica in replicas)


@asynccontextmanager
async def manned(
    *sources: Source,
    policy: Frame | None = None,
    needs: Requirements = NEEDS,
    timeouts: Timeouts | None = None,
    tools: FakeTools | None = None,
) -> AsyncGenerator[Manned]:
    """A dispatcher and its crew, on fakes."""
    tools = tools or FakeTools()
    async with (
        open_crew(needs) as crew,
        open_dispatcher(
            SchedulerSettings(),
            {},
            tools,
            FakeRenderer(),
            policy=policy,
            timeouts=timeouts or Timeouts(engine_return_s=1000),
        ) as dispatcher,
    ):
        await crew.begin(dispatcher, sources)
        yield Manned(crew, tools)
