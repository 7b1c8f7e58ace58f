"""Who holds how much of one engine's KV.  Reserved plus free is always the capacity.

A program's context is cut into segments.  A segment that others may have in common has a key and is
counted once for all its holders; the rest is private.  An engine that keeps a copy of a common prefix
for each holder is given no keys.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass

from sostenuto.types import ProgramId


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of context that every program with the same `key` has in common."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one program's KV consists of."""

    private_tokens: int
    shared: tuple[Segment, ...] = ()

    @property
    def tokens(self) -> int:
        tokens = self.private_tokens
        for segment in self.shared:
            tokens += segment.tokens
        return tokens


@dataclass(frozen=True, slots=True)
class KvStatistics:
    capacity_tokens: int
    reserved_tokens: int
    holders: int
    shared_segments: int


class KvLedger:
    """KV reservations on one engine.  Not a belief: what is not reserved here is not used."""

    def __init__(self, capacity_tokens: int, *, block_tokens: int = 1) -> None:
        self._capacity = capacity_tokens
        self._block = block_tokens
        self._holders: dict[ProgramId, Footprint] = {}
        self._references: dict[str, int] = {}
        self._reserved = 0

    def __repr__(self) -> str:
        held = " ".join(f"{id_}={f.tokens}" for id_, f in sorted(self._holders.items()))
        return f"<KvLedger free={self.free_tokens} {held}>"

    def __len__(self) -> int:
        """Programs that hold something."""
        return len(self._holders)

    def holders(self) -> list[ProgramId]:
        return list(self._holders)

    def __contains__(self, program_id: ProgramId) -> bool:
        return program_id in self._holders

    @property
    def capacity_tokens(self) -> int:
        return self._capacity

    @property
    def block_tokens(self) -> int:
        return self._block

    def resize(self, capacity_tokens: int) -> None:
        """For a budget that is found: what is reserved may exceed it until it comes back."""
        self._capacity = capacity_tokens

    @property
    def free_tokens(self) -> int:
        return self._capacity - self._reserved

    def missing_tokens(self, program_id: ProgramId, wanted: Footprint) -> int:
        """How many more free tokens `wanted` needs than there are; 0 when it fits."""
        return max(0, self.growth_tokens(program_id, wanted) - self.free_tokens)

    def could_ever_hold(self, wanted: Footprint) -> bool:
        """Whether an empty engine has room for it."""
        # Rounding up adds less than a block for each part.
        if wanted.tokens + self._block * (1 + len(wanted.shared)) <= self._capacity:
            return True
        return self._all(wanted) <= self._capacity

    def fits_without(self, program_ids: Container[ProgramId], wanted: Footprint) -> bool:
        """Whether `wanted` would fit if those programs held nothing.  O(holders)."""
        left = [wanted, *(held for id_, held in self._holders.items() if id_ not in program_ids)]
        shared = {segment.key: segment.tokens for held in left for segment in held.shared}
        private = sum(self._rounded(held.private_tokens) for held in left)
        return private + sum(map(self._rounded, shared.values())) <= self._capacity

    def reserve(self, program_id: ProgramId, wanted: Footprint) -> bool:
        """Make `program_id` hold exactly `wanted` and say True, or change nothing and say False."""
        if self.missing_tokens(program_id, wanted):
            return False
        self.release(program_id)
        for segment in wanted.shared:
            if self._references.get(segment.key, 0) == 0:
                self._reserved += self._rounded(segment.tokens)
            self._references[segment.key] = self._references.get(segment.key, 0) + 1
        self._reserved += self._rounded(wanted.private_tokens)
        self._holders[program_id] = wanted
        return True

    def release(self, program_id: ProgramId) -> int:
        """Give up what `program_id` holds and return how many tokens that freed.  Safe to call twice."""
        held = self._holders.pop(program_id, None)
        if held is None:
            return 0
        before = self._reserved
        self._reserved -= self._rounded(held.private_tokens)
        for segment in held.shared:
            self._references[segment.key] -= 1
            if self._references[segment.key] == 0:
                del self._references[segment.key]
                self._reserved -= self._rounded(segment.tokens)
        return before - self._reserved

    def statistics(self) -> KvStatistics:
        return KvStatistics(self._capacity, self._reserved, len(self._holders), len(self._references))

    def growth_tokens(self, program_id: ProgramId, wanted: Footprint) -> int:
        """How many more tokens it would hold with `wanted` than now; less than 0 when it gives some up."""
        held = self._holders.get(program_id)
        growth = self._rounded(wanted.private_tokens)
        if held is None:
            return growth + sum(self._alone(s) for s in wanted.shared if s.key not in self._references)
        growth -= self._rounded(held.private_tokens)
        if held.shared is not wanted.shared and held.shared != wanted.shared:
            growth += self._exchanged(held.shared, wanted.shared)
        return growth

    def _all(self, wanted: Footprint) -> int:
        return self._rounded(wanted.private_tokens) + sum(self._alone(s) for s in wanted.shared)

    def _exchanged(self, before: Iterable[Segment], after: Iterable[Segment]) -> int:
        kept = {segment.key for segment in after}
        new = sum(self._alone(s) for s in after if s.key not in self._references)
        return new - sum(self._alone(s) for s in before if s.key not in kept and self._references[s.key] == 1)

    def _alone(self, segment: Segment) -> int:
        return self._rounded(segment.tokens)

    def _rounded(self, tokens: int) -> int:
        return -(-tokens // self._block) * self._block
