"""What a user submits.  Values: nothing here runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, JsonValue

from sostenuto.envs.agent import Agent
from sostenuto.envs.environment import Environment
from sostenuto.envs.registry import environment_ref
from sostenuto.envs.task import Tasks
from sostenuto.errors import ConfigError
from sostenuto.runtime.jobs.alarms import AlarmSettings
from sostenuto.runtime.jobs.mixed import MixedIn, check_mixed
from sostenuto.runtime.jobs.phases import Phase, check_phases, method_at
from sostenuto.runtime.jobs.prefixes import Prefixes, check_prefixes
from sostenuto.runtime.jobs.reward_model import RewardModel, check_reward_models
from sostenuto.runtime.jobs.rewarding import GroupRewards, LateRewards
from sostenuto.runtime.jobs.roles import Role, check_roles
from sostenuto.runtime.jobs.sampling import Sampling
from sostenuto.runtime.jobs.sources import Mixed, Placed, TaskSource, source_of
from sostenuto.runtime.jobs.teacher import Teacher, check_teachers
from sostenuto.scheduler.update_terms import DEFAULT, KEEP_ALL, UpdateTerms
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.trainer.algorithms import GRPO, Algorithm
from sostenuto.trainer.parts import CriticModel
from sostenuto.trainer.samplers import Sampler, open_sampler
from sostenuto.trainer.settings import LearnerSettings, Schedule
from sostenuto.types import Limits, Truncation


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Supervised steps on the environment's own demonstrations, before anything is sampled.

    The environment's `demonstrate` is asked once for each task that comes up.
    """

    steps: int = 100
    batch: int = 8
    """Conversations in one step."""
    schedule: Schedule = field(default_factory=Schedule)

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"warm_start: {name} is {getattr(self, name)}; give at least 1")


