"""Runs written by hand, for tests of measures and reports."""

from collections.abc import Mapping

from sostenuto.runtime.simulation.results import EngineResult, ProgramResult, RunResult, Stretch
from sostenuto.types import GroupId, ProgramId


def program(
    name: str,
    *,
    start_s: float = 0.0,
    end_s: float = 10.0,
    group: str = "",
    prompt_tokens: int = 100,
    waits_s: tuple[float, ...] = (1.0,),
    failed: str = "",
    reasons_s: Mapping[str, float] | None = None,
) -> ProgramResult:
    """One that waited `waits_s` before its turns, sent its prompt each time and recomputed 30 tokens."""
    return ProgramResult(
        id=ProgramId(name),
        group=GroupId(group or name),
        group_size=1,
        submitted_s=start_s,
        finished_s=end_s,
        failed=failed,
        turns=len(waits_s),
        prompt_tokens=prompt_tokens,
        context_tokens=prompt_tokens * len(waits_s),
        needed_tokens=70,
        prefilled_tokens=100,
        cached_tokens=300,
        turn_contexts=[prompt_tokens] * len(waits_s),
        turn_waits_s=list(waits_s),
        admission_waits_s=[wait_s / 2 for wait_s in waits_s],
        environment_wait_s=1.0,
        prepare_s=4.0,
        sandbox_s=20.0,
        moves=1,
        evictions=2,
        waits_by_reason_s=dict(reasons_s or {"kv": 2.0, "tool": 1.0}),
        stretches=[
            Stretch("preparing", start_s, start_s + 1),
            Stretch("reasoning", start_s + 1, start_s + 3, "e0"),
            Stretch("acting", start_s + 3, end_s),
        ],
    )


def run_of(
    *programs: ProgramResult,
    policy: str = "ours",
    seed: int = 1,
    makespan_s: float = 100.0,
    settings: Mapping[str, str] | None = None,
) -> RunResult:
    """On two engines, of which one idled for 30 seconds while work waited."""
    engines = [
        EngineResult("e0", 1000, idle_with_work_waiting_s=30.0, prefilled_tokens=100, cached_tokens=200),
        EngineResult("e1", 1000, prefilled_tokens=100, cached_tokens=0),
    ]
    for engine in engines:
        engine.used_tokens = [(0.0, 500.0), (50.0, 1000.0)]
        engine.decoding = [(0.0, 2.0), (60.0, 0.0)]
    return RunResult(
        policy=policy,
        workload="swe-light",
        fleet="pod x 2",
        seed=seed,
        makespan_s=makespan_s,
        programs=list(programs),
        engines=engines,
        waiting=[(0.0, 1.0), (10.0, 0.0)],
        settings=dict(settings or {"ratio": "2"}),
    )


def even_run(policy: str, seed: int, mean_s: float, settings: Mapping[str, str] | None = None) -> RunResult:
    """Four programs around a mean completion."""
    ends_s = (mean_s - 2, mean_s - 1, mean_s + 1, mean_s + 2)
    programs = [program(f"p{i}", end_s=end_s, waits_s=(1.0, float(i))) for i, end_s in enumerate(ends_s)]
    return run_of(*programs, policy=policy, seed=seed, settings=settings)
