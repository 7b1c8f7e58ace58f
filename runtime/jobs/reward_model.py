"""Models that score what a job's programs have done.  Values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import ClassVar, Literal, cast

from pydantic import BaseModel

from sostenuto.envs.task import Tasks
from sostenuto.errors import ConfigError, nearest
from sostenuto.runtime.config import EngineEntry

PLACES = ("prompt", "answer", "conversation")
"""What a template may name, beside `task_FIELD`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """`weight` times its score is added to the reward of every program that has a conversation.

    classifier: a folder of sequence classification (or a value head: one output), in a process of its own.
    likelihood: a causal language model in an engine; its score is how likely it finds `label` after
    `template`: the log-probability, or, with `against`, the share of it among all of them.
    """

    model: str | Path
    """Folder in Hugging Face form; its tokenizer may be another than the policy's."""
    name: str = "model"
    """Its score is among the metrics by this name."""
    weight: float = 1.0
    kind: Literal["classifier", "likelihood"] = "classifier"
    label: str = ""
    """classifier: which of several labels, whose probability is the score; empty: the one output as it is.
    likelihood: the text whose log-probability is taken, such as " Yes"."""
    against: tuple[str, ...] = ()
    """likelihood: the other texts that could stand there, such as " No"."""
    template: str = ""
    """`$prompt` (the first message of the user), `$answer` (the last of the policy), `$conversation` and
    `$task_FIELD` stand in it.  classifier: empty is the conversation in the model's own chat format."""
    chat: bool = True
    """likelihood: the template is what a user says in the model's chat format; False: as it stands."""
    deadline_s: float = 60.0
    engine: EngineEntry = field(default_factory=EngineEntry)
    """likelihood: one of our own with `model`, or one that serves `model` already."""
    device: str = "cpu"
    """classifier: as PyTorch calls it, such as "cuda:1"."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 1
    """classifier: of its process."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_kind()
        if unknown := [name for name in self.names if name not in PLACES and not name.startswith("task_")]:
            raise ConfigError(
                f"{self.where}: template names ${unknown[0]}; it may have "
                f"{', '.join(f'${name}' for name in PLACES)} and $task_FIELD, and $$ for a dollar sign"
            )

    @property
    def where(self) -> str:
        """As errors call it."""
        return f"reward_models: {self.name}"

    @property
    def names(self) -> list[str]:
        """That its template has; ConfigError for a dollar sign before no name."""
        template = Template(self.template)
        if not template.is_valid():
            raise ConfigError(f"{self.where}: template has a $ before no name; write $$ for a dollar sign")
        return template.get_identifiers()

    def _check_numbers(self) -> None:
        if not self.name or self.name in ("reward", "turns"):
            raise ConfigError(f"reward_models: the name {self.name!r} is taken; give it another")
        if not math.isfinite(self.weight):
            raise ConfigError(f"{self.where}: weight is {self.weight}; give a finite number")
        if not 0 < self.deadline_s < math.inf:
            raise ConfigError(f"{self.where}: deadline_s is {self.deadline_s}; give seconds above 0")
        if self.threads < 1:
            raise ConfigError(f"{self.where}: threads is {self.threads}; give at least 1")

    def _check_kind(self) -> None:
        if self.kind == "likelihood":
            if not self.label or not self.template:
                raise ConfigError(f"{self.where}: a likelihood needs `template` and `label`; give both")
            if self.device != "cpu" or self.threads != 1:
                raise ConfigError(f"{self.where}: device and threads are of a classifier; give `engine` both")
            return
        if self.against or self.engine != EngineEntry():
            raise ConfigError(
                f'{self.where}: against and engine are of a likelihood; give kind = "likelihood"'
            )


def check_reward_models(
    models: Sequence[RewardModel], tasks: object, *, is_agent: bool, is_late: bool
) -> None:
    """ConfigError for those that cannot score a job's programs."""
    names = [model.name for model in models]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"reward_models: the name {min(twice)!r} is there twice; give each its own")
    if models and is_agent:
        raise ConfigError(
            "reward_models: an agent that drives itself has no conversation here; let it ask the model, such "
            "as a Judge, before it returns its reward"
        )
    if models and is_late:
        raise ConfigError(
            "reward_models: there is no sum before a late reward has come; leave them out, and add their "
            "scores in late_rewards.ask"
        )
    if isinstance(tasks, Tasks | Sequence):
        rows = [row for row in cast("Sequence[object]", tasks) if isinstance(row, BaseModel)]
        known = {f"task_{name}" for row in rows for name in type(row).model_fields}
        for model in models if rows else ():
            _check_fields(model, known)


def _check_fields(model: RewardModel, known: set[str]) -> None:
    asked = [name for name in model.names if name not in PLACES]
    if unknown := [name for name in asked if name not in known]:
        raise ConfigError(
            f"{model.where}: template names ${unknown[0]}; {nearest(unknown[0], sorted(known))}"
        )
