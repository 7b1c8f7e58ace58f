"""Our own JSONL: a header, then one program a line.  Live runs are recorded in it, too.

    {"format": "sostenuto-trace", "version": 1, "name": "swe-light", "concurrency": 64}
    {"id": "p0", "prompt_tokens": 900, "turns": [{"output_tokens": 40, "tool": "bash", "tool_s": 1.5, ...}]}

- The last line of a recording that broke off half way is dropped, and that is said; a broken line
  anywhere else is an error.
- Arrivals count from the first; a workload without `concurrency` comes in the order of its arrivals.
- What programs have in common is named (`shared`), or found from the hashes of their prompts' blocks
  (`prompt_blocks`), each of which stands for its block and all before it.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt, field_validator

from sostenuto.errors import ConfigError
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn, Workload
from sostenuto.runtime.simulation.traces.reading import (
    Row,
    common_prefixes,
    numbered_lines,
    parsed_json,
    text_of,
)
from sostenuto.scheduler.events import SandboxClaim
from sostenuto.scheduler.kv import Segment
from sostenuto.types import GroupId, ProgramId

FORMAT = "sostenuto-trace"
BLOCK_TOKENS = 64
"""Of `prompt_blocks`."""

_log = logging.getLogger(__name__)


class _Strict(Row, extra="forbid"):
    pass


class Header(_Strict):
    format: Literal["sostenuto-trace"] = FORMAT
    version: Literal[1] = 1
    name: str
    concurrency: PositiveInt | None = None
    tool_concurrency: dict[str, PositiveInt] = Field(default_factory=dict[str, PositiveInt])


class _Segment(_Strict):
    key: str
    tokens: int = Field(gt=0)


class _Turn(_Strict):
    output_tokens: int = Field(ge=1)
    tool: str | None = None
    tool_s: float = Field(default=0.0, ge=0)
    result_tokens: int = Field(default=0, ge=0)


class _Claim(_Strict):
    memory_bytes: int = Field(default=0, ge=0)
    disk_bytes: int = Field(default=0, ge=0)
    cpus: float = Field(default=0.0, ge=0)


class ProgramLine(_Strict):
    id: str = Field(min_length=1)
    group: str | None = None
    """None: a group of its own."""
    group_size: int = Field(default=1, ge=1)
    shared: tuple[_Segment, ...] = ()
    prompt_tokens: int = Field(ge=1)
    """Its own, after `shared`."""
    prompt_blocks: tuple[str, ...] = ()
    turns: list[_Turn] = Field(min_length=1)
    arrival_s: float = 0.0
    prepare_s: float = Field(default=0.0, ge=0)
    sandbox: _Claim = _Claim()
    spike_bytes: int = Field(default=0, ge=0)

    @field_validator("turns")
    @classmethod
    def _only_the_last_answers(cls, turns: list[_Turn]) -> list[_Turn]:
        if [turn.tool is None for turn in turns] != [False] * (len(turns) - 1) + [True]:
            raise ValueError("every turn but the last names its tool, and the last has none")
        return turns

    @classmethod
    def of(cls, plan: Plan, prompt_blocks: Sequence[str] = ()) -> "ProgramLine":
        return cls.model_validate(asdict(plan) | {"prompt_blocks": tuple(prompt_blocks)})

    def plan(self, common: Sequence[Segment]) -> Plan:
        """`common`: what its blocks have in common with others; it counts as its own in the line."""
        return Plan(
            id=ProgramId(self.id),
            group=GroupId(self.group or self.id),
            group_size=self.group_size,
            shared=(*(Segment(s.key, s.tokens) for s in self.shared), *common),
            prompt_tokens=self.prompt_tokens - sum(segment.tokens for segment in common),
            turns=tuple(PlannedTurn(t.output_tokens, t.tool, t.tool_s, t.result_tokens) for t in self.turns),
            arrival_s=self.arrival_s,
            prepare_s=self.prepare_s,
            sandbox=SandboxClaim(**self.sandbox.model_dump()),
            spike_bytes=self.spike_bytes,
        )


def read_native(path: Path) -> Workload:
    header, lines = _lines(path)
    common = common_prefixes([line.prompt_blocks for line in lines], BLOCK_TOKENS, header.name)
    plans = [line.plan(segments) for line, segments in zip(lines, common, strict=True)]
    first_s = min(plan.arrival_s for plan in plans)
    plans = [replace(plan, arrival_s=plan.arrival_s - first_s) for plan in plans]
    if header.concurrency is None:
        plans.sort(key=lambda plan: plan.arrival_s)
    return Workload(header.name, tuple(plans), header.concurrency, header.tool_concurrency)


def write_native(workload: Workload, path: Path) -> None:
    header = Header(
        name=workload.name,
        concurrency=workload.concurrency,
        tool_concurrency=dict(workload.tool_concurrency),
    )
    with path.open("w", encoding="utf-8") as file:
        file.write(header_text(header))
        file.writelines(line_text(ProgramLine.of(plan)) for plan in workload.programs)


def header_text(header: Header) -> str:
    return header.model_dump_json() + "\n"


def line_text(line: ProgramLine) -> str:
    return line.model_dump_json(exclude_defaults=True) + "\n"


def _lines(path: Path) -> tuple[Header, list[ProgramLine]]:
    text = text_of(path)
    (number, first), *rest = numbered_lines(text)
    header = parsed_json(Header, first, f"{path}:{number}")
    if rest and _is_torn(text, rest[-1][1]):
        _log.warning("%s:%d: the last line broke off half way and is left out", path, rest.pop()[0])
    lines: dict[str, ProgramLine] = {}
    for number, text_line in rest:
        line = parsed_json(ProgramLine, text_line, f"{path}:{number}")
        _check(line, lines, f"{path}:{number}")
        lines[line.id] = line
    if not lines:
        raise ConfigError(f"{path}: no programs after the header; give a trace with at least one")
    return header, list(lines.values())


def _is_torn(text: str, last: str) -> bool:
    """Whole lines end in a line break; what does not, and is no JSON either, broke off."""
    if text.endswith("\n"):
        return False
    try:
        json.loads(last)
    except ValueError:
        return True
    return False


def _check(line: ProgramLine, before: dict[str, ProgramLine], where: str) -> None:
    if line.id in before:
        raise ConfigError(f"{where}: id {line.id!r} comes twice; record each run to a file of its own")
    blocks = len(line.prompt_blocks)
    if blocks * BLOCK_TOKENS >= line.prompt_tokens:
        raise ConfigError(
            f"{where}: prompt_blocks has {blocks} blocks, a prefix longer than its prompt of "
            f"{line.prompt_tokens} tokens; give only whole blocks of {BLOCK_TOKENS} tokens before its end"
        )
