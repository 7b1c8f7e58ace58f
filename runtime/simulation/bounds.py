"""What no scheduler can beat: bounds below for task completion and makespan, from the workload alone.

Each program's critical path is what it takes on an empty system: its environment, its new tokens at the
full prefill rate, its output at the shortest time between tokens, its tools without a queue.  A prefix
that several programs have in common is prefilled by one of them at the least.

Work is conserved: by the time that j programs are over, each resource has done the work of j programs,
and so at the least that of the j with the least of it.  Resources are the engines (prefill and decoding,
beside each other as far as the profile lets them overlap; nobody decodes faster than the best batch),
each rate-limited tool, and the making of environments.  So W(j) = max over resources is no later than the
j-th program's end.

In a closed workload of N programs and concurrency c, a program is submitted when another ends.  All
submissions but the first c cancel against the ends that made them, and the sum of all completion times is
exactly the sum of the c latest ends, so at least W(N-c+1) + ... + W(N): for long runs, Little's law at the
most throughput that there is.  In an open one it is the sum of all ends less the sum of all arrivals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sostenuto.runtime.simulation.plan import Plan, Workload
from sostenuto.runtime.simulation.profile import EngineProfile, FleetProfile

Loads = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bound:
    mean_completion_s: float
    makespan_s: float
    critical_path_s: float
    """Mean over the programs."""
    work_s: float
    """Of the resource that has the most to do, all its places working without a break."""


@dataclass(frozen=True, slots=True)
class _Path:
    """What one program takes on an empty system."""

    prefill_s: float
    decode_s: float
    other_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s + self.other_s


def lower_bound(workload: Workload, fleet: FleetProfile) -> Bound:
    """For engines that do not fail, and programs that all go to their end."""
    plans = workload.programs
    paths = [_path(plan, fleet.engine) for plan in plans]
    common_s = _common_tokens(workload) / fleet.engine.prefill_tokens_s
    path_s = np.array([path.total_s for path in paths])
    ends_s = _earliest_ends(workload, fleet, paths, common_s)
    live = min(workload.concurrency or len(plans), len(plans))
    arrivals_s = np.array([0.0 if workload.concurrency else plan.arrival_s for plan in plans])
    critical_s = float(path_s.sum() + common_s) / len(plans)
    queueing_s = float(ends_s[-live:].sum() - arrivals_s.sum()) / len(plans)
    return Bound(
        mean_completion_s=max(critical_s, queueing_s),
        makespan_s=float(
            max(ends_s[-1], (arrivals_s + path_s).max(), _turnover_s(workload, path_s, common_s))
        ),
        critical_path_s=critical_s,
        work_s=float(ends_s[-1]),
    )


def _path(plan: Plan, engine: EngineProfile) -> _Path:
    new = context = plan.prompt_tokens
    context += plan.shared_tokens
    prefill_s = decode_s = other_s = 0.0
    for turn in plan.turns:
        prefill_s += engine.prefill_s(new, context)
        decode_s += (turn.output_tokens - 1) * _shortest_itl_s(engine)
        other_s += engine.request_s + turn.tool_s
        new = turn.result_tokens
        context += turn.output_tokens + new
    return _Path(prefill_s, decode_s, other_s + plan.prepare_s)


def _common_tokens(workload: Workload) -> int:
    return sum({s.key: s.tokens for plan in workload.programs for s in plan.shared}.values())


def _earliest_ends(workload: Workload, fleet: FleetProfile, paths: Sequence[_Path], common_s: float) -> Loads:
    """W(1) ... W(N)."""
    engine = fleet.engine
    places = min(engine.concurrency, workload.concurrency or len(workload.programs))
    batch_s = min(engine.itl(n) / n for n in range(1, places + 1))
    prefill_s = _least_work([path.prefill_s for path in paths])
    prefill_s[-1] += common_s
    decode_s = _least_work([path.decode_s for path in paths]) * batch_s / _shortest_itl_s(engine)
    both_s = prefill_s + decode_s - engine.overlap * np.minimum(prefill_s, decode_s)
    prepare_s = _least_work([plan.prepare_s for plan in workload.programs])
    tools = [
        _least_work([_tool_s(plan, tool) for plan in workload.programs]) / limit
        for tool, limit in workload.tool_concurrency.items()
    ]
    return np.max([both_s / fleet.engines, prepare_s / fleet.tools.prepare_concurrency, *tools], axis=0)


def _least_work(loads: Sequence[float]) -> Loads:
    """Of the j programs with the least of it, for j = 1 ... N."""
    return np.cumsum(np.sort(np.array(loads)))


def _shortest_itl_s(engine: EngineProfile) -> float:
    return min(seconds for _, seconds in engine.itl_s)


def _tool_s(plan: Plan, tool: str) -> float:
    return sum(turn.tool_s for turn in plan.turns if turn.tool == tool)


def _turnover_s(workload: Workload, path_s: Loads, common_s: float) -> float:
    """So many programs at a time, each for its path at the least."""
    if workload.concurrency is None:
        return 0.0
    return float(path_s.sum() + common_s) / workload.concurrency
