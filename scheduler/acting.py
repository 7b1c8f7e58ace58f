"""The programs of one engine that act and hold KV, in the order in which giving it up costs least.

What a held token is worth is its holder's rate of return (`ToolTimes`).  Rates change with age, so nothing
sorted stays sorted; programs are in buckets of one tool and one octave of age, and a bucket has one rate.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from sostenuto.scheduler.program import Program
from sostenuto.scheduler.tool_times import EDGES_S, OCTAVES, ToolTimes, octave_of
from sostenuto.types import ProgramId

_RANKED_FOR_S = 0.5
"""A ranking holds so long; who begins to act meanwhile is the last that one would ask."""

_Bucket = OrderedDict[ProgramId, Program]
"""In the order of entry.  Not a dict, which passes over the gaps of those who left to find its first."""

Candidate = tuple[float, Program]
"""(returns per second, program)."""


class Acting(Protocol):
    """Who acts on one engine."""

    def add(self, program: Program, now_s: float) -> None: ...

    def discard(self, program: Program) -> None: ...

    def by_rate(self, now_s: float) -> Iterator[Candidate]:
        """All of them, the least likely to return first.  Not to be changed while it is read."""
        ...

    def __len__(self) -> int: ...


class ActingByTool:
    """Buckets by tool and age octave."""

    def __init__(self, times: ToolTimes) -> None:
        self._times = times
        self._buckets: dict[str, list[_Bucket]] = {}
        self._where: dict[ProgramId, _Bucket] = {}
        self._ranked: list[tuple[float, int, _Bucket]] = []
        self._ranked_s = -_RANKED_FOR_S

    def __len__(self) -> int:
        return len(self._where)

    def add(self, program: Program, now_s: float) -> None:
        del now_s
        octaves = self._buckets.get(program.tool)
        if octaves is None:
            octaves = self._buckets[program.tool] = [_Bucket() for _ in range(OCTAVES)]
        self._put(program, octaves[0])

    def discard(self, program: Program) -> None:
        bucket = self._where.pop(program.id, None)
        if bucket is not None:
            del bucket[program.id]

    def by_rate(self, now_s: float) -> Iterator[Candidate]:
        if now_s >= self._ranked_s + _RANKED_FOR_S:
            self._rank(now_s)
        for rate, _, bucket in self._ranked:
            for program in bucket.values():
                yield rate, program

    def _rank(self, now_s: float) -> None:
        self._ranked_s = now_s
        ranked: list[tuple[float, int, _Bucket]] = []
        for tool, octaves in self._buckets.items():
            self._grow_older(octaves, now_s)
            for octave, bucket in enumerate(octaves):
                if bucket or octave == 0:
                    ranked.append((self._times.rate(tool, octave), len(ranked), bucket))
        ranked.sort()
        self._ranked = ranked

    def _grow_older(self, octaves: list[_Bucket], now_s: float) -> None:
        # Buckets are in the order of entry, so the oldest of each comes first.
        for octave in range(OCTAVES - 1):
            bucket = octaves[octave]
            while bucket:
                program = next(iter(bucket.values()))
                age_s = now_s - program.acting_since_s
                if age_s < EDGES_S[octave]:
                    break
                del bucket[program.id]
                self._put(program, octaves[octave_of(age_s)])

    def _put(self, program: Program, bucket: _Bucket) -> None:
        bucket[program.id] = program
        self._where[program.id] = bucket


class Foresight(Protocol):
    """Knows how long the tool call after a turn will take."""

    def tool_s(self, program_id: ProgramId, turn: int) -> float: ...


class ActingForeseen:
    """For the clairvoyant policy: the true end of each call is known, and its rate is 1 / what remains."""

    def __init__(self, foresight: Foresight) -> None:
        self._foresight = foresight
        self._ends: dict[ProgramId, tuple[float, Program]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, program: Program, now_s: float) -> None:
        end_s = now_s + self._foresight.tool_s(program.id, program.turn)
        self._ends[program.id] = (end_s, program)

    def discard(self, program: Program) -> None:
        self._ends.pop(program.id, None)

    def by_rate(self, now_s: float) -> Iterator[Candidate]:
        latest = heapq.nlargest(len(self._ends), self._ends.values(), key=lambda entry: entry[0])
        for end_s, program in latest:
            yield 1.0 / max(end_s - now_s, 1e-3), program
