"""What one simulated program will do, told to the runtime turn by turn, and what came of it.

The runtime is given synthetic tokens, one of which stands for `grain` tokens of the plan: a context of a
hundred thousand tokens is a list of some thousand numbers.  Engines are simulated with the plan's own tokens,
so that grains round what the scheduler reserves and nothing else.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar
from zlib import crc32

from sostenuto.runtime.simulation.fleet import Fleet
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn
from sostenuto.runtime.simulation.program import turn_limit_tokens
from sostenuto.runtime.simulation.request import Request, Served
from sostenuto.runtime.simulation.results import ProgramResult
from sostenuto.runtime.simulation.tools import SimulatedTools
from sostenuto.runtime.simulation.waits import Waits
from sostenuto.types import EngineId, ProgramId

FIRST_ID = 1 << 16
"""Token ids below it name the tool that a turn asks for; 0: none, the turn answers."""
_IDS = 1 << 30

T = TypeVar("T")


def in_grains(tokens: int, grain: int) -> int:
    """Tokens of the simulation as tokens of the runtime, a part of a grain counted whole.

    Everything that crosses between the two is scaled here: contexts, outputs, pools, turn limits.
    """
    return -(-tokens // grain)


@dataclass(slots=True)
class Stage:
    """What all programs of a run have in common."""

    fleet: Fleet
    tools: SimulatedTools
    waits: Waits
    grain: int
    tool_names: tuple[str, ...]
    scripts: "dict[ProgramId, Script]" = field(default_factory=dict["ProgramId", "Script"])
    """Of programs that are not over."""
    in_motion: int = 0
    """Requests and calls that an engine or the tool server is busy with."""
    seen: set[str] = field(default_factory=set[str])
    """Shared segments that some program has sent before."""

    async def answered(self, ask: Callable[[Callable[[T], None]], None]) -> T:
        """Ask what answers by a call, once, and wait for it."""
        reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def answer(value: T) -> None:
            if not reply.done():
                reply.set_result(value)

        self.in_motion += 1
        try:
            ask(answer)
            return await reply
        finally:
            self.in_motion -= 1


class Script:
    """One program.  Written by the simulated engines and the simulated tool server alone."""

    __slots__ = (
        "_context", "_done", "_grains", "_runnable_s", "_spare_s", "_stage", "_turn", "_waits", "engine_id",
        "is_over", "plan", "result",
    )  # fmt: skip

    def __init__(self, plan: Plan, stage: Stage, now_s: float) -> None:
        self.plan = plan
        self.engine_id: EngineId | None = None
        """Where its last turn was served."""
        self.is_over = False
        self.result = ProgramResult(plan.id, plan.group, plan.group_size, now_s)
        self.result.prompt_tokens = plan.shared_tokens + plan.prompt_tokens
        self._stage = stage
        self._context = self.result.prompt_tokens
        self._grains = 0
        """Of the context, as the runtime has it."""
        self._turn = 0
        self._done = 0
        """Tokens of the turn that requests which were interrupted have sampled."""
        self._runnable_s = now_s
        self._waits = False
        """For an engine."""
        self._spare_s = stage.waits.spare_s(now_s)

    def __repr__(self) -> str:
        return f"<Script {self.plan.id} turn={self._turn} of {len(self.plan.turns)}>"

    @property
    def turn(self) -> PlannedTurn:
        return self.plan.turns[self._turn]

    @property
    def own_id(self) -> int:
        return _token_id(self.plan.id)

    @property
    def turn_limit_grains(self) -> int:
        """The most that any of its turns may add, as a runtime states it for a program."""
        most = max(turn_limit_tokens(turn.output_tokens) for turn in self.plan.turns)
        return in_grains(most, self._stage.grain)

    # ---- its environment ----

    def prepared(self, queue_s: float, now_s: float) -> list[tuple[int, int]]:
        """The first prompt as `(count, id)`: what programs have in common is equal among them."""
        stage, plan, result = self._stage, self.plan, self.result
        result.prepare_s = queue_s + plan.prepare_s
        result.environment_wait_s = stage.waits.spare_s(now_s) - self._spare_s
        result.needed_tokens += plan.prompt_tokens
        for segment in plan.shared:
            if segment.key not in stage.seen:
                stage.seen.add(segment.key)
                result.needed_tokens += segment.tokens
        self._becomes_runnable(now_s)
        return self._prompt()

    def _prompt(self) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        tokens = grains = 0
        for segment in self.plan.shared:
            tokens += segment.tokens
            # Only what fills a grain is in common: the rest of a segment is each program's own.
            runs.append((tokens // self._stage.grain - grains, _token_id(segment.key)))
            grains += runs[-1][0]
        self._grains = max(1, in_grains(self._context, self._stage.grain))
        runs.append((self._grains - grains, self.own_id))
        return runs

    # ---- its turns ----

    def decodes(self, engine_id: EngineId, request_id: str, now_s: float) -> Request:
        result = self.result
        result.moves += self.engine_id is not None and self.engine_id != engine_id
        result.admission_waits_s.append(now_s - self._runnable_s)
        result.context_tokens += self._context
        result.turn_contexts.append(self._context)
        self.engine_id = engine_id
        self._stops_waiting(now_s)
        plan = self.plan
        return Request(request_id, plan.id, plan.shared, self._context, self._left)

    def served(self, served: Served) -> None:
        result = self.result
        result.generated_tokens += served.generated_tokens
        result.prefilled_tokens += served.prefilled_tokens
        result.cached_tokens += served.cached_tokens + served.restored_tokens
        result.decode_s += served.decode_s
        result.prefill_s += served.prefill_s
        result.turn_waits_s.append(result.admission_waits_s[-1] + served.queue_s)

    def sampled(self) -> list[int]:
        """The turn as token ids.  The last one names the tool."""
        turn, stage = self.turn, self._stage
        self.result.turns += 1
        self.is_over = turn.tool is None
        names = 0 if turn.tool is None else 1 + stage.tool_names.index(turn.tool)
        ids = [self.own_id] * self._added(self._left, least=1)
        ids[-1] = names
        self._done = 0
        return ids

    @property
    def _left(self) -> int:
        return max(1, self.turn.output_tokens - self._done)

    def interrupted(self, tokens: int, now_s: float) -> list[int]:
        """What an interrupted request has of the turn; whole grains alone, the rest is sampled again."""
        whole = min(tokens, self._left - 1) // self._stage.grain * self._stage.grain
        self._done += whole
        self._becomes_runnable(now_s)
        return [self.own_id] * self._added(whole, least=0)

    def returned(self, queue_s: float, now_s: float) -> int:
        """How many token ids the result of the turn's tool has."""
        turn, result = self.turn, self.result
        result.tool_s += turn.tool_s
        result.tool_queue_s += queue_s
        result.needed_tokens += turn.result_tokens
        self._turn += 1
        self._becomes_runnable(now_s)
        return self._added(turn.result_tokens, least=0)

    def evicted(self) -> None:
        if not self.is_over:
            self.result.evictions += 1

    def ends(self, failed: str, now_s: float) -> None:
        self._stops_waiting(now_s)
        self.result.failed = failed
        self.result.finished_s = now_s

    def _added(self, tokens: int, *, least: int) -> int:
        """Grains that the context grows by, so that what was rounded up before is not counted again."""
        self._context += tokens
        grains = max(least, in_grains(self._context, self._stage.grain) - self._grains)
        self._grains += grains
        return grains

    def _becomes_runnable(self, now_s: float) -> None:
        self._runnable_s, self._waits = now_s, True
        self._stage.waits.change(now_s, programs=1)

    def _stops_waiting(self, now_s: float) -> None:
        if self._waits:
            self._waits = False
            self._stage.waits.change(now_s, programs=-1)


def _token_id(key: str) -> int:
    return FIRST_ID + crc32(key.encode()) % _IDS
