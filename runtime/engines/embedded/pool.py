"""Who has KV: requests that run, and programs that are held between turns.

- used <= kv_tokens at any moment.  A running request is charged its length, a held program its KV.
- A hold is soft: when a request that runs or is next needs room, the least recently used holder loses
  its KV, so holders can never keep anyone from being admitted.
- KV older than `floor` is never given to a request, and never held.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from sostenuto.runtime.engines.embedded.lanes import KvShape, Lanes
from sostenuto.runtime.engines.embedded.turn import Ids, KvTags, Turn, common_prefix, cut
from sostenuto.types import Version

_GROWTH_TOKENS = 16
"""Kept free for each running request when another one is admitted."""

_WORTH_WAITING_TOKENS = 16
"""A request waits a step for a running one to compute a common prefix, when that saves this much."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The KV of a program between turns, in tensors of exact size: (layers, K, tokens, D)."""

    salt: str
    """Only requests with the same one may use it."""
    tokens: Ids
    tags: KvTags
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """Where the longest usable prefix of a request lies."""

    source: Held | Turn | None
    tokens: int
    """Its leading tokens whose KV can be copied now."""
    coming: bool = False
    """A running request is about to compute a prefix of it that is longer by far."""


class Pool:
    """KV of one engine, counted in tokens.  The engine thread alone uses it."""

    def __init__(self, shape: KvShape, *, kv_tokens: int, widest: int, concurrency: int) -> None:
        self.kv_tokens = kv_tokens
        self.concurrency = concurrency
        self.running: list[Turn] = []
        """In order of admission."""
        self.held: dict[str, Held] = {}
        """By program, least recently used first."""
        self.lanes = Lanes(shape, widest=widest, rows=concurrency)
        self.floor: Version | None = None
        self.evicted_programs = 0

    def __repr__(self) -> str:
        return f"<Pool running={len(self.running)} held={len(self.held)} used={self.used}/{self.kv_tokens}>"

    @property
    def held_tokens(self) -> int:
        return sum(len(held.tokens) for held in self.held.values())

    @property
    def used(self) -> int:
        return self.held_tokens + sum(turn.length for turn in self.running)

    def match(self, turn: Turn) -> Match:
        """The longest prefix of the turn's context that somebody has; its own, when all of that fits.

        At least the last token of the context stays to be computed: its logits are needed.
        """
        context = turn.tokens[: turn.length - 1]
        own = self.held.get(turn.request.program_id)
        is_ours = own is not None and own.salt == turn.request.salt
        if own is not None and is_ours and common_prefix(own.tokens, context) == len(own.tokens):
            return Match(own, len(own.tokens))
        best = Match(None, 0)
        for held in self.held.values():
            length = common_prefix(held.tokens, context)
            if held.salt == turn.request.salt and length > best.tokens:
                best = Match(held, length)
        return self._match_running(turn.request.salt, context, best)

    def _match_running(self, salt: str, context: Ids, best: Match) -> Match:
        coming = 0
        for turn in self.running:
            if turn.request.salt != salt or not self._allowed(turn.tags):
                continue
            length = common_prefix(turn.context, context)
            if min(length, turn.computed) > best.tokens:
                best = Match(turn, min(length, turn.computed))
            if turn.computed < length:
                coming = max(coming, length)
        return Match(best.source, best.tokens, coming=coming >= best.tokens + _WORTH_WAITING_TOKENS)

    def admit(self, turn: Turn, match: Match, waiting: Collection[str]) -> bool:
        """Give `turn` a row with what `match` offers, or change nothing: no room.

        Programs in `waiting` have a request that waits; their KV goes last.
        """
        growth = sum(min(other.remaining, _GROWTH_TOKENS) for other in self.running)
        own = self.held.get(turn.request.program_id)
        needed = turn.length + 1 + growth - (len(own.tokens) if own else 0)
        victims = self._victims(needed, turn, match, waiting)
        if victims is None:
            return False
        self._evict(victims)
        self.held.pop(turn.request.program_id, None)
        self.running.append(turn)
        self.lanes.add(turn, turn.length + min(turn.remaining, 2 * _GROWTH_TOKENS))
        self._copy(turn, match)
        return True

    def _victims(self, needed: int, turn: Turn, match: Match, waiting: Collection[str]) -> list[str] | None:
        """Programs to evict so that `needed` tokens are free; None when that is not enough."""
        missing = needed - (self.kv_tokens - self.used)
        victims: list[str] = []
        others = [name for name in self.held if name != turn.request.program_id]
        # Stable: within each class the least recently used goes first.
        others.sort(key=lambda name: (self.held[name] is match.source, name in waiting))
        for name in others:
            if missing <= 0:
                break
            victims.append(name)
            missing -= len(self.held[name].tokens)
        return victims if missing <= 0 else None

    def _copy(self, turn: Turn, match: Match) -> None:
        if match.source is None or not match.tokens:
            return
        source, tokens = match.source, match.tokens
        if isinstance(source, Held):
            keys, values = source.keys[:, :, :tokens], source.values[:, :, :tokens]
        else:
            assert source.lane is not None
            keys, values = source.lane.prefix(source.row, tokens)
        self.lanes.fill(turn, keys, values)
        turn.tags = cut(source.tags, tokens)

    def make_growth_room(self) -> list[Turn]:
        """Free one token for each running request; returns those that lost their row for it, youngest first.

        The oldest request never loses its row.
        """
        preempted: list[Turn] = []
        while self.kv_tokens - self.used < len(self.running):
            if self.held:
                self._evict([next(iter(self.held))])
            else:
                preempted.append(self.running[-1])
                self.remove(self.running[-1])
        for turn in self.running:
            self.lanes.widen(turn, turn.length)
        return preempted

    def _evict(self, programs: list[str]) -> None:
        for program in programs:
            del self.held[program]
        self.evicted_programs += len(programs)

    def remove(self, turn: Turn) -> None:
        """Take a running request out; its KV is gone."""
        self.running.remove(turn)
        self.lanes.remove(turn)
        turn.computed, turn.tags = 0, ()

    def hold(self, turn: Turn) -> None:
        """Take a running request out and hold the KV it has for its program, when that may be used again."""
        if turn.computed and self._allowed(turn.tags):
            assert turn.lane is not None
            keys, values = turn.lane.prefix(turn.row, turn.computed)
            program = turn.request.program_id
            self.held.pop(program, None)
            tokens = turn.tokens[: turn.computed].copy()
            kept = Held(
                turn.request.salt, tokens, cut(turn.tags, turn.computed), keys.clone(), values.clone()
            )
            self.remove(turn)
            self.held[program] = kept
        else:
            self.remove(turn)

    def release(self, program_id: str) -> None:
        """Forget the held KV of a program, and do not hold what it is running."""
        self.held.pop(program_id, None)
        for turn in self.running:
            if turn.request.program_id == program_id:
                turn.hold = False

    def raise_floor(self, version: Version) -> int:
        """Nothing computed under an older version is used by a request from now on; holders dropped."""
        self.floor = version
        stale = [name for name, held in self.held.items() if not self._allowed(held.tags)]
        for name in stale:
            del self.held[name]
        return len(stale)

    def recompute(self) -> int:
        """Every running request computes its KV again; returns how many."""
        self.lanes.restart()
        for turn in self.running:
            turn.tags = ()
        return len(self.running)

    def _allowed(self, tags: KvTags) -> bool:
        return self.floor is None or not tags or tags[0][0] >= self.floor
