"""What a job says of rewards that are not their programs' alone: those of groups, and late ones.  Values."""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from sostenuto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """Rewards that depend on all members of a group, such as ranks or how much their answers differ.

    Asked when the last member has ended, before anything else is decided about the group.
    """

    function: Callable[..., Any] | str
    """Or `module:function`.  Called with the members that can be trained, a list of `Finished`; returns one
    finite number for each, in their order, that takes the place of its reward.  May be async."""
    deadline_s: float = 60.0

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        _check_deadline("group_rewards", self.deadline_s)
        named(self.function, "group_rewards: function")


@dataclass(frozen=True, slots=True)
class LateRewards:
    """Rewards that are given after a program has ended: `reward` of its environment returned `later()`."""

    deadline_s: float = 3600.0
    """From its end; a program whose reward has not come by then is failed(infrastructure)."""
    ask: Callable[..., Any] | str | None = None
    """Or `module:function`.  Called with a `Finished`; returns its reward.  May be async.  None:
    `runtime.reward(program_id, value)` alone says it."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        _check_deadline("late_rewards", self.deadline_s)
        if self.ask is not None:
            named(self.ask, "late_rewards: ask")


def named(function: Callable[..., Any] | str, field: str) -> Callable[..., Any]:
    """The function that `module:function` is; ConfigError, under the name of `field`, when there is none."""
    if not isinstance(function, str):
        return function
    module_name, _, name = function.partition(":")
    try:
        found: object = getattr(importlib.import_module(module_name), name, None)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{field} {function!r}: {error}; give `module:function` of something installed"
        ) from error
    if not callable(found):
        raise ConfigError(f"{field} {function!r}: no function {name!r} in {module_name}")
    return found


def _check_deadline(field: str, deadline_s: float) -> None:
    if not 0 < deadline_s < math.inf:
        raise ConfigError(f"{field}: deadline_s is {deadline_s}; give seconds above 0")
