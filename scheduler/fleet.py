"""What the scheduler knows of the engines: KV, decode slots, and who is where."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from sostenuto.scheduler.events import EngineJoined
from sostenuto.scheduler.kv import KvLedger
from sostenuto.types import EngineId, ProgramId

UNKNOWN_TOKENS = 1 << 62
"""The pool of an engine that does not say how large it is."""

Entry = tuple[int, ProgramId]
"""(age rank, program): the older program has the smaller rank."""


class AgeQueue:
    """Programs, oldest first.  Leaving it costs nothing until the entry comes up."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._rank: dict[ProgramId, int] = {}

    def __len__(self) -> int:
        return len(self._rank)

    def __contains__(self, program_id: ProgramId) -> bool:
        return program_id in self._rank

    def add(self, rank: int, program_id: ProgramId) -> None:
        self._rank[program_id] = rank
        heapq.heappush(self._heap, (rank, program_id))

    def discard(self, program_id: ProgramId) -> None:
        self._rank.pop(program_id, None)

    def oldest(self) -> Entry | None:
        while self._heap and self._rank.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def members(self) -> Iterable[ProgramId]:
        return self._rank.keys()


@dataclass(slots=True)
class EngineSeat:
    """One engine: its KV ledger, its decode slots, and who decodes there."""

    id: EngineId
    kv: KvLedger
    concurrency: int
    decoding: set[ProgramId] = field(default_factory=set[ProgramId])

    @classmethod
    def joined(cls, event: EngineJoined) -> Self:
        tokens = UNKNOWN_TOKENS if event.kv_tokens is None else event.kv_tokens
        return cls(event.engine_id, KvLedger(tokens, block_tokens=event.block_tokens), event.concurrency)

    @property
    def free_slots(self) -> int:
        return self.concurrency - len(self.decoding)
