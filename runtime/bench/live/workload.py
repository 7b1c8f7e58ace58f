"""Programs for a small engine on a few CPUs: short contexts that cost more to compute again than a turn."""

import numpy as np

from sostenuto.errors import ConfigError
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn, Workload
from sostenuto.scheduler.kv import Segment
from sostenuto.types import GroupId, ProgramId

NAME = "live"
_ALL_TOKENS = 64
_LEAST_PROMPT, _MOST_PROMPT = 400, 800
_LEAST_OUTPUT, _MOST_OUTPUT = 16, 32
_LEAST_RESULT, _MOST_RESULT = 16, 96
_LEAST_TURNS, _MOST_TURNS = 5, 9
_TOOLS = {"read": (0.55, 0.6), "edit": (0.25, 1.2), "test": (0.2, 4.0)}
"""Each tool's share of calls, and its median seconds."""
_SPREAD = 0.6
_LONGEST_S = 16.0


def live_workload(programs: int, *, seed: int, concurrency: int) -> Workload:
    """Closed, without groups.  Program number i depends on `seed` and i alone."""
    for name, count in {"programs": programs, "concurrency": concurrency}.items():
        if count < 1:
            raise ConfigError(f"{name}: {count} are too few; give at least 1")
    return Workload(NAME, tuple(_plan(seed, index) for index in range(programs)), concurrency)


def _plan(seed: int, index: int) -> Plan:
    rng = np.random.default_rng((seed, index))
    turns = int(rng.integers(_LEAST_TURNS, _MOST_TURNS + 1))
    *acting, _ = (_turn(rng) for _ in range(turns))
    answer = PlannedTurn(int(rng.integers(_LEAST_OUTPUT, _MOST_OUTPUT + 1)))
    return Plan(
        id=ProgramId(f"p{index:04d}"),
        group=GroupId(f"g{index:04d}"),
        group_size=1,
        shared=(Segment(f"{NAME}/{seed}", _ALL_TOKENS),),
        prompt_tokens=int(rng.integers(_LEAST_PROMPT, _MOST_PROMPT + 1)),
        turns=(*acting, answer),
    )


def _turn(rng: np.random.Generator) -> PlannedTurn:
    tool = str(rng.choice(list(_TOOLS), p=[share for share, _ in _TOOLS.values()]))
    median_s = _TOOLS[tool][1]
    return PlannedTurn(
        output_tokens=int(rng.integers(_LEAST_OUTPUT, _MOST_OUTPUT + 1)),
        tool=tool,
        tool_s=float(min(_LONGEST_S, median_s * rng.lognormal(0.0, _SPREAD))),
        result_tokens=int(rng.integers(_LEAST_RESULT, _MOST_RESULT + 1)),
    )
