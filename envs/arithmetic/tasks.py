"""Sums of the reasoning-gym collection, drawn from a seed.

- Every question belongs to one side, by a hash of its text: no held-out question is ever a training
  question, whatever the seeds.
- No question comes twice in one list.
- A task carries its answer, so that only whoever draws tasks needs the collection installed.
"""

import hashlib
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from random import Random
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from sostenuto.errors import ConfigError

HELD_OUT_ONE_IN = 8
_CHUNK = 500
_SEED_BITS = 48


class SumTask(BaseModel):
    """One question with its answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    question: str = Field(min_length=1)
    expression: str = Field(pattern=r"^[0-9]+( [-+] [0-9]+)*$")
    answer: int

    @property
    def is_held_out(self) -> bool:
        """Which side it belongs to; the same on every machine."""
        return hashlib.blake2b(self.question.encode(), digest_size=1).digest()[0] % HELD_OUT_ONE_IN == 0


def training_tasks(count: int, seed: int) -> list[SumTask]:
    """Draw `count` questions of the training side; equal seeds give equal tasks."""
    return _draw(count, f"chain_sum training {seed}", held_out=False)


def held_out_tasks(count: int, seed: int) -> list[SumTask]:
    """Draw `count` questions of which none is ever a training question."""
    return _draw(count, f"chain_sum held out {seed}", held_out=True)


def _draw(count: int, seed: str, *, held_out: bool) -> list[SumTask]:
    if count < 1:
        raise ConfigError(f"count: {count}; give at least 1")
    seen: set[str] = set()
    return list(islice(_unseen(seed, held_out, seen), count))


def _unseen(seed: str, held_out: bool, seen: set[str]) -> Iterator[SumTask]:
    for task in _stream(seed):
        if task.is_held_out == held_out and task.question not in seen:
            seen.add(task.question)
            yield task


def _stream(seed: str) -> Iterator[SumTask]:
    """Questions without end.  The collection seeds an item with its number plus the seed of its dataset,
    so that datasets of near seeds overlap; chunks have seeds that are far apart."""
    seeds = Random(seed)
    while True:
        for item in _chunk(seeds.getrandbits(_SEED_BITS)):
            yield SumTask(
                question=item["question"],
                expression=item["metadata"]["expression"],
                answer=int(item["answer"]),
            )


def _chunk(seed: int) -> Any:  # noqa: ANN401 - the collection has no types of its own
    try:
        collection: Any = import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            f"tasks: reasoning-gym cannot be imported ({error}); pip install 'sostenuto[examples]'"
        ) from error
    return collection.create_dataset("chain_sum", seed=seed, size=_CHUNK)
