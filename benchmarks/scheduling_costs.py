"""What one event of the scheduler costs, and how fast simulations run."""

import gc
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.figure import Tell
from sostenuto.runtime.bench.cells import policy_of
from sostenuto.runtime.simulation.dispatched.run import simulate_dispatched
from sostenuto.runtime.simulation.plan import Plan, Workload
from sostenuto.runtime.simulation.profile import FleetProfile
from sostenuto.runtime.simulation.profiles import load_profile
from sostenuto.runtime.simulation.workloads import generate, working_set_tokens
from sostenuto.runtime.simulation.world import simulate
from sostenuto.scheduler.actions import Action
from sostenuto.scheduler.events import Event, Submitted
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import ProgramId


class _Timed(Scheduler):
    """Counts what `apply` takes of the processor, whatever else the machine does meanwhile."""

    spent_s = 0.0
    longest_s = 0.0
    events = 0

    def apply(self, event: Event, now_s: float) -> list[Action]:
        began_s = time.thread_time()
        actions = super().apply(event, now_s)
        took_s = time.thread_time() - began_s
        self.spent_s += took_s
        self.longest_s = max(self.longest_s, took_s)
        self.events += 1
        return actions


def measure_events(tell: Tell, *, quick: bool) -> None:
    """Programs of a few turns, twice as many as the pools hold.

    The garbage collector is off meanwhile, as its pauses are of the whole process, here above all of the
    simulation; what one takes over the scheduler alone is told beside it.
    """
    for programs, engines, target_us in ((10_000, 8, 50), (10_000, 39, 50), (100_000, 8, 100)):
        count = programs // 20 if quick else programs
        workload, fleet = _crowd(count, engines)
        policy = _Timed(SchedulerSettings(live_programs=count))
        with _uncollected():
            simulate(policy, workload, fleet)
        name = f"one event at {programs:,} programs on {engines} engines"
        tell(f"{name}, mean", policy.spent_s / policy.events * 1e6, "us", f"<= {target_us}")
        target = "<= 5" if programs == 100_000 else None
        tell(f"{name}, longest", policy.longest_s * 1e3, "ms", target)
    count = 5000 if quick else 100_000
    tell(f"a full garbage collection over {count:,} waiting programs", _collection_s(count) * 1e3, "ms")


@contextmanager
def _uncollected() -> Generator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _collection_s(programs: int) -> float:
    """Seconds, with a scheduler that has so many programs and nothing else that is new."""
    gc.collect()
    gc.freeze()
    policy = Scheduler(SchedulerSettings(live_programs=programs))
    for number in range(programs):
        policy.apply(Submitted(ProgramId(str(number)), lease_s=60.0), 0.0)
    began_s = time.perf_counter()
    gc.collect()
    took_s = time.perf_counter() - began_s
    gc.unfreeze()
    return took_s


def _crowd(programs: int, engines: int) -> tuple[Workload, FleetProfile]:
    """All in the system at once."""
    workload = generate("remote-tools", programs=programs, seed=3, concurrency=programs)
    few = Workload(
        workload.name,
        tuple(_first_turns(plan) for plan in workload.programs),
        concurrency=programs,
    )
    profile = load_profile("pod-h100x2-qwen3-30b")
    tokens = round(working_set_tokens(few, programs) / 2 / engines)
    return few, FleetProfile(engines=engines, engine=profile.model_copy(update={"kv_tokens": tokens}))


def _first_turns(plan: Plan, count: int = 3) -> Plan:
    last = replace(plan.turns[count - 1], tool=None, tool_s=0.0, result_tokens=0)
    return replace(plan, turns=(*plan.turns[: count - 1], last))


def measure_speed(tell: Tell, *, quick: bool) -> None:
    """Turns a second of wall time at 1,000 programs."""
    count = 100 if quick else 1000
    workload = generate("remote-tools", programs=count, seed=3, concurrency=count)
    fleet = FleetProfile(engines=8, engine=load_profile("pod-h100x2-qwen3-30b"))
    turns = sum(len(plan.turns) for plan in workload.programs)
    for name, run, target in (
        ("the scheduler", simulate, 8000),
        ("the dispatcher", simulate_dispatched, 2000),
    ):
        began_s = time.perf_counter()
        run(policy_of("sostenuto", workload), workload, fleet)
        rate = turns / (time.perf_counter() - began_s)
        tell(f"simulated turns a second through {name}, 1,000 programs", rate, "1/s", f">= {target}")
