"""The worlds of the storeroom, drawn from a seed.

- Every record belongs to one side, by a hash of its own text: no record of a held-out world is
  ever in a training world, whatever the seeds.
- Words and file names are the same on both sides; numbers, pairings and places are not.
"""

import hashlib
import re
from collections.abc import Iterator
from random import Random
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

NOUNS = (
    "plum", "pear", "fig", "lime", "kiwi", "nut", "bean", "pea", "corn", "rice", "oat", "rye", "beet",
    "leek", "kale", "yam", "herb", "mint", "salt", "tea", "jam", "egg", "ham", "soup", "milk", "cake",
    "pie", "bun", "roll", "loaf", "bowl", "cup", "mug", "jar", "pot", "pan", "lid", "fork", "spoon",
    "knife", "plate", "tray", "sack", "box", "bag", "crate", "rope", "nail", "bolt", "screw", "hook",
    "ring", "coin", "lamp", "bulb", "torch", "brush", "comb", "soap", "towel", "sock", "glove", "scarf",
    "hat",
)  # fmt: skip
PLACES = (
    "oak", "elm", "ash", "fir", "yew", "pine", "birch", "maple", "cedar", "beech", "alder", "larch",
    "willow", "aspen", "hazel", "holly", "rowan", "spruce", "poplar", "linden",
)  # fmt: skip
FILES_IN_WORLD = 6
SMALLEST_COUNT = 2
LARGEST_COUNT = 49
HELD_OUT_ONE_IN = 8
FILE_NAME = re.compile(r"[a-z]{1,32}\.txt")

FileName = Annotated[str, Field(pattern=rf"^{FILE_NAME.pattern}$")]


class Record(BaseModel):
    """How many of one thing are old and how many are new."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    word: str = Field(pattern=r"^[a-z]{1,32}$")
    old: int = Field(ge=0, le=999_999)
    new: int = Field(ge=0, le=999_999)

    @property
    def line(self) -> str:
        """As it stands in the file."""
        return f"{self.word}:{self.old} old,{self.new} new"

    @property
    def total(self) -> int:
        return self.old + self.new

    @property
    def is_held_out(self) -> bool:
        """Which side it belongs to; the same on every machine."""
        return hashlib.blake2b(self.line.encode(), digest_size=1).digest()[0] % HELD_OUT_ONE_IN == 0


class StoreroomTask(BaseModel):
    """One world and the word that is asked for, which is in exactly one of its files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    word: str
    files: dict[FileName, Record]
    """Record of each file, by name such as `oak.txt`."""

    @model_validator(mode="after")
    def _is_answerable(self) -> Self:
        places = [name for name, record in self.files.items() if record.word == self.word]
        if len(places) != 1:
            raise ValueError(f"word {self.word!r} must be in exactly one file; it is in {places or 'none'}")
        return self

    @property
    def question(self) -> str:
        return f"How many {self.word} in all?"

    @property
    def file(self) -> str:
        """Where the answer is."""
        return next(name for name, record in self.files.items() if record.word == self.word)

    @property
    def record(self) -> Record:
        return self.files[self.file]

    @property
    def answer(self) -> int:
        return self.record.total


def training_tasks(seed: int) -> Iterator[StoreroomTask]:
    """Draw worlds of the training side without end; equal seeds give equal tasks."""
    rng = Random(f"storeroom training {seed}")
    while True:
        yield _draw_task(rng, held_out=False)


def held_out_tasks(count: int, seed: int) -> list[StoreroomTask]:
    """Draw `count` worlds of which no record is ever in a training world."""
    rng = Random(f"storeroom held out {seed}")
    return [_draw_task(rng, held_out=True) for _ in range(count)]


def _draw_task(rng: Random, *, held_out: bool) -> StoreroomTask:
    words = rng.sample(NOUNS, FILES_IN_WORLD)
    places = rng.sample(PLACES, FILES_IN_WORLD)
    files = {
        f"{place}.txt": _draw_record(rng, word, held_out=held_out)
        for place, word in zip(places, words, strict=True)
    }
    return StoreroomTask(word=rng.choice(words), files=files)


def _draw_record(rng: Random, word: str, *, held_out: bool) -> Record:
    while True:
        old, new = (rng.randint(SMALLEST_COUNT, LARGEST_COUNT) for _ in range(2))
        record = Record(word=word, old=old, new=new)
        if record.is_held_out == held_out:
            return record
