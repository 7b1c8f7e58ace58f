"""The published fall of the hit rate with the working set, beside the simulator's on the same pod.

Published: recorded coding sessions replayed on one pod; hit rates at four ratios of working set to pool.
Here: sessions drawn from the published distributions of such recordings, which have no prefix in common
(a hit rate near zero says that theirs had none).  The working set is the context at the end of a turn,
averaged over turns, times the sessions that run together.

    python -m benchmarks.hit_rate_curve
"""

from dataclasses import replace

import numpy as np

from benchmarks.figure import Figure
from sostenuto.runtime.simulation.distributions import LogNormal
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn, Workload
from sostenuto.runtime.simulation.profile import FleetProfile
from sostenuto.runtime.simulation.profiles import load_profile
from sostenuto.runtime.simulation.workloads import working_set_tokens
from sostenuto.runtime.simulation.world import simulate
from sostenuto.scheduler.policies import make_policy
from sostenuto.types import GroupId, ProgramId

PUBLISHED = {0.45: 0.93, 0.75: 0.73, 0.87: 0.34, 1.18: 0.04}
_BEYOND = (1.0, 1.5, 2.0)
_TOGETHER, _SESSIONS = 32, 128
_FIRST_TOKENS, _PEAK_TOKENS = 19_000, 175_000
_TURNS = LogNormal(45, 0.95, low=5, high=330)
_OUTPUT_TOKENS = LogNormal(215, 1.15, low=1, high=16_384)
_RESULT_TOKENS = LogNormal(265, 1.8, high=32_768)
_GAP_S = LogNormal(12.3, 1.22, high=3_600)


def sessions(seed: int) -> Workload:
    """Closed: the next session begins when one is over."""
    return Workload("coding-sessions", tuple(_session(seed, i) for i in range(_SESSIONS)), _TOGETHER)


def _session(seed: int, number: int) -> Plan:
    rng = np.random.default_rng((seed, number))
    count = int(_TURNS.draw(rng, 1)[0])
    output = np.rint(_OUTPUT_TOKENS.draw(rng, count)).astype(int)
    result = np.rint(_RESULT_TOKENS.draw(rng, count)).astype(int)
    gaps_s: list[float] = _GAP_S.draw(rng, count).tolist()
    context = _FIRST_TOKENS + np.cumsum(output + result)
    kept = max(1, int(np.searchsorted(context, _PEAK_TOKENS)))
    calls = zip(output.tolist(), gaps_s, result.tolist(), strict=True)
    turns = [PlannedTurn(out, "tool", gap_s, appended) for out, gap_s, appended in calls][:kept]
    turns[-1] = PlannedTurn(turns[-1].output_tokens)
    name = f"s{number:03}"
    return Plan(ProgramId(name), GroupId(name), 1, (), _FIRST_TOKENS, tuple(turns))


def without_gaps(workload: Workload) -> Workload:
    """Tools answer at once."""
    programs = [
        replace(plan, turns=tuple(replace(turn, tool_s=0.0) for turn in plan.turns))
        for plan in workload.programs
    ]
    return replace(workload, programs=tuple(programs))


def hit_rate(workload: Workload, ratio: float) -> float:
    """On the pod, with a pool that makes the working set `ratio` times as large."""
    pod = load_profile("pod-h100x2-qwen3-30b")
    pool = round(working_set_tokens(workload) / ratio)
    fleet = FleetProfile(engine=pod.model_copy(update={"kv_tokens": pool}))
    run = simulate(make_policy("request-sticky"), workload, fleet)
    return sum(p.cached_tokens for p in run.programs) / sum(p.context_tokens for p in run.programs)


def main() -> None:
    workload = sessions(seed=1)
    for name, variant in (("gaps", workload), ("no_gaps", without_gaps(workload))):
        for ratio in sorted({*PUBLISHED, *_BEYOND}):
            figure = Figure(
                f"pod_hit_rate_simulated_{name}_at_{ratio:.2f}", hit_rate(variant, ratio), "share"
            )
            print(figure.line(), flush=True)
    for ratio, published in PUBLISHED.items():
        print(Figure(f"pod_hit_rate_published_at_{ratio:.2f}", published, "share").line())


if __name__ == "__main__":
    main()
