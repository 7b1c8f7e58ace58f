"""The measures of one run.  Nothing here knows whether the run was simulated or live."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sostenuto.runtime.simulation.results import ProgramResult, RunResult
from sostenuto.types import GroupId, ProgramId

UNKNOWN = float("nan")
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers.  NaN: not known, such as a bound that the policy does not compute.

    Times of completion are over the programs that went to their end; `failed` counts the others.
    """

    policy: str
    workload: str
    fleet: str
    seed: int
    settings: Mapping[str, str]
    programs: int
    failed: int
    makespan_s: float
    completion_mean_s: float
    completion_p50_s: float
    completion_p90_s: float
    completion_p99_s: float
    tasks_per_hour: float
    slowdown_mean: float
    """Completion over the program's time alone on an empty system."""
    slowdown_p90: float
    group_completion_mean_s: float
    """From a group's first submission to its last finish; groups with all members finished."""
    group_completion_p90_s: float
    hit_rate: float
    """Of the tokens sent to engines: those that were in their cache."""
    recomputed_tokens: int
    idle_with_work_waiting_s: float
    """Summed over engines: nothing ran while a program waited for an engine."""
    idle_with_work_waiting_share: float
    """Of all engines' time."""
    worst_turn_wait_s: float
    worst_admission_wait_s: float
    admission_bound_s: float
    """The longest admission wait that the policy allowed itself."""
    slowdown_jain: float
    """1: all programs were slowed down alike; 1/n: one program bore it all."""
    prompt_wait_correlation: float
    """Over programs: tokens of the first prompt, and the wait of the first turn."""
    context_wait_correlation: float
    """Over turns: the tokens sent, and the wait."""
    sandbox_s: float
    environment_wait_s: float
    """Summed over programs: nothing was missing but the environment."""
    hidden_by_prefetch_share: float
    """Of the time that making environments took: what no program waited for alone."""
    peak_sandbox_bytes: int
    peak_disk_bytes: int
    peak_sandboxes: int
    evictions: int
    forced_moves: int
    """Turns on another engine than the one before."""
    waits_by_reason_s: Mapping[str, float]
    lower_bound_mean_s: float
    """No schedule has a smaller mean completion."""
    events: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A run and its measures: what reports are made of."""

    run: RunResult
    summary: Summary


def summarize(
    run: RunResult, alone_s: Mapping[ProgramId, float] | None = None, *, lower_bound_mean_s: float = UNKNOWN
) -> Summary:
    """All measures of `run`.  `alone_s`: each program's time on an empty system; slowdowns need it."""
    ended = [program for program in run.programs if program_ended(program)]
    completions_s = [program.completion_s for program in ended]
    groups_s = group_completions_s(run.programs)
    slowdowns = slowdowns_of(ended, alone_s or {})
    cached = sum(engine.cached_tokens for engine in run.engines)
    prefilled = sum(engine.prefilled_tokens for engine in run.engines)
    idle_s = sum(engine.idle_with_work_waiting_s for engine in run.engines)
    prepare_s = sum(program.prepare_s for program in run.programs)
    environment_wait_s = sum(program.environment_wait_s for program in run.programs)
    return Summary(
        policy=run.policy,
        workload=run.workload,
        fleet=run.fleet,
        seed=run.seed,
        settings=dict(run.settings),
        programs=len(run.programs),
        failed=len(run.programs) - len(ended),
        makespan_s=run.makespan_s,
        completion_mean_s=mean(completions_s),
        completion_p50_s=percentile(completions_s, 50),
        completion_p90_s=percentile(completions_s, 90),
        completion_p99_s=percentile(completions_s, 99),
        tasks_per_hour=_ratio(len(ended) * _HOUR_S, run.makespan_s),
        slowdown_mean=mean(slowdowns),
        slowdown_p90=percentile(slowdowns, 90),
        group_completion_mean_s=mean(groups_s),
        group_completion_p90_s=percentile(groups_s, 90),
        hit_rate=_ratio(cached, cached + prefilled),
        recomputed_tokens=sum(program.recomputed_tokens for program in run.programs),
        idle_with_work_waiting_s=idle_s,
        idle_with_work_waiting_share=_ratio(idle_s, run.makespan_s * len(run.engines)),
        worst_turn_wait_s=_worst(program.turn_waits_s for program in run.programs),
        worst_admission_wait_s=_worst(program.admission_waits_s for program in run.programs),
        admission_bound_s=run.worst_bound_s,
        slowdown_jain=jain(slowdowns),
        prompt_wait_correlation=_first_turns(run.programs),
        context_wait_correlation=_all_turns(run.programs),
        sandbox_s=sum(program.sandbox_s for program in run.programs),
        environment_wait_s=environment_wait_s,
        hidden_by_prefetch_share=1 - _ratio(environment_wait_s, prepare_s),
        peak_sandbox_bytes=run.peak_sandbox_bytes,
        peak_disk_bytes=run.peak_disk_bytes,
        peak_sandboxes=run.peak_sandboxes,
        evictions=sum(program.evictions for program in run.programs),
        forced_moves=sum(program.moves for program in run.programs),
        waits_by_reason_s=_waits_by_reason_s(run.programs),
        lower_bound_mean_s=lower_bound_mean_s,
        events=run.events,
        wall_s=run.wall_s,
    )


def program_ended(program: ProgramResult) -> bool:
    """Whether the program went to the end of its plan."""
    return not program.failed and math.isfinite(program.finished_s)


def group_completions_s(programs: Sequence[ProgramResult]) -> list[float]:
    """For each group with all members finished: from its first submission to its last finish."""
    members: dict[GroupId, list[ProgramResult]] = {}
    for program in programs:
        members.setdefault(program.group, []).append(program)
    return [
        max(p.finished_s for p in group) - min(p.submitted_s for p in group)
        for group in members.values()
        if all(program_ended(p) for p in group)
    ]


def slowdowns_of(programs: Sequence[ProgramResult], alone_s: Mapping[ProgramId, float]) -> list[float]:
    """Completion over time alone, of the programs whose time alone is known."""
    return [p.completion_s / alone_s[p.id] for p in programs if alone_s.get(p.id)]


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: from 1/n to 1."""
    return _ratio(sum(values) ** 2, len(values) * sum(value * value for value in values))


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Pearson's; NaN where one side does not vary."""
    if len(xs) < 2 or min(xs) == max(xs) or min(ys) == max(ys):
        return UNKNOWN
    return float(np.corrcoef(xs, ys)[0, 1])


def mean(values: Sequence[float]) -> float:
    return _ratio(sum(values), len(values))


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else UNKNOWN


def _first_turns(programs: Sequence[ProgramResult]) -> float:
    served = [program for program in programs if program.turn_waits_s]
    return correlation([p.prompt_tokens for p in served], [p.turn_waits_s[0] for p in served])


def _all_turns(programs: Sequence[ProgramResult]) -> float:
    pairs = [pair for p in programs for pair in zip(p.turn_contexts, p.turn_waits_s, strict=False)]
    return correlation([tokens for tokens, _ in pairs], [wait_s for _, wait_s in pairs])


def _waits_by_reason_s(programs: Sequence[ProgramResult]) -> dict[str, float]:
    summed: dict[str, float] = {}
    for program in programs:
        for reason, waited_s in program.waits_by_reason_s.items():
            summed[reason] = summed.get(reason, 0.0) + waited_s
    return dict(sorted(summed.items()))


def _worst(waits_s: Iterable[Sequence[float]]) -> float:
    return max((wait_s for waits in waits_s for wait_s in waits), default=UNKNOWN)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else UNKNOWN
