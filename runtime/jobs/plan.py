"""What a supply of groups needs to know of a job, whoever learns from them."""

from dataclasses import dataclass
from typing import Any, Literal, cast

from sostenuto.envs.curriculum import Curriculum
from sostenuto.runtime.jobs.job import RLJob, RolloutJob, Stragglers, TaskSource
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.trainer.samplers import Sampler
from sostenuto.types import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    name: str
    """Begins the ids of its groups."""
    root: str
    """The name that the job keeps over the deaths of its run."""
    seed: int
    environment: EnvironmentRef
    source: TaskSource
    curriculum: Curriculum[Any] | None
    """Is told how programs have ended."""
    limits: Limits
    group_size: int
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
    groups: int | None
    """That are used in all; None: whoever takes them says when it is enough."""


def plan_of(job: RLJob, *, root: str = "") -> Plan:
    """For our own trainer.  `root`: None given, it is the job's name."""
    return Plan(
        name=job.name,
        root=root or job.name,
        seed=job.seed,
        environment=job.environment(),
        source=job.task_source(),
        curriculum=_curriculum(job.tasks),
        limits=job.limits,
        group_size=job.algorithm.group_size,
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
        groups=job.steps * job.groups_per_step,
    )


def plan_of_rollouts(job: RolloutJob) -> Plan:
    """For a trainer of the user's."""
    return Plan(
        name=job.name,
        root=job.name,
        seed=job.seed,
        environment=job.environment(),
        source=job.task_source(),
        curriculum=_curriculum(job.tasks),
        limits=job.limits,
        group_size=job.group_size,
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
        groups=None,
    )


def _curriculum(tasks: object) -> Curriculum[Any] | None:
    return cast("Curriculum[Any]", tasks) if isinstance(tasks, Curriculum) else None
