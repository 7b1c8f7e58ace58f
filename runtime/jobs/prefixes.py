"""Where a student begins besides its own prompts: in the middle of what others have done.  Values."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sostenuto.errors import ConfigError
from sostenuto.runtime.jobs.teacher import Teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Histories that the student continues by one turn each; what it says at one is no part of another."""

    share: float
    """Of the groups; the other groups are whole rollouts, or of other prefixes."""
    run: Path | None = None
    """Run directory whose records are continued, token by token: a teacher's, with the same tokenizer."""
    conversations: Path | None = None
    """JSON lines in its place: `messages` as in a chat, perhaps `tools`, and `task` with what teachers are
    assigned by."""
    from_turn: int = 2
    """The first turn that is made anew; 1: also the one after the prompt alone."""
    teacher: str = ""
    """Who teaches these; empty: whoever the `task` of a conversation is assigned to."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if (self.run is None) == (self.conversations is None):
            raise ConfigError("prefixes: give `run` or `conversations`, one of them")
        if not 0 < self.share <= 1:
            raise ConfigError(f"prefixes: share is {self.share}; give more than 0 and at most 1")
        if self.from_turn < 1:
            raise ConfigError(f"prefixes: from_turn is {self.from_turn}; turns are counted from 1")

    @property
    def where(self) -> str:
        return f"prefixes: {self.run or self.conversations}"


def check_prefixes(prefixes: Sequence[Prefixes], teachers: Sequence[Teacher]) -> None:
    """ConfigError unless somebody teaches what has no reward, and the shares leave nothing below zero."""
    if prefixes and not teachers:
        raise ConfigError("prefixes: a turn from a history has no reward, and nobody teaches; give teachers")
    if sum(one.share for one in prefixes) > 1 + 1e-9:
        shares = " + ".join(f"{one.share:g}" for one in prefixes)
        raise ConfigError(f"prefixes: shares of {shares} are more than all groups; give 1 or less together")
    names = {teacher.name for teacher in teachers}
    for one in prefixes:
        if one.teacher and one.teacher not in names:
            raise ConfigError(
                f"{one.where}: no teacher is named {one.teacher!r}; there are {', '.join(sorted(names))}"
            )
        if one.run is not None and not one.teacher and not any(t.is_default for t in teachers):
            raise ConfigError(
                f"{one.where}: records do not say whose tasks they are of; give `teacher`, who teaches these"
            )
