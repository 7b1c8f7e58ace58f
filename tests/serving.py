"""A tool server's program table with fakes around it, for tests on virtual time."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from fakes_tools import SECRET, FakeBackend, FakeHosts, config
from sostenuto.tools.edge import Edge
from sostenuto.tools.programs import Programs, open_programs
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.wire import CallRequest, EnvironmentRef, PrepareRequest, RewardRequest
from sostenuto.types import Episode, ProgramId, StopReason

A = ProgramId("a")


@dataclass
class Served:
    programs: Programs
    backend: FakeBackend
    hosts: FakeHosts

    def assert_nothing_left(self) -> None:
        assert not self.backend.live
        assert not self.backend.starting
        assert not self.hosts.host.programs
        assert not self.programs.state().programs

    async def settle(self) -> None:
        """Until every release that has begun is over."""
        while self.programs.state().programs:  # noqa: ASYNC110
            await anyio.sleep(0.01)


@asynccontextmanager
async def serving(backend: FakeBackend | None = None, **changes: object) -> AsyncGenerator[Served]:
    backend, hosts = backend or FakeBackend(), FakeHosts()
    edge = Edge(Secrets({"KEY": SECRET}), 16384)
    async with open_programs(config(**changes), backend, hosts, edge) as programs:
        served = Served(programs, backend, hosts)
        yield served
    served.assert_nothing_left()


def preparing(
    name: str = "Form", *, owner: str = "run", timeout_s: float = 60, **task: str
) -> PrepareRequest:
    environment = EnvironmentRef(name=name, import_path=f"tests:{name}")
    return PrepareRequest(owner=owner, environment=environment, task={**task}, timeout_s=timeout_s)


def calling(name: str, arguments: str, call_id: str = "c1", timeout_s: float = 300) -> CallRequest:
    return CallRequest(call_id=call_id, name=name, arguments=arguments, timeout_s=timeout_s)


def scoring(value: float = 1.0) -> RewardRequest:
    episode = Episode(messages=(), stop_reason=StopReason.ANSWERED, metrics={"value": value})
    return RewardRequest(call_id="r1", episode=episode)
