"""Jobs as TOML files: the runtime's settings and the job's, in one flat file.

directory = "runs/first"
environment = "storeroom"             # a registered name, or "module:Class"
model = "models/mine"                 # a folder, "package:NAME" or "hub:ORG/NAME"
steps = 100

[tasks]
file = "tasks.jsonl"                  # or .parquet, or factory = "module:function"

[limits]
turns = 6
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import Field, JsonValue, model_validator

from sostenuto.envs.curriculum import Curriculum
from sostenuto.envs.declaration import declaration
from sostenuto.envs.environment import Environment
from sostenuto.envs.registry import Registry
from sostenuto.envs.task import Tasks
from sostenuto.errors import ConfigError
from sostenuto.runtime.config import RuntimeConfig, Section, load_toml
from sostenuto.runtime.jobs.alarms import AlarmSettings
from sostenuto.runtime.jobs.job import EvalJob, RLJob, Stragglers, WarmStart
from sostenuto.runtime.jobs.mixed import MixedIn
from sostenuto.runtime.jobs.phases import Phase
from sostenuto.runtime.jobs.prefixes import Prefixes
from sostenuto.runtime.jobs.reward_model import RewardModel
from sostenuto.runtime.jobs.rewarding import GroupRewards, LateRewards, named
from sostenuto.runtime.jobs.roles import Role
from sostenuto.runtime.jobs.sampling import Sampling
from sostenuto.runtime.jobs.sources import Given
from sostenuto.runtime.jobs.teacher import Teacher
from sostenuto.runtime.models import resolve_model
from sostenuto.scheduler.update_terms import UpdateTerms
from sostenuto.trainer.algorithms import GRPO, AnyAlgorithm
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.types import Limits, Truncation

BUILT_IN = {
    "chain_sum": "sostenuto.envs.arithmetic:ChainSum",
    "storeroom": "sostenuto.envs.storeroom:Storeroom",
}


class CurriculumSection(Section):
    """Tasks drawn by weight, and by what there is left to learn from each."""

    weights: dict[str, float] = Field(default_factory=dict)
    """By task id; 1 for the others, 0 leaves a task out."""

    weight_field: str | None = None
    """Field of a task that has its weight, in place of `weights`."""

    by_difficulty: bool = True
    floor: float = Field(default=0.1, gt=0, le=1)
    decay: float = Field(default=0.9, gt=0, le=1)
    """As `Curriculum` has them."""

    def of(self, tasks: Tasks[Any], seed: int) -> Curriculum[Any]:
        """ConfigError for weights that are none, or of no task."""
        return Curriculum(
            tasks, weights=self._weights(tasks), by_difficulty=self.by_difficulty, floor=self.floor,
            decay=self.decay, seed=seed,
        )  # fmt: skip

    def _weights(self, tasks: Tasks[Any]) -> dict[str, float] | list[float] | None:
        name = self.weight_field
        if name is None:
            return self.weights or None
        if self.weights:
            raise ConfigError("curriculum: weights and weight_field are both given; give one of them")
        found = [getattr(task, name, None) for task in tasks]
        for number, weight in enumerate(found, 1):
            if not isinstance(weight, int | float):
                raise ConfigError(
                    f"curriculum: weight_field {name!r}: task {number} has {weight!r}; give a field that has "
                    "a number in every task"
                )
        return cast("list[float]", found)


class TaskSection(Section):
    """Where tasks come from: a file of rows, or a function that makes them."""

    file: Path | None = None
    """JSON lines (.jsonl) or Parquet (.parquet); rows of the environment's task model."""

    factory: str | None = None
    """`module:function` that returns tasks."""

    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    curriculum: CurriculumSection | None = None
    """None: each task once an epoch, in a new order.  Not of tasks for evaluations."""

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if (self.file is None) == (self.factory is None):
            raise ValueError("give `file` or `factory`, one of them")
        return self

    def source(self, environment: type[Environment[Any]], seed: int) -> Given:
        """What a job draws from."""
        tasks = self.load(environment)
        return tasks if self.curriculum is None else self.curriculum.of(tasks, seed)

    def load(self, environment: type[Environment[Any]]) -> Tasks[Any]:
        """The tasks, checked."""
        if self.factory is not None:
            made: object = named(self.factory, "factory")(**self.arguments)
            if isinstance(made, Tasks):
                return cast("Tasks[Any]", made)
            return Tasks(cast("list[Any]", made), where=self.factory)
        assert self.file is not None
        model = declaration(environment).task_type
        if self.file.suffix == ".parquet":
            return Tasks.from_parquet(model, self.file)
        return Tasks.from_jsonl(model, self.file)


class MixedSection(Section):
    """One more environment of a job."""

    environment: str
    name: str = ""
    weight: float = Field(default=1.0, gt=0)
    group_size: int | None = Field(default=None, gt=0)
    options: dict[str, JsonValue] = Field(default_factory=dict)
    limits: Limits | None = None
    tasks: TaskSection
    eval_tasks: TaskSection | None = None
    group_rewards: GroupRewards | None = None

    def load(self, seed: int) -> MixedIn:
        """With class and tasks; ConfigError for what cannot be."""
        env = Registry(BUILT_IN)[self.environment]
        return MixedIn(
            env=env, tasks=self.tasks.source(env, seed), name=self.name, weight=self.weight,
            group_size=self.group_size, options=self.options, limits=self.limits,
            eval_tasks=_held_out(self.eval_tasks, env), group_rewards=self.group_rewards,
        )  # fmt: skip


