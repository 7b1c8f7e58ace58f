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

    def __init__(self, rule: GroupRewards, renderer: Renderer) -> None:
        self._rule = rule
        self._renderer = renderer
        self._function = named(rule.function, "group_rewards: function")

    async def judge(
        self, members: Sequence[Trajectory], task: Mapping[str, JsonValue]
    ) -> tuple[Trajectory, ...]:
        """The members with their new rewards; ProgramError when there is not one for each in time."""
        doing = f"group_rewards of {members[0].group_id}"
        told: object = None
        with boundary(EnvironmentFailure, doing), anyio.move_on_after(self._rule.deadline_s) as scope:
            told = await ask(self._function, [Finished(member, task, self._renderer) for member in members])
        if scope.cancelled_caught:
            raise JudgeError(f"{doing}: no rewards within {self._rule.deadline_s:g} s")
        rewards = _read(told, len(members), doing)
        return tuple(replace(member, reward=reward) for member, reward in zip(members, rewards, strict=True))


def judge_of(rule: GroupRewards | None, renderer: Renderer) -> GroupJudge | None:
    """None where each program's reward is its own."""
    return None if rule is None else GroupJudge(rule, renderer)


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
