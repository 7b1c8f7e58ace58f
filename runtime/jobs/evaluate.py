"""Held-out tasks, each run once or several times at a temperature, on whatever version is deployed."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import anyio
from pydantic import BaseModel

from sostenuto.envs.task import Tasks, task_id
from sostenuto.errors import SostenutoError
from sostenuto.records import Trajectory
from sostenuto.runtime.jobs.estimates import confidence, mean_pass_at
from sostenuto.runtime.jobs.events import Evaluated
from sostenuto.runtime.jobs.sampling import Sampling
from sostenuto.runtime.jobs.seeds import seed_of
from sostenuto.runtime.program import ProgramSpec
from sostenuto.runtime.rollouts import Rollouts
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.types import GroupId, Limits, ProgramId, Purpose, Truncation, Version

_PRIORITY = -1
"""Where the programs of training have 0: the trainer waits for an evaluation."""
_WHOLE = Truncation()


_ONCE = Sampling()


class NothingScored(SostenutoError):  # noqa: N818 - reads as the fact it states
    """Every program of an evaluation failed: there is no mean to give."""


class Evaluation:
    """One set of tasks on one environment; can be asked again at every version."""

    def __init__(
        self,
        tasks: Tasks[Any] | Sequence[BaseModel],
        environment: EnvironmentRef,
        limits: Limits,
        *,
        seed: int,
        name: str,
        truncation: Truncation = _WHOLE,
        sampling: Sampling = _ONCE,
    ) -> None:
        self._tasks = list(tasks)
        self._environment = environment
        self._limits = limits
        self._seed = seed
        self._name = name
        self._truncation = truncation
        self._sampling = sampling
        self._rounds = 0

    async def run(
        self, rollouts: Rollouts, *, temperature: float, step: int, version: Version
    ) -> tuple[Evaluated, list[Trajectory]]:
        """Run all programs together and score them; NothingScored when none of them could be.

        They go before the programs of training.  `version` is what is deployed.
        """
        self._rounds += 1
        began_s = anyio.current_time()
        done: list[Trajectory] = []

        async def run(spec: ProgramSpec) -> None:
            done.append(await rollouts.run(spec))

        async with anyio.create_task_group() as group:
            for spec in self._specs(temperature):
                group.start_soon(run, spec)
        done.sort(key=lambda trajectory: trajectory.program_id)
        _refuse_no_score(done)
        told = _summary(done, temperature, step, version, self._sampling)
        return replace(told, elapsed_s=anyio.current_time() - began_s), done

    def _specs(self, temperature: float) -> Iterator[ProgramSpec]:
        # Without chance every sample is the same.
        samples = self._sampling.samples if temperature > 0 else 1
        for index, task in enumerate(self._tasks):
            group_id = GroupId(f"{self._name}-eval{self._rounds}-{index:05d}")
            for sample in range(samples):
                yield self._spec(index, sample, group_id, task, temperature)

    def _spec(
        self, index: int, sample: int, group_id: GroupId, task: BaseModel, temperature: float
    ) -> ProgramSpec:
        others = (sample,) if sample else ()
        return ProgramSpec(
            id=ProgramId("-".join(map(str, (group_id, *others)))),
            group_id=group_id,
            task_id=task_id(task),
            purpose=Purpose.EVALUATE,
            environment=self._environment,
            task=task.model_dump(mode="json"),
            limits=self._limits,
            temperature=temperature,
            truncation=self._truncation,
            priority=_PRIORITY,
            # The same noise at every version: differences are the policy's.
            seed=seed_of("evaluation", self._seed, index, *others),
            environment_seed=seed_of("evaluation", self._seed, index),
        )


def _refuse_no_score(done: list[Trajectory]) -> None:
    if all(trajectory.reward is None for trajectory in done):
        raise NothingScored(
            f"all {len(done)} programs of an evaluation failed, the last as: {done[-1].outcome}"
        )


def _summary(
    done: list[Trajectory], temperature: float, step: int, version: Version, sampling: Sampling
) -> Evaluated:
    scored = [trajectory for trajectory in done if trajectory.reward is not None]
    by_task: dict[GroupId, list[float]] = {}
    for trajectory in scored:
        by_task.setdefault(trajectory.group_id, []).append(trajectory.reward or 0.0)
    tasks = list(by_task.values())
    succeeded = [[sampling.is_success(reward) for reward in rewards] for rewards in tasks]
    estimates = {k: mean_pass_at(k, succeeded) for k in sampling.ks}
    about = confidence(tasks)
    turns = [trajectory.metrics["turns"] for trajectory in scored]
    return Evaluated(
        step=step,
        version=version,
        temperature=temperature,
        programs=len(scored),
        failed=len(done) - len(scored),
        reward=sum(sum(rewards) / len(rewards) for rewards in tasks) / len(tasks),
        turns=sum(turns) / len(turns),
        elapsed_s=0.0,
        tasks=len(tasks),
        versions=tuple(
            sorted({v.version for record in scored for span in record.spans() for v in span.versions})
        ),
        low=about.low,
        high=about.high,
        interval=about.method,
        pass_at={k: estimate for k, estimate in estimates.items() if estimate is not None},
        stops=dict(Counter(str(trajectory.stop_reason) for trajectory in scored)),
    )
