"""A program that has run to its end, as functions of the user's see it."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from numbers import Real
from typing import Any

import numpy as np
from anyio import to_thread
from pydantic import JsonValue

from sostenuto.errors import EnvironmentFailure
from sostenuto.records import Span, Trajectory
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.types import GroupId, ProgramId


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    record: Trajectory
    """Token by token."""
    task: Mapping[str, JsonValue]
    renderer: Renderer = field(repr=False)

    @property
    def program_id(self) -> ProgramId:
        return self.record.program_id

    @property
    def group_id(self) -> GroupId:
        return self.record.group_id

    @property
    def task_id(self) -> str:
        return self.record.task_id

    @property
    def reward(self) -> float | None:
        """So far."""
        return self.record.reward

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.record.metrics

    @property
    def said(self) -> tuple[str, ...]:
        """The text of each turn of the policy, in the order in which they began."""
        turns = [turn for sequence in self.record.sequences for turn in _turns(sequence)]
        turns.sort(key=lambda turn: turn[0].started_s)
        return tuple(self._text(turn) for turn in turns)

    @property
    def answer(self) -> str:
        """The last of them; empty when there is none."""
        return self.said[-1] if self.said else ""

    def _text(self, turn: list[Span]) -> str:
        ids = np.concatenate([span.token_ids for span in turn]).tolist()
        return self.renderer.parse(ids, finished=True).message.content


async def ask(function: Callable[..., Any], *arguments: object) -> object:
    """What a function of the user's returns: an async one here, another in a thread that may be left."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    returned = await to_thread.run_sync(partial(function, *arguments), abandon_on_cancel=True)
    return await returned if inspect.isawaitable(returned) else returned


def finite(told: object, doing: str) -> float:
    """A reward that a function of the user's returned; EnvironmentFailure for anything that is none."""
    if not isinstance(told, Real) or not math.isfinite(told):
        raise EnvironmentFailure(f"{doing}: returned {told!r:.80}; return a finite number")
    return float(told)


def _turns(sequence: tuple[Span, ...]) -> list[list[Span]]:
    """What was sampled in one go; context that another sequence has, too, is none."""
    runs = groupby(sequence, key=lambda span: bool(span.mask.any()))
    return [list(spans) for trained, spans in runs if trained]