@dataclass(frozen=True, slots=True)
class Stragglers:
    """What is done about the last members of a group, when the others have waited long enough."""

    after_s: float
    """From when half of the members have ended."""
    then: Literal["leave_out", "refill"] = "leave_out"
    """leave_out: the group goes on without them.  refill: they are started anew first, once."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if not self.after_s > 0:
            raise ConfigError(f"stragglers: after_s is {self.after_s}; give more than 0 seconds")


def local_folder(given: str | Path, name: str) -> Path:
    """ConfigError when it is not a folder on this machine; `name` says what it was given as."""
    folder = Path(given)
    if not folder.is_dir():
        raise ConfigError(
            f"{name}: {folder} is not a folder; give a local folder in Hugging Face form "
            "(config.json, tokenizer.json, *.safetensors)"
        )
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    env: type[Environment[Any]]
    model: str | Path
    """Folder in Hugging Face form."""
    options: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """Keyword arguments of the environment."""
    limits: Limits = field(default_factory=Limits)
    seed: int = 0
    name: str = "job"
    """Begins the ids of its programs."""
    roles: tuple[Role, ...] = ()
    """Who speaks besides the policy in the episodes of an agent."""
    reward_models: tuple[RewardModel, ...] = ()
    """What they say is added to the rewards of programs."""
    late_rewards: LateRewards | None = None
    """None: an environment whose rewards come later fails."""

    def check_rewards(self, tasks: object) -> None:
        """ConfigError for reward models that cannot score its programs on these tasks, or useless roles."""
        check_roles(self.roles, self.agents)
        check_reward_models(
            self.reward_models, tasks, is_agent=bool(self.agents), is_late=self.late_rewards is not None
        )

    def environment(self) -> EnvironmentRef:
        """The environment as it travels; ConfigError for a class that cannot run."""
        return environment_ref(self.env, **self.options)

    @property
    def agents(self) -> frozenset[str]:
        """Classes of its environments that drive themselves."""
        return frozenset({self.env.__name__} if issubclass(self.env, Agent) else ())

    def model_folder(self) -> Path:
        """ConfigError when the model is not a folder on this machine."""
        return local_folder(self.model, "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalJob(_Job):
    """Run a model on every task of an environment."""

    tasks: Tasks[Any] | Sequence[BaseModel]
    temperatures: tuple[float, ...] = (1.0, 0.0)
    """Each task at each of them; 0 is greedy."""
    truncation: Truncation = field(default_factory=Truncation)
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not len(self.tasks):
            raise ConfigError("tasks: there is none")
        if any(t < 0 for t in self.temperatures) or not self.temperatures:
            raise ConfigError(f"temperatures: {self.temperatures}; give one or more, none below 0")
        self.check_rewards(self.tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RLJob(_Job):
    """Train a model on an environment by reinforcement."""

    tasks: Tasks[Any] | Sequence[BaseModel] | TaskSource
    """A sequence is drawn from in a new seeded order each epoch, without end."""
    steps: int
    weight: float = 1.0
    """Of its own environment, beside those of `mixed`."""
    mixed: tuple[MixedIn, ...] = ()
    """Other environments that it trains on at the same time."""
    algorithm: Algorithm = field(default_factory=GRPO)
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    reference: str | Path | None = None
    """Folder of the model that `algorithm.kl` is measured from; None: the model as it begins."""
    teachers: tuple[Teacher, ...] = ()
    """Who says what is better, of a method with `teaching`."""
    prefixes: tuple[Prefixes, ...] = ()
    """Histories that the student continues by one turn each, beside its own whole rollouts."""
    critic: str | Path | None = None
    """Folder of the model that a critic of kind "model" begins as; None: the model as it begins."""
    phases: tuple[Phase, ...] = ()
    """Other methods from some steps on, such as rewards after a teacher; `algorithm` is the first."""
    warm_start: WarmStart | None = None
    groups_per_step: int = 8
    max_staleness: int = 1
    """Versions that a batch may lag behind when it is used; 0: generation waits for learning."""
    kv_at_update: Literal["recompute", "keep"] = "recompute"
    """What new weights do to KV of the old ones: compute it anew, or go on with it."""
    at_update: UpdateTerms | None = None
    """In place of `kv_at_update`: all that can be chosen about a change of version."""
    sampler: str | Sampler = "fifo"
    """Which groups make a batch: fifo, in_order, ready_first, windowed:N; or one of your own."""
    refills: int = 1
    """How often a member that the infrastructure failed is started anew."""
    stragglers: Stragglers | None = None
    """None: a group waits for all of its members."""
    stalled_after_s: float = 30.0
    """When no group was completed for so long, the oldest program is named, with what it does."""
    group_rewards: GroupRewards | None = None
    """None: each program's reward is its own."""
    eval_tasks: Tasks[Any] | Sequence[BaseModel] = ()
    eval_every: int = 0
    """In steps; 0: before and after training alone."""
    eval_sampling: Sampling = field(default_factory=Sampling)
    eval_beside: bool = False
    """Training goes on during an evaluation, which then may sample under several versions, and says which."""
    save_every: int = 10
    """In steps; a job that is cut off goes on from there.  0: after a warm start and at the end alone."""
    alarms: AlarmSettings = field(default_factory=AlarmSettings)
    shuffle_rewards: bool = False
    """A control: rewards change places among the programs of a batch, so that nothing can be learnt."""

    def __post_init__(self) -> None:
        for name in ("steps", "groups_per_step"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)}; give at least 1")
        if self.max_staleness < 0:
            raise ConfigError(f"max_staleness: {self.max_staleness}; give 0 or more")
        _check_flow(self)
        check_phases(self.algorithm, self.phases, self.steps)
        if self.reference is not None and not self._has_reference:
            raise ConfigError("reference: nothing is compared with it; give algorithm.kl, or leave it out")
        fewest = 2 if any(algorithm.compares_group for algorithm in self.algorithms) else 1
        check_mixed(
            self.parts,
            fewest=fewest,
            total_tokens=self.limits.total_tokens,
        )
        check_roles(self.roles, self.agents)
        for part in self.parts:
            check_teachers(self.teachers, self.algorithms, part.env.__name__, part.tasks)
            check_reward_models(
                self.reward_models, part.tasks,
                is_agent=part.is_agent, is_late=self.late_rewards is not None,
            )  # fmt: skip
        check_prefixes(self.prefixes, self.teachers)
        if self.prefixes and self.algorithm.critic is not None:
            raise ConfigError(
                "prefixes: a critic learns from rewards, and a turn from a history has none; leave them out"
            )
        if self.critic is not None and not isinstance(self.algorithm.critic, CriticModel):
            raise ConfigError(
                "critic: no critic of this method begins as a model; "
                'give algorithm.critic = { kind = "model" }, or leave it out'
            )

    @property
    def update_terms(self) -> UpdateTerms:
        """What each of its publications does."""
        return _update_terms(self)

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """Of all phases."""
        return (self.algorithm, *(phase.algorithm for phase in self.phases))

    def algorithm_at(self, step: int) -> Algorithm:
        """What the batch of this step is learnt by."""
        return method_at(step, self.algorithm, self.phases)

    @property
    def _has_reference(self) -> bool:
        return any(algorithm.kl is not None for algorithm in self.algorithms)

    def reference_folder(self) -> Path | None:
        """None when nothing is compared with a reference.  ConfigError when it is no folder here."""
        if not self._has_reference:
            return None
        return local_folder(self.model if self.reference is None else self.reference, "reference")

    def critic_folder(self) -> Path | None:
        """None when no critic has a model of its own.  ConfigError when it is no folder here."""
        if not isinstance(self.algorithm.critic, CriticModel):
            return None
        return local_folder(self.model if self.critic is None else self.critic, "critic")

    @property
    def parts(self) -> tuple[MixedIn, ...]:
        """All of its environments, its own first, each with what it has from the job."""
        own = MixedIn(
            env=self.env, tasks=self.tasks, weight=self.weight, options=self.options,
            eval_tasks=self.eval_tasks, group_rewards=self.group_rewards,
        )  # fmt: skip
        size = self.algorithm.group_size
        return tuple(
            replace(part, group_size=part.group_size or size, limits=part.limits or self.limits)
            for part in (own, *self.mixed)
        )

    @property
    def agents(self) -> frozenset[str]:
        """Classes of its environments that drive themselves."""
        return frozenset(part.env.__name__ for part in self.parts if part.is_agent)

    def task_source(self) -> TaskSource:
        """Of all of its environments."""
        if not self.mixed:
            return source_of(self.tasks, self.seed)
        whole = sum(part.weight for part in self.parts)
        return Mixed(
            [
                (part.weight / whole, Placed(source_of(part.tasks, self.seed), number, part.called))
                for number, part in enumerate(self.parts)
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutJob(_Job):
    """Sample groups of programs for a trainer that is not ours."""

    tasks: Tasks[Any] | Sequence[BaseModel] | TaskSource
    """A sequence is drawn from in a new seeded order each epoch, without end; `Tasks.stream` can have one."""
    name: str = "rollouts"
    group_size: int = 8
    """Programs on one task."""
    groups_per_step: int = 8
    """Groups that you learn from between two publications."""
    max_staleness: int = 1
    """Versions that a group may lag behind when you get it; 0: generation waits for your publication."""
    temperature: float = 1.0
    zero_spread: Literal["keep", "replace"] = "keep"
    """What becomes of a group with equal rewards: you get it, or it is dropped and another one is sampled."""
    kv_at_update: Literal["recompute", "keep"] = "recompute"
    """What new weights do to KV of the old ones: compute it anew, or go on with it."""
    at_update: UpdateTerms | None = None
    """In place of `kv_at_update`: all that can be chosen about a change of version."""
    routed_experts: bool = False
    """Record which experts of a mixture-of-experts model each token was routed to."""
    sampler: str | Sampler = "fifo"
    """Which groups make a batch: fifo, in_order, ready_first, windowed:N; or one of your own."""
    refills: int = 1
    """How often a member that the infrastructure failed is started anew."""
    stragglers: Stragglers | None = None
    """None: a group waits for all of its members."""
    stalled_after_s: float = 30.0
    """When no group was completed for so long, the oldest program is named, with what it does."""
    group_rewards: GroupRewards | None = None
    """None: each program's reward is its own."""

    def __post_init__(self) -> None:
        for name, least in (("group_size", 1), ("groups_per_step", 1), ("max_staleness", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: {getattr(self, name)}; give at least {least}")
        _check_flow(self)
        if self.temperature <= 0:
            raise ConfigError(f"temperature: {self.temperature}; give more than 0, training needs chance")
        if self.zero_spread == "replace" and self.group_size == 1:
            raise ConfigError("zero_spread: 'replace' and group_size 1; one reward has no spread, use 'keep'")
        self.check_rewards(self.tasks)

    @property
    def update_terms(self) -> UpdateTerms:
        """What each of its publications does."""
        return _update_terms(self)

    def task_source(self) -> TaskSource:
        return source_of(self.tasks, self.seed)


def _update_terms(job: RLJob | RolloutJob) -> UpdateTerms:
    if job.at_update is not None:
        return job.at_update
    return KEEP_ALL if job.kv_at_update == "keep" else DEFAULT


def _check_flow(job: RLJob | RolloutJob) -> None:
    if job.at_update is not None and job.kv_at_update != "recompute":
        raise ConfigError("kv_at_update: at_update says it already; give one of them")
    open_sampler(job.sampler).check(job.groups_per_step)
    if not job.stalled_after_s > 0:
        raise ConfigError(f"stalled_after_s: {job.stalled_after_s}; give more than 0 seconds")
    if job.refills < 0:
        raise ConfigError(f"refills: {job.refills}; give 0 or more")
    size = job.group_size if isinstance(job, RolloutJob) else job.algorithm.group_size
    if job.group_rewards is not None and size == 1:
        raise ConfigError(
            "group_rewards: group_size is 1, and one program is no group; give 2 or more, or leave it out"
        )
