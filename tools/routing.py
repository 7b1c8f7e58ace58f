"""Calls on their way: to the host for an environment's own tools, to their services for remote ones.

The model sees one list.  What an environment's code is measured by does not apply to remote tools.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import anyio

from sostenuto.errors import ConfigError, SandboxError, Unsupported, nearest
from sostenuto.sandbox.protocol import Sandbox, SandboxUsage
from sostenuto.tools.facts import FactsCache
from sostenuto.tools.host import EnvironmentFacts, Host, Hosts
from sostenuto.tools.remote.services import Services
from sostenuto.tools.remote.tool import RemoteTool
from sostenuto.tools.turns import Turns
from sostenuto.tools.wire import (
    CallRequest,
    EnvironmentRef,
    Prepared,
    PrepareRequest,
    Reward,
    RewardRequest,
)
from sostenuto.types import ProgramId, ToolResult, ToolStatus

MEASURE_S = 1.0
"""A sandbox that does not say by then what it takes is not waited for."""


class RoutedHosts:
    """See `sostenuto.tools.host.Hosts`."""

    def __init__(self, hosts: Hosts, turns: Turns, services: Services) -> None:
        self._hosts = hosts
        self.turns = turns
        self._services = services
        self._facts = FactsCache(hosts)

    @property
    def count(self) -> int:
        return self._hosts.count

    async def describe(self, environment: EnvironmentRef) -> EnvironmentFacts:
        """What the class declares, with the tools of its services, which have to be there."""
        facts = await self._facts.of(environment)
        remote = await self._remote(environment, facts)
        return replace(facts, tools=(*facts.tools, *(tool.schema for tool in remote)))

    async def choose(self, environment: EnvironmentRef) -> Host:
        remote = await self._remote(environment, await self._facts.of(environment))
        host = await self._hosts.choose(environment)
        return RoutedHost(host, self.turns, {tool.schema.name: tool for tool in remote})

    async def _remote(self, environment: EnvironmentRef, facts: EnvironmentFacts) -> tuple[RemoteTool, ...]:
        if not facts.remote:
            return ()
        try:
            return await self._services.tools(facts.remote, {tool.name for tool in facts.tools})
        except ConfigError as error:
            raise ConfigError(f"environment {environment.name}: remote: {error}") from error


@dataclass(slots=True)
class RoutedHost:
    """See `sostenuto.tools.host.Host`; for one program."""

    _host: Host
    _turns: Turns
    _remote: Mapping[str, RemoteTool]
    _sandbox: Sandbox | None = None
    _names: list[str] = field(default_factory=list[str])

    @property
    def alive(self) -> bool:
        return self._host.alive

    async def prepare(
        self,
        program_id: ProgramId,
        request: PrepareRequest,
        sandbox: Sandbox | None,
        *,
        state: bytes | None = None,
    ) -> Prepared:
        self._sandbox = sandbox
        prepared = await self._host.prepare(program_id, request, sandbox, state=state)
        tools = (*prepared.tools, *(tool.schema for tool in self._remote.values()))
        self._names = [tool.name for tool in tools]
        self._turns.know(program_id, request.environment.name, tools)
        return prepared.model_copy(update={"tools": tools}) if self._remote else prepared

    async def save(self, program_id: ProgramId) -> bytes:
        return await self._host.save(program_id)

    async def call(self, program_id: ProgramId, request: CallRequest) -> ToolResult:
        if tool := self._remote.get(request.name):
            return await tool.call(request.arguments)
        if self._remote and request.name not in self._names:
            hint = nearest(request.name, self._names)
            return ToolResult(ToolStatus.INVALID_ARGUMENTS, f"there is no tool {request.name!r}; {hint}")
        if self._sandbox is None or not self._turns.asks_for_memory(program_id, request.name):
            return await self._host.call(program_id, request)
        return await self._call_measured(program_id, request, self._sandbox)

    async def _call_measured(
        self, program_id: ProgramId, request: CallRequest, sandbox: Sandbox
    ) -> ToolResult:
        before = await _usage(sandbox)
        result = await self._host.call(program_id, request)
        after = await _usage(sandbox)
        if before and after:
            self._turns.took(program_id, request.name, _peak_bytes(before, after))
        return result

    async def reward(self, program_id: ProgramId, request: RewardRequest) -> Reward:
        return await self._host.reward(program_id, request)

    async def release(self, program_id: ProgramId) -> None:
        self._turns.forget(program_id)
        await self._host.release(program_id)


def _peak_bytes(before: SandboxUsage, after: SandboxUsage) -> int:
    """The most that was used between two looks, as far as they can tell."""
    if after.peak_memory_bytes > before.peak_memory_bytes:
        return after.peak_memory_bytes
    return max(before.memory_bytes, after.memory_bytes)


async def _usage(sandbox: Sandbox) -> SandboxUsage | None:
    """What the sandbox takes; None where that is not known, which is no reason for a call to fail."""
    with anyio.move_on_after(MEASURE_S):
        try:
            return await sandbox.usage()
        except (SandboxError, Unsupported):
            return None
    return None
