"""Who teaches a job's student: a model, where it runs, and which tasks it is for.  Values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, cast

from pydantic import BaseModel, JsonValue

from sostenuto.envs.task import Tasks
from sostenuto.errors import ConfigError, nearest
from sostenuto.runtime.config import EngineEntry
from sostenuto.trainer.algorithms import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A model that says how likely it would have been to choose what the student chose."""

    model: str | Path
    """Folder in Hugging Face form, with the student's tokenizer."""
    name: str = "teacher"
    tasks: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """Fields of a task with the value, or the list of values, for which it is this one's; none: whatever no
    other teacher claims."""
    environment: str = ""
    """Class name; tasks of others are not this one's."""
    place: Literal["trainer", "engine"] = "trainer"
    """trainer: loaded beside the policy, can compare whole distributions.  engine: scores every program as it
    ends, beside generation and learning."""
    engine: EngineEntry = field(default_factory=EngineEntry)
    """How its engine runs: one of our own with `model`, or one that serves `model` already."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("teachers: one has an empty name; give it one")
        if self.place == "trainer" and self.engine != EngineEntry():
            raise ConfigError(
                f"teachers: {self.name}: engine is given and place is 'trainer'; give place = 'engine'"
            )

    @property
    def is_default(self) -> bool:
        """Whether it takes whatever no other one claims."""
        return not self.tasks and not self.environment

    def claims(self, environment: str, task: Mapping[str, JsonValue]) -> bool:
        """Whether a task of the environment is its own."""
        return self.environment in ("", environment) and all(
            task.get(name) in (value if isinstance(value, list) else [value])
            for name, value in self.tasks.items()
        )


def assigned(teachers: Sequence[Teacher], environment: str, task: Mapping[str, JsonValue]) -> Teacher:
    """The first that claims a task, those that take everything last; ConfigError when none does."""
    for teacher in sorted(teachers, key=lambda teacher: teacher.is_default):
        if teacher.claims(environment, task):
            return teacher
    asked = {name: task.get(name) for teacher in teachers for name in teacher.tasks}
    raise ConfigError(
        f"teachers: none of {', '.join(teacher.name for teacher in teachers)} is for a task of {environment} "
        f"with {asked}; add one without `tasks` for whatever is left"
    )


def check_teachers(
    teachers: Sequence[Teacher], algorithms: Sequence[Algorithm], environment: str, tasks: object
) -> None:
    """ConfigError unless a method has a use for teachers and has them, and each listed task has one."""
    taught = [algorithm for algorithm in algorithms if algorithm.teaching is not None]
    if bool(taught) != bool(teachers):
        raise ConfigError(
            "teachers: nothing is learnt from them; give algorithm.teaching, or leave them out"
            if teachers
            else f"teachers: {taught[0].method} learns from a teacher, and there is none; give one"
        )
    names = [teacher.name for teacher in teachers]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"teachers: the name {min(twice)!r} is there twice; give each its own")
    for teacher in teachers:
        for algorithm in taught:
            _check_place(teacher, algorithm)
    chosen = [teacher for teacher in teachers if not teacher.is_default]
    if chosen and isinstance(tasks, Tasks | Sequence):
        _check_tasks(teachers, environment, cast("Iterable[object]", tasks))


def _check_place(teacher: Teacher, algorithm: Algorithm) -> None:
    teaching = algorithm.teaching
    if teacher.place == "trainer" or teaching is None:
        return
    where = f"teachers: {teacher.name}"
    if teaching.signal == "distribution" and teaching.top_k is None:
        raise ConfigError(
            f"{where}: an engine gives no whole distributions; give algorithm.teaching.top_k, or "
            'place = "trainer"'
        )
    if teacher.engine.kind != "embedded" and algorithm.temperature != 1.0:
        raise ConfigError(
            f"{where}: {teacher.engine.kind} scores at temperature 1 alone, and algorithm.temperature is "
            f'{algorithm.temperature}; give 1, or place = "trainer"'
        )


def _check_tasks(teachers: Sequence[Teacher], environment: str, tasks: Iterable[object]) -> None:
    rows = [task.model_dump(mode="json") for task in tasks if isinstance(task, BaseModel)]
    known = {name for row in rows for name in row}
    for teacher in teachers:
        if wrong := sorted(set(teacher.tasks) - known):
            raise ConfigError(
                f"teachers: {teacher.name}: no task has a field {wrong[0]!r}; "
                f"{nearest(wrong[0], sorted(known))}"
            )
    for row in rows:
        assigned(teachers, environment, row)
