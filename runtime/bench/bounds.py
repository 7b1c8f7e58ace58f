"""What no policy can beat: a program's time alone, and the least mean completion of a workload."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from sostenuto.runtime.simulation.plan import Plan, Workload
from sostenuto.runtime.simulation.profile import EngineProfile, FleetProfile
from sostenuto.types import ProgramId


def alone_s(workload: Workload, engine: EngineProfile) -> dict[ProgramId, float]:
    """Each program's completion on an engine that serves it alone, with all its KV kept between turns."""
    return {plan.id: _path_s(plan, engine, plan.shared_tokens) for plan in workload.programs}


def lower_bound_mean_s(workload: Workload, fleet: FleetProfile) -> float:
    """No schedule has a smaller mean completion: the larger of critical paths and work over capacity.

    The mean is the sum of finishes less the sum of submissions, over the number of programs.  Closed, a
    submission is the finish of another, and the last `concurrency` finishes remain of the difference.
    """
    plans = workload.programs
    paths_s = [_path_s(plan, fleet.engine, 0) for plan in plans]
    finishes_s = [max(pair) for pair in zip(sorted(paths_s), _finishes_s(plans, fleet), strict=True)]
    if workload.concurrency is None:
        total_s = sum(finishes_s) - sum(plan.arrival_s for plan in plans)
    else:
        total_s = sum(finishes_s[-workload.concurrency :])
    return max(sum(paths_s), total_s) / len(plans)


def _path_s(plan: Plan, engine: EngineProfile, shared_to_prefill: int) -> float:
    """The program's steps one after the other, each without a wait."""
    return plan.prepare_s + sum(
        engine.request_s + _prefill_s(new, context, engine) + turn.output_tokens * engine.itl(1) + turn.tool_s
        for turn, (new, context) in zip(plan.turns, _prefills(plan, shared_to_prefill), strict=True)
    )


def _prefills(plan: Plan, shared_to_prefill: int) -> Iterator[tuple[int, int]]:
    """For each turn: new tokens to prefill, and the context that they are the end of."""
    new, context = shared_to_prefill + plan.prompt_tokens, plan.shared_tokens + plan.prompt_tokens
    for turn in plan.turns:
        yield new, context
        new = turn.result_tokens
        context += turn.output_tokens + turn.result_tokens


def _prefill_s(new: int, context: int, engine: EngineProfile) -> float:
    """Each new token attends to all of the context before it."""
    attended = new * (context - new / 2)
    return new / engine.prefill_tokens_s + attended * engine.prefill_s_per_token_squared


def _finishes_s(plans: Sequence[Plan], fleet: FleetProfile) -> list[float]:
    """The k-th finish is no earlier than the k smallest works take on all engines together.

    Engine time is `prefill + decode - overlap * (the lesser)`: the larger of two sums over programs.
    """
    engine, token_s = fleet.engine, _best_token_s(fleet.engine)
    apart = 1 - engine.overlap
    prefill_s = [sum(_prefill_s(*prefill, engine) for prefill in _prefills(plan, 0)) for plan in plans]
    decode_s = [token_s * sum(turn.output_tokens for turn in plan.turns) for plan in plans]
    most_prefill = sorted(p + apart * d for p, d in zip(prefill_s, decode_s, strict=True))
    most_decode = sorted(d + apart * p for p, d in zip(prefill_s, decode_s, strict=True))
    sums = zip(accumulate(most_prefill), accumulate(most_decode), strict=True)
    return [max(pair) / fleet.engines for pair in sums]


def _best_token_s(engine: EngineProfile) -> float:
    """Engine time per generated token in the batch where that is least."""
    return min(engine.itl(n) / n for n in range(1, engine.concurrency + 1))
