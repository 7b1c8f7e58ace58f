"""The replay CSV of TraceLab: one row per model call, `id` names the session.

- `input_len` are the tokens that are new in this round, `prefix_len` those that were in the context
  before: a prompt has both.  Times are milliseconds; the arrival is the session's.
- A prefix of the first round was cached before the session began.  Sessions that begin with equally long
  ones have it in common; other lengths are other prompts.
- A prompt of less than half of the context before it is a compaction: a new program begins there, after
  the tool times that precede it.  Any other rewriting keeps the longer context.
- There are no groups, no environments and no names of tools.  Written to this format a workload loses
  them, and a group's prefix counts for each member.
"""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from pydantic import AliasChoices, Field

from sostenuto.errors import ConfigError
from sostenuto.runtime.simulation.plan import Plan, Workload
from sostenuto.runtime.simulation.traces.reading import Call, Row, parsed, text_of, turns_of
from sostenuto.scheduler.kv import Segment
from sostenuto.types import GroupId, ProgramId

COLUMNS = ("id", "input_len", "output_len", "arrival_time", "round_idx", "tool_wait_after_ms", "prefix_len")
_COMPACTED = 0.5


class _Round(Row):
    id: str = Field(min_length=1, validation_alias=AliasChoices("id", "session_id"))
    input_len: int = Field(ge=0)
    output_len: int = Field(ge=1)
    arrival_time: float = Field(ge=0)
    round_idx: int = Field(ge=0)
    tool_wait_after_ms: float = Field(ge=0)
    prefix_len: int = Field(ge=0)


@dataclass(slots=True)
class _Part:
    """A stretch of a session between two compactions."""

    arrival_s: float
    calls: list[Call]


def read_tracelab(path: Path) -> Workload:
    sessions: dict[str, list[_Round]] = {}
    for where, round_ in _rounds(path):
        rounds = sessions.setdefault(round_.id, [])
        _check_place(round_, rounds, where)
        rounds.append(round_)
    if not sessions:
        raise ConfigError(f"{path}: no rows after the header; give a trace with at least one program")
    plans = [plan for rounds in sessions.values() for plan in _plans(path.stem, rounds)]
    plans.sort(key=lambda plan: plan.arrival_s)
    return Workload(path.stem, tuple(plans))


def write_tracelab(workload: Workload, path: Path) -> None:
    holders = Counter(segment for plan in workload.programs for segment in plan.shared)
    common = sum(s.tokens for s, count in holders.items() if count == len(workload.programs))
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for plan in workload.programs:
            rows.writerows(_rows(plan, common))


def _rounds(path: Path) -> Iterator[tuple[str, _Round]]:
    reader = csv.DictReader(StringIO(text_of(path)))
    header = ["id" if name == "session_id" else name for name in reader.fieldnames or ()]
    if missing := [column for column in COLUMNS if column not in header]:
        raise ConfigError(
            f"{path}:1: no column {', '.join(missing)}; the header has to name {','.join(COLUMNS)}"
        )
    for row in reader:
        where = f"{path}:{reader.line_num}"
        yield where, parsed(_Round, row, where)


def _check_place(round_: _Round, before: Sequence[_Round], where: str) -> None:
    if round_.round_idx != len(before):
        raise ConfigError(
            f"{where}: round_idx is {round_.round_idx} where {len(before)} comes next for {round_.id!r}; "
            "number the rounds of a session from 0 on without gaps, and sort them"
        )
    if not before and not round_.input_len:
        raise ConfigError(f"{where}: input_len is 0 in a first round; a program begins with at least 1 token")


def _plans(name: str, rounds: Sequence[_Round]) -> list[Plan]:
    prefix = rounds[0].prefix_len
    shared = (Segment(f"{name}/{prefix}", prefix),) if prefix else ()
    return [
        Plan(
            id=ProgramId(rounds[0].id if not index else f"{rounds[0].id}+{index}"),
            group=GroupId(rounds[0].id if not index else f"{rounds[0].id}+{index}"),
            group_size=1,
            shared=shared if part.calls[0].prompt_tokens > prefix else (),
            prompt_tokens=part.calls[0].prompt_tokens
            - (prefix if part.calls[0].prompt_tokens > prefix else 0),
            turns=turns_of(part.calls),
            arrival_s=part.arrival_s,
        )
        for index, part in enumerate(_parts(rounds))
    ]


def _parts(rounds: Sequence[_Round]) -> list[_Part]:
    parts: list[_Part] = []
    context, at_s = 0, rounds[0].arrival_time / 1000
    for round_ in rounds:
        call = Call(round_.prefix_len + round_.input_len, round_.output_len, round_.tool_wait_after_ms / 1000)
        if not parts or call.prompt_tokens < _COMPACTED * context:
            parts.append(_Part(at_s, []))
            context = 0
        parts[-1].calls.append(call)
        context = max(context, call.prompt_tokens) + call.output_tokens
        at_s += call.wait_s
    return parts


def _rows(plan: Plan, common_tokens: int) -> Iterator[tuple[str, int, int, float, int, float, int]]:
    prefix, new = common_tokens, plan.shared_tokens - common_tokens + plan.prompt_tokens
    for index, turn in enumerate(plan.turns):
        yield (
            plan.id, new, turn.output_tokens, plan.arrival_s * 1000, index, turn.tool_s * 1000, prefix,
        )  # fmt: skip
        prefix, new = prefix + new + turn.output_tokens, turn.result_tokens
