"""One program on the tool server: its phase, its lendings and what its calls came to."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from sostenuto.errors import SostenutoError
from sostenuto.sandbox.protocol import Sandbox
from sostenuto.tools.bounded import outcome_of
from sostenuto.tools.host import Host
from sostenuto.tools.phases import Event, Phase, accepts, advance
from sostenuto.tools.refused import Refused
from sostenuto.tools.results import Pending, ResultLog
from sostenuto.tools.wire import Prepared, Reward
from sostenuto.types import ProgramId, ToolResult

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Program:
    """Written by the program table alone; all that runs for it runs in `tasks`, within `scope`."""

    id: ProgramId
    owner: str
    started_s: float
    calls: ResultLog[ToolResult]
    scores: ResultLog[Reward]
    phase: Phase = Phase.PREPARING
    running: int = 0
    """Calls and scores."""
    host: Host | None = None
    sandbox: Sandbox | None = None
    output_bytes: dict[str, int | None] = field(default_factory=dict[str, "int | None"])
    """Cap of each tool's observations."""
    prepared: Pending[Prepared] = field(default_factory=Pending[Prepared])
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    tasks: TaskGroup | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)

    def move(self, event: Event) -> None:
        self.phase = advance(self.phase, event)

    def release(self) -> None:
        """Cancel all that runs for the program; its own task then gives back what it holds."""
        self.move(Event.RELEASE)
        self.scope.cancel()

    def run_recorded(
        self, event: Event, log: ResultLog[T], call_id: str, work: Callable[[], Awaitable[T]]
    ) -> Pending[T]:
        """Run `work` under a new id, whether or not anyone goes on waiting for it."""
        if not accepts(self.phase, event) or self.tasks is None:
            raise Refused(f"program {self.id}: {event} refused while it is {self.phase}", status=409)
        self.move(event)
        self.running += 1
        pending = log.open(call_id)
        self.tasks.start_soon(self._record, log, call_id, work)
        return pending

    async def _record(self, log: ResultLog[T], call_id: str, work: Callable[[], Awaitable[T]]) -> None:
        outcome: T | SostenutoError = self.released_error()
        try:
            outcome = await outcome_of(work)
        finally:
            log.close(call_id, outcome)
            self.running -= 1
            if not self.running:
                self.move(Event.IDLE)

    def released_error(self) -> Refused:
        return Refused(f"program {self.id} was released before this came to an end", status=410)
