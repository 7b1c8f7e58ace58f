"""Held-out tasks, each run once at a temperature, on whatever version is deployed."""

from collections.abc import Sequence
from typing import Any

import anyio
from pydantic import BaseModel

from sostenuto.envs.task import Tasks, task_id
from sostenuto.errors import SostenutoError
from sostenuto.records import Trajectory
from sostenuto.runtime.jobs.events import Evaluated
from sostenuto.runtime.jobs.seeds import seed_of
from sostenuto.runtime.program import ProgramSpec
from sostenuto.runtime.rollouts import Rollouts
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.types import GroupId, Limits, ProgramId, Purpose, Truncation, Version

_PRIORITY = -1
"""In the queues of tools, where the programs of training have 0: the trainer waits for an evaluation."""
_WHOLE = Truncation()


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
    ) -> None:
        self._tasks = list(tasks)
        self._environment = environment
        self._limits = limits
        self._seed = seed
        self._name = name
        self._truncation = truncation
        self._rounds = 0

    async def run(
        self, rollouts: Rollouts, *, temperature: float, step: int, version: Version
    ) -> tuple[Evaluated, list[Trajectory]]:
        """Run every task together and score them; NothingScored when none of them could be."""
        self._rounds += 1
        began_s = anyio.current_time()
        done: list[Trajectory] = []

        async def run(spec: ProgramSpec) -> None:
            done.append(await rollouts.run(spec))

        async with anyio.create_task_group() as group:
            for index, task in enumerate(self._tasks):
                group.start_soon(run, self._spec(index, task, temperature))
        done.sort(key=lambda trajectory: trajectory.program_id)
        _refuse_no_score(done)
        return _summary(done, temperature, step, version, anyio.current_time() - began_s), done

    def _spec(self, index: int, task: BaseModel, temperature: float) -> ProgramSpec:
        group_id = GroupId(f"{self._name}-eval{self._rounds}-{index:05d}")
        return ProgramSpec(
            id=ProgramId(group_id),
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
            seed=seed_of("evaluation", self._seed, index),
            environment_seed=seed_of("evaluation", self._seed, index),
        )


def _refuse_no_score(done: list[Trajectory]) -> None:
    if all(trajectory.reward is None for trajectory in done):
        raise NothingScored(
            f"all {len(done)} programs of an evaluation failed, the last as: {done[-1].outcome}"
        )


def _summary(
    done: list[Trajectory], temperature: float, step: int, version: Version, elapsed_s: float
) -> Evaluated:
    rewards = [trajectory.reward for trajectory in done if trajectory.reward is not None]
    turns = [trajectory.metrics["turns"] for trajectory in done if trajectory.reward is not None]
    return Evaluated(
        step=step,
        version=version,
        temperature=temperature,
        programs=len(rewards),
        failed=len(done) - len(rewards),
        reward=sum(rewards) / len(rewards),
        turns=sum(turns) / len(turns),
        elapsed_s=elapsed_s,
    )
