"""Every program on this tool server, from prepare to release.

- A program is one task in the table's group: it prepares, waits while its calls run in a group of
  its own, and gives back what it holds.  Cancelling its scope, for whatever reason, is a release.
- A program is in the table exactly as long as it holds, or may come to hold, a sandbox or a place in a host.
- Work under a call id goes on when the one who asked goes away; everything else ends with its request.
- Time is that of the event loop.
"""

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from logging import getLogger
from math import inf, isfinite
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from sostenuto.errors import EnvironmentFailure, SandboxError, SostenutoError, ToolServerError
from sostenuto.sandbox.protocol import Backend, Sandbox
from sostenuto.tools.bounded import bounded, outcome_of
from sostenuto.tools.config import ServerConfig
from sostenuto.tools.edge import Edge
from sostenuto.tools.host import Host, Hosts
from sostenuto.tools.leases import Leases
from sostenuto.tools.phases import Event, Phase
from sostenuto.tools.preparation import GRACE_S, Preparation
from sostenuto.tools.program import Program
from sostenuto.tools.refused import Refused
from sostenuto.tools.remote.services import Services
from sostenuto.tools.results import Pending, ResultLog
from sostenuto.tools.routing import RoutedHosts
from sostenuto.tools.turns import Turn, Turns
from sostenuto.tools.wire import (
    CallRequest,
    Prepared,
    PrepareRequest,
    ProgramState,
    Reward,
    RewardRequest,
    State,
)
from sostenuto.types import ProgramId, ToolResult

T = TypeVar("T")
log = getLogger(__name__)

COUNTERS = (
    "prepared",
    "prepare_failures",
    "calls",
    "scores",
    "repeated_ids",
    "released",
    "release_failures",
    "expired_leases",
    "expired_programs",
)


@asynccontextmanager
async def open_programs(
    config: ServerConfig, backend: Backend, hosts: Hosts, edge: Edge
) -> AsyncGenerator["Programs"]:
    """A table that watches its leases; leaving the block releases every program."""
    async with anyio.create_task_group() as group:
        programs = Programs(config, backend, hosts, edge, group)
        group.start_soon(programs.watch_leases)
        try:
            yield programs
        finally:
            with anyio.CancelScope(shield=True):
                await programs.close()
            group.cancel_scope.cancel()


