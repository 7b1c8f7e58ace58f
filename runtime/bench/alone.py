"""What a program takes on an empty system: the yardstick of slowdowns."""

from sostenuto.runtime.simulation.plan import Plan, Workload
from sostenuto.runtime.simulation.profile import EngineProfile
from sostenuto.types import ProgramId


def alone_s(workload: Workload, engine: EngineProfile) -> dict[ProgramId, float]:
    """Each program's completion where nobody else is and all its KV is kept between turns."""
    return {plan.id: _alone_s(plan, engine) for plan in workload.programs}


def _alone_s(plan: Plan, engine: EngineProfile) -> float:
    """Prefill ends with the first token of a turn; each other token takes the time of a batch of one."""
    seconds = plan.prepare_s
    new = context = plan.shared_tokens + plan.prompt_tokens
    for turn in plan.turns:
        seconds += engine.request_s + engine.prefill_s(new, context)
        seconds += (turn.output_tokens - 1) * engine.itl(1) + turn.tool_s
        new = turn.result_tokens
        context += turn.output_tokens + turn.result_tokens
    return seconds
