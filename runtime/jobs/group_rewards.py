"""Rewards that are told of a group's members together, once the last of them has ended."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import anyio
import numpy as np
from pydantic import JsonValue

from sostenuto.errors import EnvironmentFailure, JudgeError, boundary
from sostenuto.records import Trajectory
from sostenuto.runtime.jobs.finished import Finished, ask, finite
from sostenuto.runtime.jobs.rewarding import GroupRewards, named
from sostenuto.runtime.rendering.renderer import Renderer


class GroupJudge:
    """Of one job."""

    def __init__(self, rules: Mapping[str, GroupRewards], renderer: Renderer) -> None:
        """`rules` by the name of the environment; groups of another one keep their rewards."""
        self._rules = rules
        self._renderer = renderer
        self._functions = {
            name: named(rule.function, "group_rewards: function") for name, rule in rules.items()
        }

    async def judge(
        self, members: Sequence[Trajectory], environment: str, task: Mapping[str, JsonValue]
    ) -> tuple[Trajectory, ...]:
        """The members with their new rewards; ProgramError when there is not one for each in time."""
        if environment not in self._rules:
            return tuple(members)
        rule, function = self._rules[environment], self._functions[environment]
        doing = f"group_rewards of {members[0].group_id}"
        told: object = None
        with boundary(EnvironmentFailure, doing), anyio.move_on_after(rule.deadline_s) as scope:
            told = await ask(function, [Finished(member, task, self._renderer) for member in members])
        if scope.cancelled_caught:
            raise JudgeError(f"{doing}: no rewards within {rule.deadline_s:g} s")
        rewards = _read(told, len(members), doing)
        return tuple(replace(member, reward=reward) for member, reward in zip(members, rewards, strict=True))


def judge_of(rules: Mapping[str, GroupRewards | None], renderer: Renderer) -> GroupJudge | None:
    """By the name of the environment; None where each program's reward is its own."""
    given = {name: rule for name, rule in rules.items() if rule is not None}
    return GroupJudge(given, renderer) if given else None


def _read(told: object, members: int, doing: str) -> list[float]:
    if isinstance(told, np.ndarray):
        told = told.tolist()
    if not isinstance(told, Sequence) or isinstance(told, str):
        raise EnvironmentFailure(f"{doing}: returned {told!r:.80}; return one number for each member")
    rewards = [finite(one, doing) for one in cast("Sequence[object]", told)]
    if len(rewards) != members:
        raise EnvironmentFailure(
            f"{doing}: {len(rewards)} rewards for {members} members; return one for each, in their order"
        )
    return rewards