class Programs:
    """The table; the only writer of programs and leases."""

    def __init__(
        self, config: ServerConfig, backend: Backend, hosts: Hosts, edge: Edge, group: TaskGroup
    ) -> None:
        self._config = config
        self._backend = backend
        self._hosts = RoutedHosts(hosts, Turns(config), Services(edge.secrets, group))
        self._edge = edge
        self._group = group
        self._preparation = Preparation(backend, self._hosts, config.starts_at_once)
        self._programs: dict[ProgramId, Program] = {}
        self._leases = Leases(config.longest_lease_s)
        self._leases_changed = anyio.Event()
        self._counters = Counter[str](dict.fromkeys(COUNTERS, 0))
        self._closed = False

    async def prepare(self, program_id: ProgramId, request: PrepareRequest) -> Prepared:
        """Prepare a new program.  One whose prepare fails, or is cancelled, is released again."""
        while last := self._programs.get(program_id):
            if last.phase is not Phase.RELEASING:
                raise Refused(f"program {program_id} is here already, {last.phase}", status=409)
            await last.ended.wait()
        program = self._admit(program_id, request)
        try:
            return await program.prepared.wait()
        except anyio.get_cancelled_exc_class():
            program.release()
            raise

    async def call(self, program_id: ProgramId, request: CallRequest) -> ToolResult:
        """Run a tool, or join or repeat what ran under this id."""
        program = self._find(program_id)
        pending = self._known(program.calls, request.call_id)
        if pending is None:
            turn = self._hosts.turns.enter(program_id, request)
            work = partial(self._call, program, request, turn)
            with turn.given_up_when_refused():
                pending = program.run_recorded(Event.CALL, program.calls, request.call_id, work)
            self._counters["calls"] += 1
        return await pending.wait()

    async def reward(self, program_id: ProgramId, request: RewardRequest) -> Reward:
        """Score the episode, or join or repeat what ran under this id."""
        program = self._find(program_id)
        pending = self._known(program.scores, request.call_id)
        if pending is None:
            work = partial(self._score, program, request)
            pending = program.run_recorded(Event.SCORE, program.scores, request.call_id, work)
            self._counters["scores"] += 1
        return await pending.wait()

    async def release(self, program_id: ProgramId) -> None:
        """Return when the program holds nothing any more; at once when it is not here."""
        if program := self._programs.get(program_id):
            program.release()
            await program.ended.wait()

    async def in_sandbox(self, program_id: ProgramId, use: Callable[[Sandbox], Awaitable[T]]) -> T:
        """What `use` returns; it is cancelled with the one who asked and with the program."""
        program = self._find(program_id)
        if program.sandbox is None or program.tasks is None or program.phase is Phase.RELEASING:
            raise Refused(f"program {program_id}, {program.phase}, has no sandbox to use", status=409)
        pending, scope = Pending[T](), anyio.CancelScope()
        program.tasks.start_soon(_settle, pending, scope, partial(use, program.sandbox), program)
        try:
            return await pending.wait()
        finally:
            scope.cancel()

    def heartbeat(self, owner: str, lease_s: float) -> None:
        """Renew the lease that all programs of the owner live by."""
        self._leases.renew(owner, lease_s, now_s=anyio.current_time())
        self._leases_changed.set()

    def state(self) -> State:
        now_s = anyio.current_time()
        programs = tuple(self._state_of(program, now_s) for program in self._programs.values())
        owners = self._leases.left_s(now_s=now_s)
        return State(programs=programs, hosts=self._hosts.count, owners=owners, counters=dict(self._counters))

    async def watch_leases(self) -> None:
        """Release, forever, the programs whose owner's lease has run out."""
        while True:
            self._leases_changed = anyio.Event()
            next_s = self._leases.next_expiry_s
            with anyio.CancelScope(deadline=inf if next_s is None else next_s):
                await self._leases_changed.wait()
            for owner in self._leases.expire(now_s=anyio.current_time()):
                self._expire(owner)

    async def close(self) -> None:
        """Admit nothing more, release everything, and return when it is gone."""
        self._closed = True
        programs = list(self._programs.values())
        for program in programs:
            program.release()
        for program in programs:
            await program.ended.wait()

    def _admit(self, program_id: ProgramId, request: PrepareRequest) -> Program:
        if self._closed:
            raise Refused("the tool server is stopping", status=503)
        now_s = anyio.current_time()
        program = Program(
            id=program_id,
            owner=request.owner,
            started_s=now_s,
            calls=ResultLog(self._config.results_bytes, _result_bytes),
            scores=ResultLog(self._config.results_bytes, _reward_bytes),
        )
        self._programs[program_id] = program
        self._leases.begin(request.owner, self._config.lease_s, now_s=now_s)
        self._leases_changed.set()
        self._group.start_soon(self._live, program, request)
        return program

    async def _live(self, program: Program, request: PrepareRequest) -> None:
        outcome: Prepared | SostenutoError = program.released_error()
        try:
            with program.scope:
                result = await outcome_of(partial(self._preparation.run, program, request))
                # A release may have come too late to stop the last step, and stands all the same.
                if program.phase is Phase.PREPARING:
                    outcome = result
                if isinstance(outcome, Prepared):
                    await self._stay(program, outcome)
        finally:
            await self._end(program)
            self._counters["prepare_failures"] += not isinstance(outcome, Prepared)
            program.prepared.settle(outcome)

    async def _stay(self, program: Program, prepared: Prepared) -> None:
        """Be there for calls until the program is released."""
        program.output_bytes = {tool.name: tool.output_bytes for tool in prepared.tools}
        async with anyio.create_task_group() as program.tasks:
            program.move(Event.PREPARED)
            self._counters["prepared"] += 1
            program.prepared.settle(prepared)
            await anyio.sleep_forever()

    async def _end(self, program: Program) -> None:
        """Give back what the program holds; its environment first, which may still use the sandbox."""
        program.move(Event.RELEASE)
        with anyio.CancelScope(shield=True):
            if program.host is not None:
                await self._give_back(program, "environment", partial(program.host.release, program.id))
            if program.sandbox is not None:
                await self._give_back(program, "sandbox", program.sandbox.stop)
        del self._programs[program.id]
        self._counters["released"] += 1
        program.ended.set()

    async def _give_back(self, program: Program, what: str, step: Callable[[], Awaitable[None]]) -> None:
        try:
            limit_s = self._config.release_s
            await bounded(step, timeout_s=limit_s, late=ToolServerError, doing=f"closing the {what}")
        except SostenutoError as error:
            self._counters["release_failures"] += 1
            log.warning("program %s: %s", program.id, error)

    async def _call(self, program: Program, request: CallRequest, turn: Turn) -> ToolResult:
        with anyio.move_on_after(request.timeout_s):
            async with turn:
                result = await bounded(
                    lambda: _host(program).call(program.id, request),
                    timeout_s=inf,
                    late=ToolServerError,
                    doing=f"calling {request.name}",
                )
            observation = self._edge.observation(result, program.output_bytes.get(request.name))
            return replace(observation, queued_s=turn.queued_s)
        return turn.late()

    async def _score(self, program: Program, request: RewardRequest) -> Reward:
        reward = await bounded(
            lambda: _host(program).reward(program.id, request),
            timeout_s=request.timeout_s + GRACE_S,
            late=EnvironmentFailure,
            doing="scoring the episode",
        )
        for name, number in {"value": reward.value, **reward.metrics}.items():
            if not isfinite(number):
                raise EnvironmentFailure(f"reward: {name} is {number}; return a finite number")
        return reward

    def _find(self, program_id: ProgramId) -> Program:
        program = self._programs.get(program_id)
        if program is None:
            raise Refused(
                f"no program {program_id} here: never prepared, released, or its lease ran out", status=404
            )
        return program

    def _known(self, results: ResultLog[T], call_id: str) -> Pending[T] | None:
        pending = results.find(call_id)
        self._counters["repeated_ids"] += pending is not None
        return pending

    def _expire(self, owner: str) -> None:
        programs = [program for program in self._programs.values() if program.owner == owner]
        log.warning("lease of %s ran out: releasing its %d programs", owner, len(programs))
        self._counters["expired_leases"] += 1
        for program in programs:
            self._counters["expired_programs"] += program.phase is not Phase.RELEASING
            program.release()

    def _state_of(self, program: Program, now_s: float) -> ProgramState:
        return ProgramState(
            program_id=program.id,
            owner=program.owner,
            age_s=now_s - program.started_s,
            phase=program.phase.value,
            sandbox=None if program.sandbox is None else self._backend.name,
        )


async def _settle(
    pending: Pending[T], scope: anyio.CancelScope, use: Callable[[], Awaitable[T]], program: Program
) -> None:
    outcome: T | SostenutoError = program.released_error()
    try:
        with scope:
            outcome = await outcome_of(
                lambda: bounded(
                    use, timeout_s=inf, late=SandboxError, broken=SandboxError, doing="using the sandbox"
                )
            )
    finally:
        pending.settle(outcome)


def _host(program: Program) -> Host:
    assert program.host is not None, "a program that was prepared has a host"
    return program.host


def _result_bytes(outcome: ToolResult | SostenutoError) -> int:
    return len(outcome.content.encode()) if isinstance(outcome, ToolResult) else len(str(outcome))


def _reward_bytes(outcome: Reward | SostenutoError) -> int:
    return sum(map(len, outcome.metrics)) if isinstance(outcome, Reward) else len(str(outcome))
