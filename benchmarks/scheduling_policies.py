"""Policies beside each other in simulation: every figure of task completion time."""

import math

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
        share = (theirs - ours) / (theirs - endless) if theirs > endless else math.nan
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
    """Tasks per hour where request-level scheduling thrashes, 128 programs at a time."""
    for load in (Load("swe-light", 256, 128), Load("swe-heavy", 128, 128)):
        runs.run([load], [3.0], (OURS, HONEST))
        for_us = runs.mean(load, 3.0, OURS, "tasks_per_hour")
        for_them = runs.mean(load, 3.0, HONEST, "tasks_per_hour")
        tell(f"{load.name} at 3, 128 programs: tasks per hour", for_us, "1/h")
        tell(f"{load.name} at 3, 128 programs: tasks per hour, by request", for_them, "1/h")
        tell(
            f"{load.name} at 3, 128 programs: tasks per hour over by request",
            for_us / for_them,
            "ratio",
            ">= 2",
        )


def measure_prefetch(runs: Runs, tell: Tell) -> None:
    """A batch of an RL step: all programs are there from the start, and the pool holds a third of them."""
    load = Load("swe-heavy", 96, 96)
    runs.run([load], [3.0], [OURS])
    hidden = runs.mean(load, 3.0, OURS, "hidden_by_prefetch_share")
    tell("swe-heavy, a batch of 96 at 3: environment wait hidden by prefetch", hidden, "share", ">= 0.9")
