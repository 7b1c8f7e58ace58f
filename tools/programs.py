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
from functools import partial
from logging import getLogger
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from sostenuto.errors import SostenutoError
from sostenuto.sandbox.protocol import Backend
from sostenuto.tools.books import COUNTERS, Books
from sostenuto.tools.bounded import outcome_of
from sostenuto.tools.config import ServerConfig
from sostenuto.tools.edge import Edge
from sostenuto.tools.host import Hosts
from sostenuto.tools.journal import Journal, Left
from sostenuto.tools.ladder import Ladder
from sostenuto.tools.lifetimes import Lifetime
from sostenuto.tools.metrics import Metrics
from sostenuto.tools.owners import Owners
from sostenuto.tools.phases import Event, Phase
from sostenuto.tools.preparation import GRACE_S, Preparation
from sostenuto.tools.program import Program
from sostenuto.tools.refused import Interrupted, Refused, kind_of
from sostenuto.tools.remains import Logs, Remainder, Remains
from sostenuto.tools.remote.services import Services
from sostenuto.tools.rests import Rest, Standing
from sostenuto.tools.results import Pending, ResultLog
from sostenuto.tools.routing import RoutedHosts
from sostenuto.tools.stock import Stock
from sostenuto.tools.teardown import Teardown
from sostenuto.tools.turns import Turns
from sostenuto.tools.wire import (
    CallRequest,
    Moved,
    Prepared,
    PrepareRequest,
    ResumeRequest,
    Reward,
    RewardRequest,
    State,
)
from sostenuto.tools.work import call_measured, score
from sostenuto.types import ProgramId, SandboxRung, ToolResult

T = TypeVar("T")
log = getLogger(__name__)


@asynccontextmanager
async def open_programs(
    config: ServerConfig,
    backend: Backend,
    hosts: Hosts,
    edge: Edge,
    journal: Journal | None = None,
    metrics: Metrics | None = None,
) -> AsyncGenerator["Programs"]:
    """A table that watches its leases; leaving the block releases every program.

    Without a journal nothing survives the server's death.
    """
    async with anyio.create_task_group() as group:
        books = Books(edge, journal or Journal(None, Left()), metrics or Metrics(None))
        programs = Programs(config, backend, hosts, books, group)
        group.start_soon(programs.watch_leases)
        group.start_soon(programs.forget_remains)
        try:
            yield programs
        finally:
            with anyio.CancelScope(shield=True):
                await programs.close()
            group.cancel_scope.cancel()


