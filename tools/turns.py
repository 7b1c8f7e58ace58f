"""Calls take turns: `tools.queues` on the event loop, for the programs of one tool server.

- A turn is entered at once or refused at once, waited for with `async with`, and over when the block is.
- Whatever ends a call or its program, its place is free again: leaving twice does nothing.
"""

import asyncio
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import anyio

from sostenuto.errors import SostenutoError
from sostenuto.tools.config import ServerConfig
from sostenuto.tools.machine import budget
from sostenuto.tools.queues import Call, Queues
from sostenuto.tools.wire import CallRequest, ToolSchema
from sostenuto.types import ProgramId, ToolResult, ToolStatus

MEASURE_EVERY_S = 1.0
"""How often a tool's memory is looked at, at the most."""


@dataclass(slots=True, eq=False)
class Turn:
    """One call's; an async context manager that holds the turn within the block."""

    _turns: "Turns"
    _request: CallRequest
    _entered_s: float
    call: Call | None
    """None for a name that is no tool: its refusal needs no turn."""
    _begun: anyio.Event = field(default_factory=anyio.Event)
    _began_s: float | None = None

    @property
    def queued_s(self) -> float:
        """Seconds that it waited, or waits until now; 0 when its turn came at once."""
        if self.call is None:
            return 0.0
        began_s = anyio.current_time() if self._began_s is None else self._began_s
        return began_s - self._entered_s

    async def __aenter__(self) -> Self:
        try:
            if self.call is not None:
                await self._begun.wait()
        except BaseException:
            self.leave()
            raise
        return self

    def begin(self, now_s: float) -> None:
        """Its turn has come."""
        self._began_s = now_s
        self._begun.set()

    @contextmanager
    def given_up_when_refused(self) -> Generator[None]:
        """The block hands the turn on to who will wait for it."""
        try:
            yield
        except SostenutoError:
            self.leave()
            raise

    async def __aexit__(self, *exc: object) -> None:
        self.leave()

    def leave(self) -> None:
        self._turns.leave(self)

    def late(self) -> ToolResult:
        """What the policy reads when the deadline of the request came before the call's own end."""
        name, limit_s = self._request.name, self._request.timeout_s
        queued_s = self.queued_s
        if self._began_s is None and self.call is not None:
            text = f"{name} did not begin: it waited {queued_s:.3g} s for its turn, until its deadline."
            return ToolResult(ToolStatus.TIMEOUT, text, queued_s=queued_s)
        waited = f", {queued_s:.3g} s of which it waited for its turn" if queued_s >= 0.1 else ""
        text = f"{name} was ended after {limit_s:g} s, its deadline{waited}."
        elapsed_s = anyio.current_time() - self._entered_s - queued_s
        return ToolResult(ToolStatus.TIMEOUT, text, elapsed_s=elapsed_s, queued_s=queued_s)


@dataclass(slots=True)
class _Program:
    tools: dict[str, str]
    """By their name for the model, their name among all tools of the server."""
    turns: set[Turn] = field(default_factory=set[Turn])


class Turns:
    """Written in the tool server's loop alone."""

    def __init__(self, config: ServerConfig) -> None:
        self._queues = Queues(
            budget(config), patience_s=config.queue_patience_s, queue_limit=config.queue_limit
        )
        self._programs: dict[ProgramId, _Program] = {}
        self._turns: dict[Call, Turn] = {}
        self._measured_s: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def waiting(self) -> Mapping[str, int]:
        """Calls that wait, by queue; only where any do."""
        return self._queues.waiting()

    def running(self) -> Mapping[str, int]:
        """Calls that run, by queue; only where any do."""
        return self._queues.running()

    def know(self, program_id: ProgramId, environment: str, tools: Sequence[ToolSchema]) -> None:
        """Let the program's calls take turns by what its tools declare."""
        names = {tool.name: f"{environment}.{tool.name}" for tool in tools}
        self._programs[program_id] = _Program(names)
        for tool in tools:
            self._queues.declare(names[tool.name], tool.limits)

    def forget(self, program_id: ProgramId) -> None:
        """Give up the program and every turn of it.  Idempotent."""
        program = self._programs.pop(program_id, None)
        for turn in list(program.turns if program else ()):
            self.leave(turn)

    def enter(self, program_id: ProgramId, request: CallRequest) -> Turn:
        """Let a call wait; Overloaded when too many do."""
        now_s = anyio.current_time()
        program = self._programs.get(program_id)
        tool = program.tools.get(request.name) if program else None
        if program is None or tool is None:
            return Turn(self, request, now_s, None)
        call = self._queues.enter(program_id, tool, request.priority, now_s=now_s)
        turn = self._turns[call] = Turn(self, request, now_s, call)
        program.turns.add(turn)
        self._advance(now_s)
        return turn

    def leave(self, turn: Turn) -> None:
        """The turn is over or given up.  Idempotent."""
        if turn.call is None or self._turns.pop(turn.call, None) is None:
            return
        if program := self._programs.get(ProgramId(turn.call.program_id)):
            program.turns.discard(turn)
        self._queues.leave(turn.call)
        self._advance(anyio.current_time())

    def asks_for_memory(self, program_id: ProgramId, name: str) -> bool:
        """Whether the memory of this call should be looked at."""
        tool = self._tool(program_id, name)
        now_s = anyio.current_time()
        if tool is None or now_s < self._measured_s.get(tool, now_s):
            return False
        self._measured_s[tool] = now_s + MEASURE_EVERY_S
        return True

    def took(self, program_id: ProgramId, name: str, peak_bytes: int) -> None:
        """Say what memory a call took."""
        if tool := self._tool(program_id, name):
            self._queues.measured(tool, peak_bytes)

    def _tool(self, program_id: ProgramId, name: str) -> str | None:
        program = self._programs.get(program_id)
        return program.tools.get(name) if program else None

    def _advance(self, now_s: float) -> None:
        """Begin the calls whose turn has come, and wake up when the next may come by itself."""
        for call in self._queues.start(now_s):
            self._turns[call].begin(now_s)
        if self._timer is not None:
            self._timer.cancel()
        next_s = self._queues.next_s(now_s)
        loop = asyncio.get_running_loop()
        self._timer = None if next_s is None else loop.call_at(next_s, lambda: self._advance(loop.time()))
