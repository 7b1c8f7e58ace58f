"""Several environments in one job.  Values."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, JsonValue

from sostenuto.envs.agent import Agent
from sostenuto.envs.environment import Environment
from sostenuto.envs.registry import environment_ref
from sostenuto.envs.task import Tasks
from sostenuto.errors import ConfigError
from sostenuto.runtime.jobs.rewarding import GroupRewards
from sostenuto.runtime.jobs.sources import NAMED, Given
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.types import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedIn:
    """One more environment of a job, with groups, rewards and evaluations of its own."""

    env: type[Environment[Any]]
    tasks: Given
    name: str = ""
    """In reports, and before the ids of its tasks; empty: that of the class."""
    weight: float = 1.0
    """Its share of the groups is this, of the sum of all weights of the job."""
    group_size: int | None = None
    """Programs on one task; None: as the algorithm has it."""
    options: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """Keyword arguments of the environment."""
    limits: Limits | None = None
    """None: as the job has them."""
    eval_tasks: Tasks[Any] | Sequence[BaseModel] = ()
    """Evaluated apart, whenever the job evaluates."""
    group_rewards: GroupRewards | None = None

    @property
    def called(self) -> str:
        return self.name or self.env.__name__

    @property
    def is_agent(self) -> bool:
        return issubclass(self.env, Agent)

    def environment(self) -> EnvironmentRef:
        """As it travels; ConfigError for a class that cannot run."""
        return environment_ref(self.env, **self.options)


def check_mixed(parts: Sequence[MixedIn], *, fewest: int, total_tokens: int | None) -> None:
    """ConfigError for parts of one job that cannot be told apart, or learnt from.  The first is its own.

    `fewest`: members that a group is compared among.
    """
    names = [part.called for part in parts]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"mixed: two environments are called {min(twice)!r}; give one another name")
    if strangers := _of_one_name(parts):
        raise ConfigError(f"mixed: two classes are called {strangers!r}; rename one of them")
    for part in parts:
        _check(part, fewest, total_tokens)


def _check(part: MixedIn, fewest: int, total_tokens: int | None) -> None:
    where = f"mixed: {part.called}"
    if NAMED in part.called:
        raise ConfigError(f"{where}: its name has a {NAMED!r}; give it one without")
    if not 0 < part.weight < math.inf:
        raise ConfigError(f"{where}: weight is {part.weight}; give more than 0")
    if part.group_size is not None and part.group_size < fewest:
        raise ConfigError(
            f"{where}: group_size is {part.group_size}, and the advantage compares the members of a group; "
            f"give {fewest} or more"
        )
    if part.group_rewards is not None and part.group_size == 1:
        raise ConfigError(
            f"{where}: group_rewards: group_size is 1, and one program is no group; give 2 or more, or "
            "leave it out"
        )
    asked = part.limits and part.limits.total_tokens
    if asked is not None and total_tokens is not None and asked > total_tokens:
        raise ConfigError(
            f"{where}: limits.total_tokens is {asked}, the job's is {total_tokens}, which engines are opened "
            "for; raise the job's"
        )


def _of_one_name(parts: Sequence[MixedIn]) -> str | None:
    classes: dict[str, type] = {}
    for part in parts:
        if classes.setdefault(part.env.__name__, part.env) is not part.env:
            return part.env.__name__
    return None
