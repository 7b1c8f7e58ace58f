"""What it is worth to generate while learning: one job, asynchronous and synchronous.

Equal seeds, model, tasks and number of groups; every group is used, whatever its rewards.  Timed from when
the job is ready, its processes started, to its last published step.
"""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import anyio

from benchmarks import models
from benchmarks.bench import Bench
from benchmarks.environments import SlowStoreroom
from sostenuto.envs.storeroom.world import training_tasks
from sostenuto.runtime.config import RuntimeConfig, TrainerProcessSettings
from sostenuto.runtime.jobs.events import JobStarted, StepTrained
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.quickstart.job import default_config
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.algorithms import GRPO
from sostenuto.trainer.settings import LearnerSettings, Schedule
from sostenuto.types import Usage

_WAIT_S = 2.0
_GROUPS = 4
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Manner:
    """One way to run the job."""

    name: str
    max_staleness: int
    threads: int = 1
    """Of the engine, and of the trainer."""


MANNERS = (
    Manner("asynchronous", max_staleness=1),
    Manner("synchronous", max_staleness=0),
    Manner("synchronous_two_threads", max_staleness=0, threads=2),
)


@dataclass(frozen=True, slots=True)
class _Timed:
    wall_s: float
    learn_s: float
    usage: Usage


async def measure(bench: Bench) -> None:
    """Each manner several times in changing order, and the ratio of the medians."""
    model = await models.warm(bench)
    steps, repeats = bench.size(12, 3), bench.size(_REPEATS, 1)
    timed: dict[str, list[_Timed]] = {manner.name: [] for manner in MANNERS}
    for repeat in range(repeats):
        turned = repeat % len(MANNERS)
        for manner in (*MANNERS[turned:], *MANNERS[:turned]):
            timed[manner.name].append(await _run(bench, model, steps, manner))
    wall_s = {name: median(run.wall_s for run in runs) for name, runs in timed.items()}
    for name, runs in timed.items():
        bench.tell(f"wall_{name}", wall_s[name], "s")
        bench.tell(f"wall_learning_{name}", median(run.learn_s for run in runs), "s")
    for manner in MANNERS:
        share = min(_tool_share(run.usage) for run in timed[manner.name])
        bench.tell(f"tool_share_{manner.name}", share, "share of episode time", ">= 0.3")
    asynchronous = wall_s["asynchronous"]
    bench.tell("asynchronous_over_synchronous", asynchronous / wall_s["synchronous"], "ratio", "<= 0.75")
    two_threads = wall_s["synchronous_two_threads"]
    bench.tell("asynchronous_over_synchronous_two_threads", asynchronous / two_threads, "ratio")


async def _run(bench: Bench, model: Path, steps: int, manner: Manner) -> _Timed:
    with bench.run_directory() as folder:
        async with Runtime(_config(folder, manner)) as runtime:
            job = await runtime.submit(_job(bench, model, steps, manner))
            began_s = ended_s = 0.0
            trained: list[StepTrained] = []
            async for event in job.events():
                if isinstance(event, JobStarted):
                    began_s = anyio.current_time()
                elif isinstance(event, StepTrained):
                    ended_s = anyio.current_time()
                    trained.append(event)
            await job.result()
    usage = sum((step.usage for step in trained), Usage())
    return _Timed(ended_s - began_s, sum(step.learn_s for step in trained), usage)


def _config(folder: Path, manner: Manner) -> RuntimeConfig:
    config = default_config(folder)
    return config.model_copy(
        update={
            "engine": config.engine.model_copy(update={"threads": manner.threads}),
            "trainer": TrainerProcessSettings(threads=manner.threads),
        }
    )


def _job(bench: Bench, model: Path, steps: int, manner: Manner) -> RLJob:
    return RLJob(
        env=SlowStoreroom,
        options={"wait_s": _WAIT_S},
        model=model,
        tasks=list(islice(training_tasks(1), steps * _GROUPS)),
        limits=bench.recipe.limits,
        steps=steps,
        groups_per_step=_GROUPS,
        max_staleness=manner.max_staleness,
        algorithm=GRPO(group_size=8, zero_spread="keep"),
        learner=LearnerSettings(schedule=Schedule(learning_rate=1e-4)),
        seed=1,
    )


def _tool_share(usage: Usage) -> float:
    whole = usage.decode_s + usage.prefill_s + usage.tool_s + usage.queue_s + usage.environment_s
    return usage.tool_s / whole if whole else 0.0
