"""Sixteen programs of eight turns whose contexts outgrow a small pool, and the same as token ids."""

import math
import random
from dataclasses import dataclass, field, replace

from sostenuto.runtime.simulation.plan import Plan, PlannedTurn, Workload
from sostenuto.scheduler.kv import Segment
from sostenuto.types import GroupId, ProgramId

PROGRAMS, TURNS = 16, 8
_SYSTEM_TOKENS = 256
_PROMPT_TOKENS = (300, 1100)
_OUTPUT_TOKENS = (12, 28)
_RESULT_TOKENS = (80, 240)
_TOOL_S = (0.2, 3.0)
_FIRST_ID, _LAST_ID = 16, 4095


def make_workload(seed: int) -> Workload:
    """All come at once, share a system prompt and nothing else; tool times are log-uniform."""
    dice = random.Random(seed)
    shared = (Segment("system", _SYSTEM_TOKENS),)
    plans = [
        Plan(
            id=ProgramId(f"p{number:02}"),
            group=GroupId(f"g{number:02}"),
            group_size=1,
            shared=shared,
            prompt_tokens=dice.randint(*_PROMPT_TOKENS),
            turns=tuple(_turn(dice, is_last=turn == TURNS - 1) for turn in range(TURNS)),
        )
        for number in range(PROGRAMS)
    ]
    return Workload("sixteen-by-eight", tuple(plans))


def with_other_tool_times(workload: Workload, seed: int, change: float) -> Workload:
    """The same with each tool time longer or shorter by at most `change` of it."""
    dice = random.Random(seed)
    programs = [
        replace(
            plan,
            turns=tuple(
                replace(turn, tool_s=turn.tool_s * (1 + dice.uniform(-change, change))) for turn in plan.turns
            ),
        )
        for plan in workload.programs
    ]
    return replace(workload, programs=tuple(programs))


def _turn(dice: random.Random, *, is_last: bool) -> PlannedTurn:
    output_tokens = dice.randint(*_OUTPUT_TOKENS)
    if is_last:
        return PlannedTurn(output_tokens)
    low, high = (math.log(bound) for bound in _TOOL_S)
    tool_s = math.exp(dice.uniform(low, high))
    return PlannedTurn(output_tokens, "tool", tool_s, dice.randint(*_RESULT_TOKENS))


def working_set_tokens(workload: Workload) -> int:
    """What all programs hold together at the end of each, the system prompt once."""
    private = sum(plan.peak_tokens - plan.shared_tokens for plan in workload.programs)
    return private + workload.programs[0].shared_tokens


def usual_context_tokens(workload: Workload) -> int:
    """The mean context of a turn."""
    contexts: list[int] = []
    for plan in workload.programs:
        context = plan.shared_tokens + plan.prompt_tokens
        for turn in plan.turns:
            contexts.append(context)
            context += turn.output_tokens + turn.result_tokens
    return sum(contexts) // len(contexts)


@dataclass(slots=True)
class Conversation:
    """The token ids of one program, made up as it goes on; its ids come from `seed` and the plan alone."""

    plan: Plan
    seed: int
    token_ids: list[int] = field(init=False)
    _dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._dice = random.Random(f"{self.seed} {self.plan.id}")
        self.token_ids = _ids(random.Random(self.seed), self.plan.shared_tokens)
        self.add_result(self.plan.prompt_tokens)

    def add_result(self, tokens: int) -> None:
        self.token_ids += _ids(self._dice, tokens)


def _ids(dice: random.Random, count: int) -> list[int]:
    return dice.choices(range(_FIRST_ID, _LAST_ID), k=count)
