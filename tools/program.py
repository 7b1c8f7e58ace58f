"""One program on the tool server: its phase, its lendings and what its calls came to."""

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger
from math import inf
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from sostenuto.errors import SandboxError, SostenutoError, boundary
from sostenuto.tools.bounded import bounded, outcome_of
from sostenuto.tools.host import Host
from sostenuto.tools.ladder import Ladder
from sostenuto.tools.lifetimes import Lifetime
from sostenuto.tools.phases import Event, Phase, accepts, advance
from sostenuto.tools.refused import Refused
from sostenuto.tools.rests import USED_MEANWHILE, Standing
from sostenuto.tools.results import Pending, ResultLog
from sostenuto.tools.wire import Moved, Prepared, ProgramState, Reward
from sostenuto.types import ProgramId, SandboxRung, ToolResult

T = TypeVar("T")
log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Running:
    """A request under way."""

    what: str
    since_s: float


@dataclass(slots=True, eq=False)
class Program:
    """Written by the program table alone; all that runs for it runs in `tasks`, within `scope`."""

    id: ProgramId
    owner: str
    lifetime: Lifetime
    calls: ResultLog[ToolResult]
    scores: ResultLog[Reward]
    standing: Standing
    phase: Phase = Phase.PREPARING
    recorded: int = 0
    """Calls and scores under way."""
    running: list[Running] = field(default_factory=list[Running])
    """All requests under way, the oldest first."""
    host: Host | None = None
    sandbox: Ladder | None = None
    output_bytes: dict[str, int | None] = field(default_factory=dict[str, "int | None"])
    """Cap of each tool's observations."""
    idempotent: frozenset[str] = frozenset()
    """Tools that may be run again when nobody knows how far they came."""
    prepared: Pending[Prepared] = field(default_factory=Pending[Prepared])
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    tasks: TaskGroup | None = None
    commands: dict[anyio.CancelScope, None] = field(default_factory=dict[anyio.CancelScope, None])
    """Those of the shell that run in the tasks of who asked for them."""
    ended: anyio.Event = field(default_factory=anyio.Event)

    def move(self, event: Event) -> None:
        self.phase = advance(self.phase, event)

    def release(self) -> None:
        """Cancel all that runs for the program; its own task then gives back what it holds."""
        self.move(Event.RELEASE)
        self.scope.cancel()
        for scope in self.commands:
            scope.cancel()

    @contextmanager
    def busy(self, what: str) -> Generator[None]:
        """A request is under way within the block."""
        running = Running(what, anyio.current_time())
        self.running.append(running)
        self.lifetime.used_s = running.since_s
        try:
            yield
        finally:
            self.running.remove(running)
            self.lifetime.used_s = anyio.current_time()

    def run_recorded(
        self, event: Event, log: ResultLog[T], call_id: str, what: str, work: Callable[[], Awaitable[T]]
    ) -> Pending[T]:
        """Run `work` under a new id, whether or not anyone goes on waiting for it."""
        if not accepts(self.phase, event) or self.tasks is None:
            raise Refused(f"program {self.id}: {event} refused while it is {self.phase}", status=409)
        self.move(event)
        self.recorded += 1
        pending = log.open(call_id)
        self.tasks.start_soon(self._record, log, call_id, what, work)
        return pending

    async def _record(
        self, log: ResultLog[T], call_id: str, what: str, work: Callable[[], Awaitable[T]]
    ) -> None:
        async def run() -> T:
            await self.standing.changes_by(f"it was {what}")
            await log.starts(call_id)
            return await work()

        outcome: T | SostenutoError = self.released_error()
        try:
            with self.busy(what):
                outcome = await outcome_of(run)
        finally:
            log.close(call_id, outcome)
            self.recorded -= 1
            if not self.recorded:
                self.move(Event.IDLE)

    async def rest(self, ladder: Ladder, rung: SandboxRung) -> Moved:
        """Move its sandbox; where that is snapshotted, write down what the program goes on from."""
        began_s = anyio.current_time()
        reached, why_not = await ladder.move(rung), ""
        if reached is SandboxRung.SNAPSHOTTED:
            why_not = await self._written_down(ladder)
        return Moved(rung=reached, elapsed_s=anyio.current_time() - began_s, ends_with_server=why_not)

    async def _written_down(self, ladder: Ladder) -> str:
        """Why not; or nothing."""
        if self.recorded or self.host is None:
            return USED_MEANWHILE
        return await self.standing.write(self.host, ladder)

    async def checkpoint_when_idle(self, idle_s: float, limiter: anyio.CapacityLimiter) -> None:
        """Snapshot its sandbox, and write down what it goes on from, whenever it was not used for so long."""
        seen = -1
        while True:
            unused_s = anyio.current_time() - self.lifetime.used_s
            if self.running or unused_s < idle_s:
                await anyio.sleep(idle_s if self.running else idle_s - unused_s)
                continue
            if self.standing.changes != seen:
                seen = self.standing.changes
                async with limiter:
                    why_not = await self._checkpoint()
                if why_not:
                    log.info("it ends with its server: %s", why_not)
                    return
            await anyio.sleep(idle_s)

    async def _checkpoint(self) -> str:
        """Why there is no use in trying again; or nothing."""
        if self.sandbox is None:
            return "it has no sandbox"
        try:
            why_not = await self._written_down(self.sandbox) if await self.sandbox.checkpoint() else ""
        except SostenutoError as error:
            log.warning("its sandbox could not be snapshotted: %s", error)
            return ""
        return "" if why_not == USED_MEANWHILE else why_not

    async def use_sandbox(self, use: Callable[[Ladder], Awaitable[T]], what: str) -> T:
        """What `use` returns; it is cancelled with the one who asked and with the program."""
        tasks, sandbox = self._living()
        pending, scope = Pending[T](), anyio.CancelScope()
        tasks.start_soon(self._settle, pending, scope, partial(use, sandbox))
        try:
            with self.busy(what):
                return await pending.wait()
        finally:
            scope.cancel()

    async def _settle(
        self, pending: Pending[T], scope: anyio.CancelScope, use: Callable[[], Awaitable[T]]
    ) -> None:
        outcome: T | SostenutoError = self.released_error()
        try:
            with scope:
                outcome = await outcome_of(
                    lambda: bounded(
                        use, timeout_s=inf, late=SandboxError, broken=SandboxError, doing="using the sandbox"
                    )
                )
        finally:
            pending.settle(outcome)

    async def run_command(self, run: Callable[[Ladder], Awaitable[T]], what: str) -> T:
        """`use_sandbox` without a task of its own, which would take as long as a short command does.

        For what bears a task's own cancellation, from which no scope shields it.
        """
        _, sandbox = self._living()
        with anyio.CancelScope() as scope:
            self.commands[scope] = None
            try:
                with self.busy(what), boundary(SandboxError, "using the sandbox"):
                    return await run(sandbox)
            finally:
                del self.commands[scope]
        raise self.released_error()

    async def commands_end(self) -> None:
        """Return when no command runs any more; they have been cancelled."""
        while self.commands:  # noqa: ASYNC110 - rare, and over within a few turns of the loop
            await anyio.sleep(0.001)

    def _living(self) -> tuple[TaskGroup, Ladder]:
        if self.sandbox is None or self.tasks is None or self.phase is Phase.RELEASING:
            raise Refused(f"program {self.id}, {self.phase}, has no sandbox to use", status=409)
        return self.tasks, self.sandbox

    async def outlive(self) -> None:
        """Return when the program has lived too long."""
        lifetime, now_s = self.lifetime, anyio.current_time()
        while (ends_s := lifetime.ends_s(busy=bool(self.running))) > now_s:
            # What ends a request begins a new time to be idle.
            await anyio.sleep_until(min(ends_s, now_s + lifetime.idle_s))
            now_s = anyio.current_time()

    def reason(self, now_s: float) -> str:
        """Why the program is here, in words."""
        if self.running and self.phase is not Phase.RELEASING:
            oldest, others = self.running[0], len(self.running) - 1
            more = f", and {others} more" if others else ""
            return f"{oldest.what} for {now_s - oldest.since_s:.1f} s{more}"
        return f"{self.phase} for {now_s - self.lifetime.used_s:.1f} s"

    def state(self, backend: str, now_s: float) -> ProgramState:
        """What there is to see of it."""
        ends_s = self.lifetime.ends_s(busy=bool(self.running))
        return ProgramState(
            program_id=self.id,
            owner=self.owner,
            age_s=now_s - self.lifetime.started_s,
            left_s=ends_s - now_s,
            phase=self.phase.value,
            reason=self.reason(now_s),
            sandbox=None if self.sandbox is None else backend,
            rung=None if self.sandbox is None else self.sandbox.rung,
        )

    def released_error(self) -> Refused:
        return Refused(f"program {self.id} was released before this came to an end", status=410)
