"""Policies beside each other in simulation: every figure of task completion time."""

from itertools import product
from statistics import fmean

from benchmarks.figure import Tell
from benchmarks.scheduling_cells import (
    CLOSED,
    CODE,
    COMPARED,
    GROUPS,
    HONEST,
    OPEN,
    OTHERS,
    OURS,
    PAPER,
    Load,
    Runs,
)
from sostenuto.runtime.bench.cells import CLAIRVOYANT, Pool
from sostenuto.runtime.bench.intervals import mean_interval

RATIOS = (1.2, 2.0, 3.0)
BELOW = 0.5
_A_WAY = 1.02
"""Nearer to the endless pool than that, there is nothing to close."""
_THUNDERAGENT = (*CODE, PAPER)


def measure_below_the_knee(runs: Runs, tell: Tell) -> None:
    """Where everything fits, nobody may be slower than any baseline."""
    baselines = (HONEST, *_THUNDERAGENT, *OTHERS)
    runs.run(CLOSED, [BELOW], (OURS, *baselines))
    for load in CLOSED:
        best = runs.best_of(load, BELOW, baselines)
        share = runs.mean(load, BELOW, OURS) / runs.mean(load, BELOW, best)
        tell(f"{load.name} at {BELOW:g}: mean completion over the best baseline", share, "ratio", "<= 1.01")


def measure_past_the_knee(runs: Runs, tell: Tell) -> None:
    for load in (*CLOSED, *OPEN, *GROUPS):
        runs.run([load], [Pool.ENDLESS], [HONEST])
        others = OTHERS if load.arrivals_per_hour is None else ()
        runs.run([load], RATIOS, (*COMPARED, CLAIRVOYANT, *load.caps, *others))
        for ratio in RATIOS:
            _tell_place(runs, load, ratio, tell)


def _tell_place(runs: Runs, load: Load, ratio: float, tell: Tell) -> None:
    place = f"{load.name} at {ratio:g}"
    ours, endless = runs.mean(load, ratio, OURS), runs.endless_s(load)
    interval = mean_interval([s.completion_mean_s for s in runs.of(load, ratio, OURS)])
    tell(f"{place}: mean completion", ours, "s")
    tell(f"{place}: half of its 95 % interval over orders", interval.high - interval.mean, "s")
    tell(f"{place}: endless pool", endless, "s")
    tell(f"{place}: lower bound", runs.mean(load, ratio, OURS, "lower_bound_mean_s"), "s")
    for policy in (HONEST, *_THUNDERAGENT, *(OTHERS if load.arrivals_per_hour is None else ())):
        tell(f"{place}: {policy}", runs.mean(load, ratio, policy), "s")
    cap = runs.best_of(load, ratio, load.caps)
    tell(f"{place}: best cap ({cap})", runs.mean(load, ratio, cap), "s")
    _tell_closed(runs, load, ratio, tell)
    tell(f"{place}: over the best cap", ours / runs.mean(load, ratio, cap), "ratio", "<= 1")
    clairvoyant = runs.mean(load, ratio, CLAIRVOYANT)
    tell(f"{place}: over the same with true tool times", ours / clairvoyant, "ratio", "<= 1.15")
    _tell_groups(runs, load, ratio, tell)
    _tell_waits(runs, load, ratio, cap, tell)


def _tell_closed(runs: Runs, load: Load, ratio: float, tell: Tell) -> None:
    """The share of the way from ThunderAgent to the endless pool."""
    place = f"{load.name} at {ratio:g}"
    ours, endless = runs.mean(load, ratio, OURS), runs.endless_s(load)
    for name, variants in (("ThunderAgent's code", CODE), ("any ThunderAgent", _THUNDERAGENT)):
        theirs = runs.mean(load, ratio, runs.best_of(load, ratio, variants))
        tell(f"{place}: way from {name} to the endless pool", theirs / endless - 1, "of the latter")
        if theirs > _A_WAY * endless:
            share = (theirs - ours) / (theirs - endless)
            tell(f"{place}: closed of the way from {name} to the endless pool", share, "share", ">= 0.5")


def _tell_groups(runs: Runs, load: Load, ratio: float, tell: Tell) -> None:
    if load.workload == "remote-tools":
        return
    measure = "group_completion_mean_s"
    baselines = (HONEST, *_THUNDERAGENT, *load.caps)
    best = min(runs.mean(load, ratio, policy, measure) for policy in baselines)
    share = runs.mean(load, ratio, OURS, measure) / best
    tell(f"{load.name} at {ratio:g}: group completion over the best baseline", share, "ratio", "<= 0.9")


def _tell_waits(runs: Runs, load: Load, ratio: float, cap: str, tell: Tell) -> None:
    place, wait = f"{load.name} at {ratio:g}", "worst_turn_wait_s"
    ours = runs.worst(load, ratio, OURS, wait)
    tell(f"{place}: worst wait of a turn", ours, "s")
    theirs = runs.best_of(load, ratio, _THUNDERAGENT)
    target = ("<= 0.25", "<= 0.5") if ratio == 2 else (None, None)
    over = ours / runs.worst(load, ratio, theirs, wait)
    tell(f"{place}: worst wait over that of {theirs}", over, "ratio", target[0])
    tell(
        f"{place}: worst wait over that of {cap}",
        ours / runs.worst(load, ratio, cap, wait),
        "ratio",
        target[1],
    )
    over = max(s.worst_admission_wait_s / s.admission_bound_s for s in runs.of(load, ratio, OURS))
    tell(f"{place}: worst admission wait over its bound", over, "ratio", "<= 1")
    correlation = runs.mean(load, ratio, OURS, "context_wait_correlation")
    tell(f"{place}: size and wait, correlation, distance from 0", abs(correlation), "r", "<= 0.2")


def measure_throughput(runs: Runs, tell: Tell) -> None:
    """Tasks per hour where request-level scheduling thrashes, while 128 programs are in the system."""
    for load, ratio in product((Load("swe-light", 320, 128), Load("swe-heavy", 256, 128)), (3.0, 4.0)):
        runs.run([load], [ratio], (OURS, HONEST))
        ours, theirs = (_mean_rate(runs, load, ratio, policy) for policy in (OURS, HONEST))
        place = f"{load.name} at {ratio:g}, 128 programs: tasks per hour"
        tell(place, ours, "1/h")
        tell(f"{place}, by request", theirs, "1/h")
        tell(f"{place} over by request", ours / theirs, "ratio", ">= 2")


def _mean_rate(runs: Runs, load: Load, ratio: float, policy: str) -> float:
    return fmean(full.tasks_per_hour for full in runs.while_full(load, ratio, policy))


def measure_prefetch(runs: Runs, tell: Tell) -> None:
    """Programs that come while others run; nothing can hide the environments of an empty system."""
    load = Load("swe-heavy", 192, 96)
    runs.run([load], [3.0], [OURS])
    hidden = fmean(full.hidden_by_prefetch for full in runs.while_full(load, 3.0, OURS))
    tell("swe-heavy at 3, 96 programs: environment wait hidden by prefetch", hidden, "share", ">= 0.9")
