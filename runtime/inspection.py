"""What a program is doing that others wait for: as the scheduler has it, and as its tool server says."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import anyio

from sostenuto.errors import ToolServerError
from sostenuto.runtime.dispatcher import Dispatcher
from sostenuto.runtime.program import ToolServer
from sostenuto.scheduler.program import Doing
from sostenuto.tools.wire import ProgramState
from sostenuto.types import ProgramId

_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Sighting:
    """Of one program."""

    program: ProgramId
    turn: int
    phase: str
    since_s: float
    """For so long it has been in that phase."""
    tool: str = ""
    """Whose return it waits for."""
    engine: str = ""
    """Where its KV is."""
    sandbox: str = ""
    """What runs it and its rung, and what its tool server says of the program."""

    def __str__(self) -> str:
        parts = [f"{self.program}: turn {self.turn}, {self.phase} for {self.since_s:.0f} s"]
        parts += [f"tool {self.tool}"] if self.tool else []
        parts += [f"engine {self.engine}"] if self.engine else []
        return ", ".join([*parts, f"sandbox: {self.sandbox or 'none'}"])


@runtime_checkable
class Informed(Protocol):
    """A tool server, or several, that can be asked what a program has there."""

    async def state_of(self, program_id: ProgramId) -> ProgramState | None: ...


async def oldest_of(
    dispatcher: Dispatcher, tools: ToolServer, programs: Iterable[ProgramId]
) -> Sighting | None:
    """Of those of the programs that are under way, the one that was submitted first."""
    doing = dispatcher.scheduler.oldest(programs)
    if doing is None:
        return None
    return _seen(doing, anyio.current_time(), await _sandbox_of(tools, doing.program_id))


def _seen(doing: Doing, now_s: float, sandbox: str) -> Sighting:
    return Sighting(
        program=doing.program_id,
        turn=doing.turn,
        phase=str(doing.phase),
        since_s=now_s - doing.since_s,
        tool=doing.tool,
        engine=doing.engine or "",
        sandbox=sandbox,
    )


async def _sandbox_of(tools: ToolServer, program_id: ProgramId) -> str:
    if not isinstance(tools, Informed):
        return ""
    try:
        with anyio.fail_after(_ANSWER_S):
            state = await tools.state_of(program_id)
    except (ToolServerError, TimeoutError) as error:
        return f"its tool server does not answer ({str(error) or 'in time'})"
    if state is None:
        return ""
    rung = f", {state.rung}" if state.rung else ""
    return f"{state.sandbox or 'none'}{rung}; {state.reason}"