class Programs:
    """The table; the only writer of programs and leases."""

    def __init__(
        self, config: ServerConfig, backend: Backend, hosts: Hosts, books: Books, group: TaskGroup
    ) -> None:
        self._config = config
        self._backend = backend
        self._hosts = RoutedHosts(hosts, Turns(config), Services(books.edge.secrets, group))
        self._books = books
        self._journal = journal = books.journal
        self._group = group
        self._programs: dict[ProgramId, Program] = {}
        self._logs = Logs(journal, books.edge, config.results_bytes)
        self._teardown = Teardown(group, config.release_s)
        self._stock = Stock(config, backend, group, self._teardown, journal)
        self._remains = Remains(journal, self._logs, self._stock.forget_soon)
        self._preparation = Preparation(self._hosts, self._stock)
        self._owners = Owners(config.longest_lease_s, journal)
        for owner in self._remains.owners:
            self._owners.begin(owner, config.lease_s)
        self._counters = Counter[str](dict.fromkeys(COUNTERS, 0))
        self._checkpoints = anyio.CapacityLimiter(config.starts_at_once)
        self._closed = False

    async def prepare(self, program_id: ProgramId, request: PrepareRequest) -> Prepared:
        """Prepare a new program.  One whose prepare fails, or is cancelled, is released again."""
        self._enter(request.owner)
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

    async def resume(self, program_id: ProgramId, request: ResumeRequest) -> Prepared:
        """Go on with a program that ended with the server before this one, or refuse it with the reason."""
        self._enter(request.owner)
        program = self._programs.get(program_id)
        if program is None:
            rest = self._remains.rest(program_id, request.owner, request.seen)
            program = self._admit(program_id, request, rest)
            self._counters["resumed"] += 1
        elif program.owner != request.owner or program.phase is Phase.RELEASING:
            raise Refused(f"program {program_id} of {program.owner} is {program.phase} here", status=409)
        return await program.prepared.wait()

    async def call(self, program_id: ProgramId, request: CallRequest) -> ToolResult:
        """Run a tool, or join or repeat what ran under this id."""
        program = self._find(program_id)
        again = isinstance(program, Program) and request.name in program.idempotent
        pending = self._known(program.calls, request.call_id, again=again)
        if pending is None:
            live = self._living(program)
            turn = self._hosts.turns.enter(program_id, request)
            work = partial(call_measured, self._books, live, request, turn)
            what = f"calling {request.name}"
            with turn.given_up_when_refused():
                pending = live.run_recorded(Event.CALL, live.calls, request.call_id, what, work)
            self._counters["calls"] += 1
        return await pending.wait()

    async def reward(self, program_id: ProgramId, request: RewardRequest) -> Reward:
        """Score the episode, or join or repeat what ran under this id."""
        program = self._find(program_id)
        pending = self._known(program.scores, request.call_id, again=False)
        if pending is None:
            live = self._living(program)
            work = partial(score, live, request)
            pending = live.run_recorded(Event.SCORE, live.scores, request.call_id, "scoring", work)
            live.lifetime.score(request.timeout_s + GRACE_S, now_s=anyio.current_time())
            self._counters["scores"] += 1
        return await pending.wait()

    async def release(self, program_id: ProgramId) -> None:
        """Return when the program holds nothing any more; at once when it is not here."""
        if program := self._programs.get(program_id):
            program.release()
            await program.ended.wait()
        self._remains.drop(program_id)

    async def in_sandbox(
        self, program_id: ProgramId, use: Callable[[Ladder], Awaitable[T]], what: str = "using its sandbox"
    ) -> T:
        """What `use` returns; it is cancelled with the one who asked and with the program."""
        return await self._living(self._find(program_id)).use_sandbox(use, what)

    async def move(self, program_id: ProgramId, rung: SandboxRung) -> Moved:
        """Bring the program's sandbox to a rung, or as near to it as it can come back from."""
        live = self._living(self._find(program_id))
        return await live.use_sandbox(lambda ladder: live.rest(ladder, rung), "moving its sandbox")

    async def run_command(self, program_id: ProgramId, run: Callable[[Ladder], Awaitable[T]]) -> T:
        """`in_sandbox` for a command of its shell."""
        return await self._living(self._find(program_id)).run_command(run, "using its sandbox")

    def heartbeat(self, owner: str, lease_s: float) -> None:
        """Renew the lease that all programs of the owner live by."""
        self._enter(owner)
        self._owners.renew(owner, lease_s)

    def state(self) -> State:
        now_s = anyio.current_time()
        programs = tuple(program.state(self._backend.name, now_s) for program in self._programs.values())
        return State(
            programs=programs,
            hosts=self._hosts.count,
            owners=self._owners.left_s(),
            counters={
                **self._counters,
                **self._stock.counters,
                "release_failures": self._teardown.failures,
            },
            queued=sum(self._hosts.turns.waiting().values()),
            leaked=self._teardown.leaked,
            warm=self._stock.waiting(now_s),
            layer_bytes=self._stock.layer_bytes,
        )

    @property
    def warm_bytes(self) -> int:
        """What the sandboxes may take that no program has yet."""
        return self._stock.warm_bytes

    def count(self, event: str, times: int) -> None:
        """Add to a counter what happened before the table was there."""
        self._counters[event] += times

    def check_owner(self, owner: str) -> None:
        """Refuse an owner that a newer epoch of its name has fenced."""
        self._owners.check(owner)

    async def watch_leases(self) -> None:
        """Release, forever, the programs whose owner's lease has run out."""
        await self._owners.watch(self._expire)

    async def forget_remains(self) -> None:
        """Drop what a dead server has left when nobody came for it in time."""
        await anyio.sleep(self._config.results_kept_s)
        self._remains.drop_all()

    async def close(self) -> None:
        """Admit nothing more, release everything, and return when it is gone."""
        self._closed = True
        programs = list(self._programs.values())
        for program in programs:
            program.release()
        for program in programs:
            await program.ended.wait()
        self._remains.drop_all()
        await self._stock.close()
        await self._teardown.settle()

    def _enter(self, owner: str) -> None:
        """Let the owner in, or refuse it; older epochs of its name end here."""
        present = {program.owner for program in self._programs.values()} | self._remains.owners
        for fenced in self._owners.enter(owner, present):
            self._remains.pass_on(fenced, owner)
            self._release_all(fenced, "fenced_programs")

    def _admit(self, program_id: ProgramId, request: PrepareRequest, rest: Rest | None = None) -> Program:
        if self._closed:
            raise Refused("the tool server is stopping", status=503)
        now_s = anyio.current_time()
        program = Program(
            id=program_id,
            owner=request.owner,
            lifetime=Lifetime(
                started_s=now_s,
                used_s=now_s,
                idle_s=request.idle_s or self._config.idle_s,
                max_s=request.max_s or self._config.max_s,
                scoring_s=self._config.scoring_s,
            ),
            calls=self._logs.calls(program_id),
            scores=self._logs.scores(program_id),
            standing=Standing(self._journal, program_id),
        )
        if rest is None:
            self._remains.hand_over(program, continues=request.continues)
        else:
            self._remains.go_on(program)
        self._journal.program_came(program_id, request.owner)
        self._programs[program_id] = program
        self._owners.begin(request.owner, self._config.lease_s)
        self._group.start_soon(self._live, program, request, rest)
        return program

    async def _live(self, program: Program, request: PrepareRequest, rest: Rest | None) -> None:
        outcome: Prepared | SostenutoError = program.released_error()
        try:
            with program.scope:
                result = await outcome_of(partial(self._preparation.run, program, request, rest))
                # A release may have come too late to stop the last step, and stands all the same.
                if program.phase is Phase.PREPARING:
                    outcome = result
                self._book_prepare(program, outcome)
                if isinstance(outcome, Prepared):
                    await self._stay(program, outcome)
        finally:
            await self._end(program)
            self._counters["prepare_failures"] += not isinstance(outcome, Prepared)
            program.prepared.settle(outcome)

    def _book_prepare(self, program: Program, outcome: Prepared | SostenutoError) -> None:
        elapsed_s = anyio.current_time() - program.lifetime.started_s
        if isinstance(outcome, SostenutoError):
            self._books.metrics.prepared(kind_of(outcome), elapsed_s)
            return
        self._books.metrics.declare(tool.name for tool in outcome.tools)
        self._books.metrics.prepared("prepared", elapsed_s)
        log.info("prepared for %s after %.3f s", program.owner, elapsed_s)

    async def _stay(self, program: Program, prepared: Prepared) -> None:
        """Be there for calls until the program is released."""
        program.output_bytes = {tool.name: tool.output_bytes for tool in prepared.tools}
        program.idempotent = frozenset(tool.name for tool in prepared.tools if tool.idempotent)
        async with anyio.create_task_group() as program.tasks:
            program.move(Event.PREPARED)
            if (idle_s := self._config.snapshot_idle_s) is not None:
                program.tasks.start_soon(program.checkpoint_when_idle, idle_s, self._checkpoints)
            self._counters["prepared"] += 1
            program.prepared.settle(prepared)
            await program.outlive()
            log.warning("it has outlived its time, and is released")
            self._counters["outlived_programs"] += 1
            program.release()

    async def _end(self, program: Program) -> None:
        """Give back what the program holds; its environment first, which may still use the sandbox."""
        program.release()
        with anyio.CancelScope(shield=True):
            await program.commands_end()
            if program.host is not None:
                what = f"closing the environment of {program.id}"
                await self._teardown.give_back(what, partial(program.host.release, program.id))
            if program.sandbox is not None:
                await self._teardown.give_back(f"stopping the sandbox of {program.id}", program.sandbox.stop)
        self._journal.program_went(program.id)
        del self._programs[program.id]
        self._counters["released"] += 1
        log.info("released after %.1f s", anyio.current_time() - program.lifetime.started_s)
        program.ended.set()

    def _find(self, program_id: ProgramId) -> Program | Remainder:
        program = self._programs.get(program_id) or self._remains.get(program_id)
        if program is None:
            raise Refused(
                f"no program {program_id} here: never prepared, released, or its lease ran out", status=404
            )
        return program

    def _living(self, program: Program | Remainder) -> Program:
        if isinstance(program, Remainder):
            raise Interrupted(
                f"program {program.id} ended with the tool server that ran it; only results of calls that "
                "had ended are left"
            )
        return program

    def _known(self, results: ResultLog[T], call_id: str, *, again: bool) -> Pending[T] | None:
        """What runs or ran under this id; None to run it, for the first time or, if `again`, once more."""
        pending = results.find(call_id)
        if pending is not None and pending.is_unknown:
            self._counters["unknown_outcomes"] += 1
            return None if again else pending
        self._counters["repeated_ids"] += pending is not None
        return pending

    def _expire(self, owner: str) -> None:
        self._counters["expired_leases"] += 1
        self._release_all(owner, "expired_programs")

    def _release_all(self, owner: str, counter: str) -> None:
        self._remains.drop_of(owner)
        for program in self._programs.values():
            if program.owner == owner:
                self._counters[counter] += program.phase is not Phase.RELEASING
                program.release()
