"""Tasks drawn by weight, and by how much there is left to learn from each.

- A task whose programs succeed half of the time says most about which of them was better: its weight is
  largest there, and `floor` at the ends, so that nothing is forgotten or given up.
- An ordinal once drawn stays the same draw; what is drawn next depends on what was observed until then.
  Who goes on from `state_dict` has the same estimates and the same draws.
"""

import math
import random
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Generic, TypeVar, cast

from pydantic import BaseModel, JsonValue

from sostenuto.envs.task import Draw, Tasks
from sostenuto.errors import ConfigError

TaskT = TypeVar("TaskT", bound=BaseModel)

_REMEMBERED = 4096
"""Draws; those before are of groups that have long come to their end."""


class Curriculum(Generic[TaskT]):
    """A source of tasks for a job, without end."""

    def __init__(
        self,
        tasks: Tasks[TaskT],
        *,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        by_difficulty: bool = True,
        floor: float = 0.1,
        decay: float = 0.9,
        seed: int = 0,
    ) -> None:
        """`weights`: one for each task in order, or by task id (1 for the others); 0 leaves a task out.

        `by_difficulty`: multiply them by floor + (1 - floor) * 4 p (1 - p), p a task's success so far.
        `decay`: what an observation weighs beside the next one, so that estimates follow the policy.
        """
        self._tasks = tasks
        self._weights = _checked(tasks, weights)
        self._by_difficulty = by_difficulty
        for name, value in (("floor", floor), ("decay", decay)):
            if not 0 < value <= 1:
                raise ConfigError(f"curriculum: {name} is {value}; give more than 0 and at most 1")
        self._floor = floor
        self._decay = decay
        self._seed = seed
        self._index = {task_id: index for index, task_id in enumerate(tasks.ids)}
        self._seen: dict[str, tuple[float, float]] = {}
        """By task id: discounted rewards, and how many."""
        self._drawn = OrderedDict[int, int]()

    def at(self, ordinal: int) -> Draw[TaskT]:
        """The draw with this number, from 0."""
        if ordinal not in self._drawn:
            self._drawn[ordinal] = self._choose(ordinal)
            if len(self._drawn) > _REMEMBERED:
                self._drawn.popitem(last=False)
        index = self._drawn[ordinal]
        return Draw(ordinal, ordinal // len(self._tasks), self._tasks.ids[index], self._tasks[index])

    def observe(self, task_id: str, reward: float) -> None:
        """A program on the task has ended with this reward; below 0 and above 1 count as those."""
        if task_id not in self._index or not math.isfinite(reward):
            return
        total, count = self._seen.get(task_id, (0.0, 0.0))
        self._seen[task_id] = (self._decay * total + min(max(reward, 0.0), 1.0), self._decay * count + 1)

    def success(self, task_id: str) -> float:
        """Estimated; one half with as much weight as one observation before anything is known."""
        total, count = self._seen.get(task_id, (0.0, 0.0))
        return (total + 0.5) / (count + 1)

    def weight(self, task_id: str) -> float:
        """What the task is drawn by now, beside the others'."""
        base = self._weights[self._index[task_id]]
        if not self._by_difficulty:
            return base
        p = self.success(task_id)
        return base * (self._floor + (1 - self._floor) * 4 * p * (1 - p))

    def state_dict(self) -> dict[str, JsonValue]:
        ids = self._tasks.ids
        return {
            "seen": {task_id: [total, count] for task_id, (total, count) in self._seen.items()},
            "drawn": [[ordinal, ids[index]] for ordinal, index in self._drawn.items()],
        }

    def load_state_dict(self, state: Mapping[str, JsonValue]) -> None:
        """ConfigError when it is not of these tasks."""
        seen, drawn = state.get("seen"), state.get("drawn")
        if not isinstance(seen, dict) or not isinstance(drawn, list):
            raise ConfigError("curriculum: the state has no 'seen' and 'drawn'; give what state_dict gave")
        pairs = cast("list[tuple[int, str]]", drawn)
        if unknown := ({task_id for _, task_id in pairs} | seen.keys()) - self._index.keys():
            raise ConfigError(f"curriculum: the state has a task {min(unknown)!r} that is not among these")
        self._seen = {task_id: (v[0], v[1]) for task_id, v in cast("dict[str, list[float]]", seen).items()}
        self._drawn = OrderedDict((ordinal, self._index[task_id]) for ordinal, task_id in pairs)

    def _choose(self, ordinal: int) -> int:
        sums = list(accumulate(self.weight(task_id) for task_id in self._tasks.ids))
        place = random.Random(f"{self._seed}:curriculum:{ordinal}").random() * sums[-1]
        return bisect_right(sums, place, hi=len(sums) - 1)


def _checked(tasks: Tasks[TaskT], weights: Mapping[str, float] | Sequence[float] | None) -> tuple[float, ...]:
    if isinstance(weights, Mapping):
        if unknown := weights.keys() - set(tasks.ids):
            raise ConfigError(f"curriculum: weights has {min(unknown)!r}, which is the id of no task")
        given = tuple(weights.get(task_id, 1.0) for task_id in tasks.ids)
    else:
        given = (1.0,) * len(tasks) if weights is None else tuple(weights)
    if len(given) != len(tasks):
        raise ConfigError(f"curriculum: {len(given)} weights for {len(tasks)} tasks; give one for each")
    if not all(math.isfinite(weight) and weight >= 0 for weight in given) or not any(given):
        raise ConfigError("curriculum: weights must be finite, none below 0 and one above it")
    return given
