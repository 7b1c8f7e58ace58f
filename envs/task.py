"""Tasks: checked rows of a source, and the endless or counted order in which a job draws them.

- Every row is a valid task before the first program starts; an error names file, row and field.
- A draw is a function of (tasks, seed, ordinal): a resumed run goes on exactly where it was.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel, JsonValue, ValidationError

from sostenuto.envs.parquet import parquet_rows
from sostenuto.errors import ConfigError

TaskT = TypeVar("TaskT", bound=BaseModel)
RowT = TypeVar("RowT", bound=BaseModel)

_SHOWN_ERRORS = 5


@dataclass(frozen=True, slots=True)
class Draw(Generic[TaskT]):
    """One task as it comes up in a stream."""

    ordinal: int
    epoch: int
    task_id: str
    task: TaskT
    part: int = 0
    """Which of the environments that a job mixes it is of."""

    def payload(self) -> dict[str, JsonValue]:
        """The task as it travels."""
        return self.task.model_dump(mode="json")


class Tasks(Generic[TaskT]):
    """A fixed, non-empty sequence of tasks, each with an id that does not depend on its place."""

    def __init__(self, tasks: Iterable[TaskT], *, where: str = "tasks") -> None:
        """From Python.  ConfigError for no task at all, and for two different ones with one id."""
        self._tasks = tuple(tasks)
        for index, task in enumerate(self._tasks):
            if not isinstance(cast("object", task), BaseModel):
                raise ConfigError(
                    f"{where}, row {index + 1}: not a pydantic model but {type(task).__name__}; "
                    "give Tasks.from_rows(MODEL, rows)"
                )
        if not self._tasks:
            raise ConfigError(f"{where}: no task in it")
        self._ids = tuple(task_id(task) for task in self._tasks)
        self._refuse_shared_ids(where)

    @staticmethod
    def from_rows(
        model: type[RowT], rows: Iterable[Mapping[str, Any]], *, where: str = "tasks"
    ) -> "Tasks[RowT]":
        """From mappings, each checked against the model."""
        places = ((f"row {n}", row) for n, row in enumerate(rows, 1))
        return Tasks(_checked(model, places, where), where=where)

    @staticmethod
    def from_jsonl(model: type[RowT], path: str | Path) -> "Tasks[RowT]":
        """From a file with one JSON object a line; empty lines are skipped."""
        where = _existing(path)
        return Tasks(_checked(model, _json_lines(where), str(where)), where=str(where))

    @staticmethod
    def from_parquet(model: type[RowT], path: str | Path) -> "Tasks[RowT]":
        """From a Parquet file; needs the `parquet` extra."""
        where = _existing(path)
        return Tasks.from_rows(model, parquet_rows(where), where=str(where))

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[TaskT]:
        return iter(self._tasks)

    def __getitem__(self, index: int) -> TaskT:
        return self._tasks[index]

    @property
    def ids(self) -> tuple[str, ...]:
        return self._ids

    def stream(
        self, *, seed: int = 0, epochs: int | None = None, shuffle: bool = True
    ) -> "TaskStream[TaskT]":
        """The tasks over `epochs` (None: endlessly), in an order of its own in each when shuffled."""
        if epochs is not None and epochs < 1:
            raise ConfigError(f"epochs is {epochs}; give at least 1, or None for no end")
        return TaskStream(self, seed, epochs, shuffle)

    def _refuse_shared_ids(self, where: str) -> None:
        first: dict[str, int] = {}
        for index, identity in enumerate(self._ids):
            earlier = first.setdefault(identity, index)
            if self._tasks[earlier] != self._tasks[index]:
                raise ConfigError(
                    f"{where}: rows {earlier + 1} and {index + 1} differ and share the id {identity!r}"
                )


class TaskStream(Generic[TaskT]):
    """Draws by ordinal.  Holds no position: whoever draws keeps it, and says where to go on."""

    def __init__(self, tasks: Tasks[TaskT], seed: int, epochs: int | None, shuffle: bool) -> None:
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self.total = None if epochs is None else epochs * len(tasks)
        """How many draws there are; None: no end."""

    def at(self, ordinal: int) -> Draw[TaskT]:
        """The draw with this number, from 0; IndexError beyond the last epoch."""
        if ordinal < 0 or (self.total is not None and ordinal >= self.total):
            raise IndexError(f"draw {ordinal} of a stream of {self.total}")
        epoch, place = divmod(ordinal, len(self._tasks))
        index = _order(len(self._tasks), self._seed, epoch)[place] if self._shuffle else place
        return Draw(ordinal, epoch, self._tasks.ids[index], self._tasks[index])

    def draws(self, start: int = 0) -> Iterator[Draw[TaskT]]:
        """All draws from `start` on."""
        while self.total is None or start < self.total:
            yield self.at(start)
            start += 1


def task_id(task: BaseModel) -> str:
    """The task's own `id` if its model has one, else a hash of its content."""
    own = getattr(task, "id", None) if "id" in type(task).model_fields else None
    if own is not None:
        return str(own)
    content = json.dumps(task.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()[:16]


@lru_cache(maxsize=8)
def _order(length: int, seed: int, epoch: int) -> list[int]:
    order = list(range(length))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def _existing(path: str | Path) -> Path:
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file of tasks (looked from {Path.cwd()})")
    return Path(path)


def _json_lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf-8") as file:
        try:
            yield from ((f"row {n}", line) for n, line in enumerate(file, 1) if line.strip())
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 ({error}); save it as UTF-8") from error


def _checked(
    model: type[TaskT], rows: Iterable[tuple[str, str | Mapping[str, Any]]], where: str
) -> Iterator[TaskT]:
    """The rows as tasks, or one ConfigError with the first few that are wrong."""
    wrong: list[str] = []
    for place, row in rows:
        try:
            task = model.model_validate_json(row) if isinstance(row, str) else model.model_validate(row)
        except ValidationError as error:
            wrong += [_field_error(place, item["loc"], item["msg"]) for item in error.errors()]
            if len(wrong) >= _SHOWN_ERRORS:
                break
        else:
            yield task
    if wrong:
        shown = "; ".join(wrong[:_SHOWN_ERRORS])
        more = "; and more" if len(wrong) >= _SHOWN_ERRORS else ""
        raise ConfigError(f"{where}: {shown}{more} (tasks of {model.__name__})")


def _field_error(place: str, loc: tuple[int | str, ...], message: str) -> str:
    field = f", field {'.'.join(map(str, loc))!r}" if loc else ""
    return f"{place}{field}: {message}"