def _held_out(section: TaskSection | None, environment: type[Environment[Any]]) -> Tasks[Any] | tuple[()]:
    if section is None:
        return ()
    if section.curriculum is not None:
        raise ConfigError("eval_tasks: curriculum: every task is evaluated; leave it out")
    return section.load(environment)


class _JobFile(RuntimeConfig):
    name: str = "job"
    seed: int = 0
    environment: str
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    model: str
    limits: Limits = Limits()
    truncation: Truncation = Truncation()
    roles: tuple[Role, ...] = ()
    reward_models: tuple[RewardModel, ...] = ()
    late_rewards: LateRewards | None = None

    def environment_class(self, registry: Registry | None = None) -> type[Environment[Any]]:
        return (registry or Registry(BUILT_IN))[self.environment]

    async def models_of_rewards(self) -> tuple[RewardModel, ...]:
        """With their folders; ConfigError for one that is not there."""
        return tuple([replace(m, model=await resolve_model(str(m.model))) for m in self.reward_models])

    async def roles_with_models(self) -> tuple[Role, ...]:
        return tuple(
            [
                role if role.model is None else replace(role, model=await resolve_model(str(role.model)))
                for role in self.roles
            ]
        )

    def runtime(self) -> RuntimeConfig:
        """The part that is not the job's."""
        return RuntimeConfig(**{name: getattr(self, name) for name in RuntimeConfig.model_fields})


class TrainFile(_JobFile):
    """What `sostenuto train FILE` reads."""

    tasks: TaskSection
    eval_tasks: TaskSection | None = None
    weight: float = Field(default=1.0, gt=0)
    mixed: tuple[MixedSection, ...] = ()
    steps: int = Field(gt=0)
    groups_per_step: int = Field(default=8, gt=0)
    max_staleness: int = Field(default=1, ge=0)
    kv_at_update: Literal["recompute", "keep"] = "recompute"
    at_update: UpdateTerms | None = None
    sampler: str = "fifo"
    refills: int = Field(default=1, ge=0)
    stragglers: Stragglers | None = None
    stalled_after_s: float = Field(default=30.0, gt=0)
    group_rewards: GroupRewards | None = None
    eval_every: int = Field(default=0, ge=0)
    eval_sampling: Sampling = Sampling()
    eval_beside: bool = False
    save_every: int = Field(default=10, ge=0)
    alarms: AlarmSettings = AlarmSettings()
    algorithm: AnyAlgorithm = GRPO()
    reference: str | None = None
    """As `model`; of the model that `algorithm.kl` is measured from."""
    teachers: tuple[Teacher, ...] = ()
    prefixes: tuple[Prefixes, ...] = ()
    critic: str | None = None
    """As `model`; of the model that a critic of kind "model" begins as."""
    phases: tuple[Phase, ...] = ()
    learner: LearnerSettings = LearnerSettings()
    warm_start: WarmStart | None = None

    @model_validator(mode="after")
    def _samples_from_the_whole_distribution(self) -> Self:
        try:
            self.truncation.refuse_in_training()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    async def job(self) -> RLJob:
        """The job, with class, model and tasks loaded; ConfigError for what cannot be."""
        environment = self.environment_class()
        same = {f.name for f in fields(RLJob)} & set(TrainFile.model_fields) - {
            "tasks",
            "eval_tasks",
            "model",
            "reference",
            "teachers",
            "critic",
            "reward_models",
            "roles",
            "mixed",
        }
        return RLJob(
            env=environment,
            model=await resolve_model(self.model),
            reference=None if self.reference is None else await resolve_model(self.reference),
            teachers=tuple([replace(t, model=await resolve_model(str(t.model))) for t in self.teachers]),
            reward_models=await self.models_of_rewards(),
            roles=await self.roles_with_models(),
            critic=None if self.critic is None else await resolve_model(self.critic),
            tasks=self.tasks.source(environment, self.seed),
            eval_tasks=_held_out(self.eval_tasks, environment),
            mixed=tuple(section.load(self.seed) for section in self.mixed),
            **{name: getattr(self, name) for name in same},
        )


class EvalFile(_JobFile):
    """What `sostenuto eval FILE` reads."""

    tasks: TaskSection
    temperatures: tuple[float, ...] = (1.0, 0.0)
    sampling: Sampling = Sampling()

    async def job(self) -> EvalJob:
        environment = self.environment_class()
        return EvalJob(
            env=environment,
            model=await resolve_model(self.model),
            tasks=self.tasks.load(environment),
            temperatures=self.temperatures,
            sampling=self.sampling,
            options=self.options,
            limits=self.limits,
            truncation=self.truncation,
            reward_models=await self.models_of_rewards(),
            roles=await self.roles_with_models(),
            late_rewards=self.late_rewards,
            seed=self.seed,
            name=self.name,
        )


def load_train_file(path: Path) -> TrainFile:
    return load_toml(path, TrainFile)


def load_eval_file(path: Path) -> EvalFile:
    return load_toml(path, EvalFile)
