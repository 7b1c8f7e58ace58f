"""How a program comes to hold a sandbox and a prepared environment."""

import re
from dataclasses import replace
from itertools import count

import anyio

from sostenuto.errors import ConfigError, EnvironmentFailure, SandboxError, ToolServerError
from sostenuto.sandbox.protocol import Blueprint
from sostenuto.tools.bounded import bounded
from sostenuto.tools.facts import FactsCache
from sostenuto.tools.host import EnvironmentFacts, Hosts
from sostenuto.tools.program import Program
from sostenuto.tools.setup import Setup
from sostenuto.tools.stock import Stock
from sostenuto.tools.wire import GATEWAY, EnvironmentRef, Prepared, PrepareRequest

GRACE_S = 5.0
"""A host keeps deadlines itself and ends its worker there; this much later it is waited for no longer."""


class Preparation:
    """Prepares programs; what one comes to hold is put down in it at once, to be given back."""

    def __init__(self, hosts: Hosts, stock: Stock) -> None:
        self._stock = stock
        self._hosts = hosts
        self._facts = FactsCache(hosts)
        self._serial = count(1)

    async def run(self, program: Program, request: PrepareRequest) -> Prepared:
        """Prepare within the deadline of the request, or raise what was in the way."""
        deadline_s = anyio.current_time() + request.timeout_s
        facts = await self._read(request.environment, deadline_s)
        if facts.blueprint is not None:
            blueprint = _with_gateway(facts.blueprint, request.environment.gateway)
            await self._start_sandbox(program, blueprint, facts.setup, deadline_s)
        left_s = _left_s(deadline_s)
        return await bounded(
            lambda: self._reset(program, request.model_copy(update={"timeout_s": left_s})),
            timeout_s=left_s + GRACE_S,
            late=EnvironmentFailure,
            doing=f"preparing {request.environment.name}",
        )

    async def _read(self, environment: EnvironmentRef, deadline_s: float) -> EnvironmentFacts:
        return await bounded(
            lambda: self._facts.of(environment),
            timeout_s=_left_s(deadline_s),
            late=ToolServerError,
            doing=f"loading {environment.name}",
        )

    async def _start_sandbox(
        self, program: Program, blueprint: Blueprint, setup: Setup, deadline_s: float
    ) -> None:
        name = f"{re.sub(r'[^A-Za-z0-9_-]', '-', program.id)[:40]}-{next(self._serial)}"

        async def start() -> None:
            program.sandbox = await self._stock.start(name, blueprint, setup)

        with_setup = " over what its set-up commands make" if setup.commands else ""
        await bounded(
            start,
            timeout_s=_left_s(deadline_s),
            late=SandboxError,
            broken=SandboxError,
            doing=f"starting a {self._stock.backend} sandbox{with_setup}",
        )

    async def _reset(self, program: Program, request: PrepareRequest) -> Prepared:
        program.host = await self._hosts.choose(request.environment)
        return await program.host.prepare(program.id, request, program.sandbox)


def _with_gateway(blueprint: Blueprint, place: str) -> Blueprint:
    """The blueprint whose list has the place of the gateway, where it asks for that."""
    if GATEWAY not in blueprint.network:
        return blueprint
    if not place:
        raise ConfigError(f"network: {GATEWAY} is there for agents alone; run it as the env of a job")
    network = tuple(place if entry == GATEWAY else entry for entry in blueprint.network)
    return replace(blueprint, network=network)


def _left_s(deadline_s: float) -> float:
    return max(0.001, deadline_s - anyio.current_time())
