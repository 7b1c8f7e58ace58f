"""What the readers have in common: lines with their numbers, errors that name them, calls made into turns."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from sostenuto.errors import ConfigError
from sostenuto.runtime.simulation.plan import PlannedTurn
from sostenuto.scheduler.kv import Segment

UNNAMED_TOOL = "tool"
"""In traces that do not say which tool was called."""


class Row(BaseModel):
    """One line of a trace."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True)
class Call:
    """One model call of a recorded program."""

    prompt_tokens: int
    """All that was sent."""
    output_tokens: int
    wait_s: float = 0.0
    """From its answer to the next call."""
    tool: str = UNNAMED_TOOL


def text_of(path: Path) -> str:
    """ConfigError for what is no readable text, or holds none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a trace: {error}") from error
    if not text.strip():
        raise ConfigError(f"{path}: the file is empty; give a trace with at least one program")
    return text


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, counted from 1."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, line


def parsed(row: type[R], values: Mapping[str, Any], where: str) -> R:
    try:
        return row.model_validate(values)
    except ValidationError as error:
        raise _named(error, where) from error


def parsed_json(row: type[R], line: str, where: str) -> R:
    try:
        return row.model_validate_json(line)
    except ValidationError as error:
        raise _named(error, where) from error


def turns_of(calls: Sequence[Call]) -> tuple[PlannedTurn, ...]:
    """The turns in which a context grows along these prompts.

    A plan's context only grows.  Where a prompt is shorter than what went before it (reasoning that was
    dropped, a history that was rewritten) nothing is appended, and the context stays the longer one.
    """
    turns: list[PlannedTurn] = []
    context = calls[0].prompt_tokens
    for call, following in pairwise(calls):
        context += call.output_tokens
        appended = max(0, following.prompt_tokens - context)
        context += appended
        turns.append(PlannedTurn(call.output_tokens, call.tool, call.wait_s, appended))
    return (*turns, PlannedTurn(calls[-1].output_tokens))


def common_prefixes(
    prompts: Sequence[Sequence[int | str]], block_tokens: int, name: str
) -> list[tuple[Segment, ...]]:
    """For each prompt, given as its blocks, what it has in common with others; outermost first.

    A block's value stands for it and for all that precedes it.  Blocks that the same number of prompts
    begin with make one segment.
    """
    holders = Counter(block for prompt in prompts for block in prompt)
    return [
        tuple(
            _segment(list(run), block_tokens, name)
            for _, run in groupby(takewhile(lambda block: holders[block] > 1, prompt), holders.__getitem__)
        )
        for prompt in prompts
    ]


def _segment(run: list[int | str], block_tokens: int, name: str) -> Segment:
    return Segment(f"{name}/{run[-1]}", len(run) * block_tokens)


def _named(error: ValidationError, where: str) -> ConfigError:
    """Only the first: the others are often its consequences."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "missing":
        return ConfigError(f"{where}: {_field(first['loc'])} is missing; every line needs it")
    if first["type"] == "json_invalid":
        return ConfigError(f"{where}: not a line of JSON ({first['msg']}); delete or repair it")
    return ConfigError(f"{where}: {_field(first['loc'])} is {first['input']!r}: {first['msg']}")


def _field(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location) or "the line"
