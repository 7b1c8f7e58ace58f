"""Where a job's tasks come from: one source, or several that are mixed by weight."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from pydantic import BaseModel

from sostenuto.envs.task import Draw, Tasks


class TaskSource(Protocol):
    """Tasks by ordinal: a finite stream, or one that draws new tasks without end."""

    def at(self, ordinal: int) -> Draw[Any]:
        """The same draw for the same ordinal, always; IndexError beyond the end."""
        ...


NAMED = ":"
"""After the name of an environment, before the id that a task has there."""

Given = Tasks[Any] | Sequence[BaseModel] | TaskSource


def source_of(tasks: Given, seed: int) -> TaskSource:
    """A sequence is drawn from in a new seeded order each epoch, without end."""
    if isinstance(tasks, Tasks):
        return tasks.stream(seed=seed)
    if isinstance(tasks, Sequence):
        return Tasks(tasks).stream(seed=seed)
    return tasks


class Placed:
    """A TaskSource: the draws of one environment among several of a job.

    Ids of tasks have its name before them, since two environments may have a task of one id.
    """

    def __init__(self, source: TaskSource, part: int, name: str) -> None:
        self._source = source
        self._part = part
        self._name = name

    def at(self, ordinal: int) -> Draw[Any]:
        draw = self._source.at(ordinal)
        return replace(draw, part=self._part, task_id=f"{self._name}{NAMED}{draw.task_id}")


class Mixed:
    """A TaskSource: at every draw the source comes up that is furthest behind its share."""

    def __init__(self, sources: Sequence[tuple[float, TaskSource]]) -> None:
        """With their shares of 1; a share of zero never comes up."""
        self._sources = [(share, source) for share, source in sources if share > 0]
        self._places: list[tuple[int, int]] = []
        """Of each draw so far: which source, and which of its own draws."""
        self._drawn = [0] * len(self._sources)

    def at(self, ordinal: int) -> Draw[Any]:
        """The same draw for the same ordinal, always; IndexError beyond the end of the source it is of."""
        while len(self._places) <= ordinal:
            self._places.append(self._next())
        source, own = self._places[ordinal]
        return replace(self._sources[source][1].at(own), ordinal=ordinal)

    def _next(self) -> tuple[int, int]:
        count = len(self._places) + 1
        behind = [share * count - drawn for (share, _), drawn in zip(self._sources, self._drawn, strict=True)]
        source = behind.index(max(behind))
        self._drawn[source] += 1
        return source, self._drawn[source] - 1
