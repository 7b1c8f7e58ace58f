"""Mooncake's JSONL: one line per request, with a hash for each block of 512 tokens of its prompt.

A hash stands for its block and for all before it.  What is one session is not said, so it is inferred:

- A request goes on with an earlier one when it is longer and begins with all full blocks of it.  Of
  several the longest one counts, then the latest.
- A request is gone on with once.  A second that would do so is a branch: a program of its own, which has
  the blocks in common with others as any program has.
- The tool time is the gap between the two requests less the time to decode the answer, at 30 ms a token.

Prompts of under one block cannot be told from each other, and are programs of one turn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from pydantic import Field

from sostenuto.errors import ConfigError
from sostenuto.runtime.simulation.plan import Plan, Workload
from sostenuto.runtime.simulation.traces.reading import (
    Call,
    Row,
    common_prefixes,
    numbered_lines,
    parsed_json,
    text_of,
    turns_of,
)
from sostenuto.scheduler.kv import Segment
from sostenuto.types import GroupId, ProgramId

BLOCK_TOKENS = 512
_TOKEN_S = 0.03


class _Request(Row):
    timestamp: float = Field(ge=0)
    """Milliseconds."""
    input_length: int = Field(ge=1)
    output_length: int = Field(ge=1)
    hash_ids: list[int]

    @property
    def whole_blocks(self) -> list[int]:
        """Those which end before the prompt does, so that at least one token is its own."""
        return self.hash_ids[: (self.input_length - 1) // BLOCK_TOKENS]


@dataclass(slots=True)
class _Sessions:
    """Sessions so far, found by the last whole block of their last request."""

    all: list[list[_Request]] = field(default_factory=list[list[_Request]])
    _ends: dict[int, list[list[_Request]]] = field(default_factory=dict[int, list[list[_Request]]])

    def add(self, request: _Request) -> None:
        session = self._continued(request) or self._begun()
        session.append(request)
        if request.whole_blocks:
            self._ends.setdefault(request.whole_blocks[-1], []).append(session)

    def _begun(self) -> list[_Request]:
        self.all.append([])
        return self.all[-1]

    def _continued(self, request: _Request) -> list[_Request] | None:
        for block in reversed(request.hash_ids):
            ends = self._ends.get(block, [])
            for place in reversed(range(len(ends))):
                if ends[place][-1].input_length < request.input_length:
                    return ends.pop(place)
        return None


def read_mooncake(path: Path) -> Workload:
    sessions = _Sessions()
    for request in sorted(_requests(path), key=lambda request: request.timestamp):
        sessions.add(request)
    first_ms = sessions.all[0][0].timestamp
    shared = common_prefixes([session[0].whole_blocks for session in sessions.all], BLOCK_TOKENS, path.stem)
    plans = [
        _plan(index, session, segments, first_ms)
        for index, (session, segments) in enumerate(zip(sessions.all, shared, strict=True))
    ]
    return Workload(path.stem, tuple(plans))


def _requests(path: Path) -> Iterator[_Request]:
    for number, line in numbered_lines(text_of(path)):
        where = f"{path}:{number}"
        request = parsed_json(_Request, line, where)
        most = -(-request.input_length // BLOCK_TOKENS)
        if len(request.hash_ids) > most:
            raise ConfigError(
                f"{where}: hash_ids has {len(request.hash_ids)} blocks, a prefix longer than its input of "
                f"{request.input_length} tokens; give at most {most} blocks of {BLOCK_TOKENS} tokens"
            )
        yield request


def _plan(index: int, session: Sequence[_Request], shared: tuple[Segment, ...], first_ms: float) -> Plan:
    return Plan(
        id=ProgramId(f"p{index:04d}"),
        group=GroupId(f"p{index:04d}"),
        group_size=1,
        shared=shared,
        prompt_tokens=session[0].input_length - sum(segment.tokens for segment in shared),
        turns=turns_of(list(_calls(session))),
        arrival_s=(session[0].timestamp - first_ms) / 1000,
    )


def _calls(session: Sequence[_Request]) -> Iterator[Call]:
    for request, following in pairwise(session):
        gap_s = (following.timestamp - request.timestamp) / 1000
        wait_s = max(0.0, gap_s - request.output_length * _TOKEN_S)
        yield Call(request.input_length, request.output_length, wait_s)
    yield Call(session[-1].input_length, session[-1].output_length)
