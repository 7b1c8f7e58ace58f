"""How a program comes to hold a sandbox and a prepared environment."""

import re
from dataclasses import replace
from functools import partial
from itertools import count

import anyio

from sostenuto.errors import ConfigError, EnvironmentFailure, SandboxError, ToolServerError
from sostenuto.sandbox.protocol import Blueprint
from sostenuto.tools.bounded import bounded
from sostenuto.tools.facts import FactsCache
from sostenuto.tools.host import EnvironmentFacts, Hosts
from sostenuto.tools.program import Program
from sostenuto.tools.rests import Rest
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

    async def run(self, program: Program, request: PrepareRequest, rest: Rest | None) -> Prepared:
        """Prepare or, with a `rest`, resume within the request's deadline, or raise what was in the way."""
        deadline_s = anyio.current_time() + request.timeout_s
        if rest is None:
            await self._start(program, request, deadline_s)
        else:
            await self._lay_down(program, request, rest, deadline_s)
        if program.sandbox is not None:
            program.sandbox.before_use = partial(program.standing.changes_by, "its sandbox was used")
        left_s = _left_s(deadline_s)
        return await bounded(
            lambda: self._begin(program, request.model_copy(update={"timeout_s": left_s}), rest),
            timeout_s=left_s + GRACE_S,
            late=EnvironmentFailure,
            doing=f"preparing {request.environment.name}",
        )

    async def _start(self, program: Program, request: PrepareRequest, deadline_s: float) -> None:
        facts = await self._read(request.environment, deadline_s)
        if facts.blueprint is not None:
            blueprint = _with_gateway(facts.blueprint, request.environment.gateway)
            await self._start_sandbox(program, blueprint, facts.setup, deadline_s)

    async def _lay_down(
        self, program: Program, request: PrepareRequest, rest: Rest, deadline_s: float
    ) -> None:
        """Its sandbox rests on the snapshot, as if this server had taken it."""
        try:
            facts = await self._read(request.environment, deadline_s)
            blueprint = _with_gateway(facts.blueprint or Blueprint(), request.environment.gateway)
        except BaseException:
            self._stock.forget_soon(rest.snapshot)
            raise
        program.sandbox = self._stock.resting(self._name(program), blueprint, rest.resting)

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
        name = self._name(program)

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

    def _name(self, program: Program) -> str:
        return f"{re.sub(r'[^A-Za-z0-9_-]', '-', program.id)[:40]}-{next(self._serial)}"

    async def _begin(self, program: Program, request: PrepareRequest, rest: Rest | None) -> Prepared:
        program.host = await self._hosts.choose(request.environment)
        state = None if rest is None else rest.state
        return await program.host.prepare(program.id, request, program.sandbox, state=state)


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
