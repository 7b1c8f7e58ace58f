"""What a supply of groups needs to know of a job, whoever learns from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from sostenuto.envs.curriculum import Curriculum
from sostenuto.runtime.jobs.job import RLJob, RolloutJob, Stragglers
from sostenuto.runtime.jobs.mixed import MixedIn
from sostenuto.runtime.jobs.sources import NAMED, TaskSource
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.trainer.samplers import Sampler
from sostenuto.types import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPart:
    """One environment of a job."""

    name: str
    environment: EnvironmentRef
    curriculum: Curriculum[Any] | None
    """Is told how programs have ended."""
    limits: Limits
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    name: str
    """Begins the ids of its groups."""
    root: str
    """The name that the job keeps over the deaths of its run."""
    seed: int
    parts: tuple[PlanPart, ...]
    """Which of them a draw is of, it says itself."""
    source: TaskSource
    temperature: float
    routed_experts: bool
    groups_per_step: int
    """That are learnt from before the next version."""
    max_staleness: int
    zero_spread: Literal["skip", "replace", "keep"]
    fewest: int
    """Members that a group can be learnt from with."""
    needs_reward: bool
    sampler: str | Sampler
    refills: int
    stragglers: Stragglers | None
    stalled_after_s: float
    groups: int | None
    """That are used in all; None: whoever takes them says when it is enough."""

    @property
    def group_size(self) -> int:
        """Of the largest."""
        return max(part.group_size for part in self.parts)

    def part_of(self, task_id: str) -> PlanPart:
        """Which environment a task that was drawn is of."""
        name = task_id.partition(NAMED)[0]
        return next((part for part in self.parts[1:] if part.name == name), self.parts[0])

    @property
    def curricula(self) -> Mapping[str, Curriculum[Any]]:
        """By the name of their environment."""
        return {part.name: part.curriculum for part in self.parts if part.curriculum is not None}


def plan_of(job: RLJob, *, root: str = "") -> Plan:
    """For our own trainer.  `root`: None given, it is the job's name."""
    return Plan(
        name=job.name,
        root=root or job.name,
        seed=job.seed,
        parts=tuple(_part(part, job.limits, job.algorithm.group_size) for part in job.parts),
        source=job.task_source(),
        temperature=job.algorithm.temperature,
        routed_experts=job.learner.routing_replay,
        groups_per_step=job.groups_per_step,
        max_staleness=job.max_staleness,
        zero_spread=job.algorithm.zero_spread,
        fewest=2 if any(algorithm.compares_group for algorithm in job.algorithms) else 1,
        needs_reward=any(algorithm.needs_reward for algorithm in job.algorithms),
        sampler=job.sampler,
        refills=job.refills,
        stragglers=job.stragglers,
        stalled_after_s=job.stalled_after_s,
        groups=job.steps * job.groups_per_step,
    )


def plan_of_rollouts(job: RolloutJob) -> Plan:
    """For a trainer of the user's."""
    own = MixedIn(env=job.env, tasks=job.tasks, options=job.options)
    return Plan(
        name=job.name,
        root=job.name,
        seed=job.seed,
        parts=(_part(own, job.limits, job.group_size),),
        source=job.task_source(),
        temperature=job.temperature,
        routed_experts=job.routed_experts,
        groups_per_step=job.groups_per_step,
        max_staleness=job.max_staleness,
        zero_spread=job.zero_spread,
        fewest=min(2, job.group_size),
        needs_reward=True,
        sampler=job.sampler,
        refills=job.refills,
        stragglers=job.stragglers,
        stalled_after_s=job.stalled_after_s,
        groups=None,
    )


def _part(part: MixedIn, limits: Limits, group_size: int) -> PlanPart:
    tasks: object = part.tasks
    return PlanPart(
        name=part.called,
        environment=part.environment(),
        curriculum=cast("Curriculum[Any]", tasks) if isinstance(tasks, Curriculum) else None,
        limits=part.limits or limits,
        group_size=part.group_size or group_size,
    )
