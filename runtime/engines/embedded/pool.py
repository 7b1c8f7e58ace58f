"""Who has KV: requests that run have rows, programs between turns hold what `kept` keeps for them.

- used <= kv_tokens at any moment.  A running request is charged its length, a held prefix its tokens once
  for all who hold it.  What nobody holds fills the rest, and is given up before anybody is told to wait.
- A hold is soft: when a request that runs or is next needs room, the least recently used holder loses
  its KV to the lower tier or for good, so holders can never keep anyone from being admitted.
- KV older than `floor` is never given to a request, and never held.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from sostenuto.runtime.engines.embedded.kept import Kept
from sostenuto.runtime.engines.embedded.lanes import KvShape, Lanes
from sostenuto.runtime.engines.embedded.lower import LowerTier, Parked
from sostenuto.runtime.engines.embedded.trie import Prefix
from sostenuto.runtime.engines.embedded.turn import Ids, Turn, common_prefix, cut
from sostenuto.types import Version

_GROWTH_TOKENS = 16
"""Kept free for each running request when another one is admitted."""

_WORTH_WAITING_TOKENS = 16
"""A request waits for KV that a running one computes or the lower tier has, when that saves this much."""


class Admission(Enum):
    """What became of a request that was to be admitted."""

    ADMITTED = auto()
    LATER = auto()
    """KV of it is on its way; others may go first."""
    NO_ROOM = auto()
    """Nobody may go before it."""


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """Where the longest usable prefix of a request lies."""

    source: Prefix | Turn
    tokens: int
    """Its leading tokens whose KV can be copied now."""
    coming: bool = False
    """A running request is about to compute a prefix of it that is longer by far."""


class Pool:
    """KV of one engine, counted in tokens.  The engine thread alone uses it."""

    def __init__(
        self, shape: KvShape, *, kv_tokens: int, widest: int, concurrency: int, lower: LowerTier | None = None
    ) -> None:
        self.kv_tokens = kv_tokens
        self.concurrency = concurrency
        self.running: list[Turn] = []
        """In order of admission."""
        self.kept = Kept(shape, lower)
        self.lanes = Lanes(shape, widest=widest, rows=concurrency)
        self.floor: Version | None = None
        self.evicted_programs = 0

    def __repr__(self) -> str:
        return f"<Pool running={len(self.running)} used={self.used}/{self.kv_tokens} {self.kept!r}>"

    @property
    def used(self) -> int:
        return self.kept.held_tokens + self._running_tokens

    @property
    def _running_tokens(self) -> int:
        return sum(turn.length for turn in self.running)

    def match(self, turn: Turn) -> Match:
        """The longest prefix of the turn's context that somebody has.

        At least the last token of the context stays to be computed: its logits are needed.
        """
        context = turn.tokens[: turn.length - 1]
        prefix = self.kept.match(turn.request.salt, context)
        return self._match_running(turn.request.salt, context, Match(prefix, prefix.tokens))

    def _match_running(self, salt: str, context: Ids, best: Match) -> Match:
        coming = 0
        for turn in self.running:
            if turn.request.salt != salt or not self._allowed(turn):
                continue
            length = common_prefix(turn.context, context)
            if min(length, turn.computed) > best.tokens:
                best = Match(turn, min(length, turn.computed))
            if turn.computed < length:
                coming = max(coming, length)
        return Match(best.source, best.tokens, coming=coming >= best.tokens + _WORTH_WAITING_TOKENS)

    def admit(self, turn: Turn, waiting: Collection[str]) -> Admission:
        """Give `turn` a row with the longest prefix that there is.

        Programs in `waiting` have a request that waits; their KV goes last.
        """
        match = self.match(turn)
        parked = self._worth_restoring(turn, match)
        if match.coming or (parked is not None and parked.is_copying):
            return Admission.LATER
        if not self._make_room(turn, match, waiting):
            return Admission.NO_ROOM
        if parked is not None:
            self._restore(parked)
            return Admission.LATER
        self._seat(turn, match)
        return Admission.ADMITTED

    def _worth_restoring(self, turn: Turn, match: Match) -> Parked | None:
        """What the lower tier has of the turn's program, when that is longer by far than `match`."""
        request = turn.request
        parked, tokens = self.kept.parked(request.program_id, request.salt, turn.tokens[: turn.length - 1])
        return parked if tokens >= match.tokens + _WORTH_WAITING_TOKENS else None

    def restore(self, program: str) -> None:
        """Bring a program's KV back ahead of its turn, if nobody has to give up any for that.  Idempotent."""
        parked = self.kept.lower.entries.get(program) if self.kept.lower else None
        if parked is not None and not parked.is_copying and len(parked.tokens) <= self.kv_tokens - self.used:
            self._restore(parked)

    def _restore(self, parked: Parked) -> None:
        self.kept.restore(parked)
        self._trim()

    def _make_room(self, turn: Turn, match: Match, waiting: Collection[str]) -> bool:
        """Whether `turn` may take what nobody else holds; begins what makes it enough, if anything can."""
        growth = sum(min(other.remaining, _GROWTH_TOKENS) for other in self.running)
        needed = turn.length + 1 + growth
        if needed > self.kv_tokens - self._running_tokens - self.kept.arriving_tokens:
            return False
        if needed > self._room(turn) + self.kept.leaving_tokens:
            for program in self._victims(turn, match, waiting):
                self._evict(program)
                if needed <= self._room(turn) + self.kept.leaving_tokens:
                    break
        return needed <= self._room(turn)

    def _room(self, turn: Turn) -> int:
        """What is free once the turn's program has no KV but its row."""
        return self.kv_tokens - self.used + self.kept.sole_tokens(turn.request.program_id)

    def _victims(self, turn: Turn, match: Match, waiting: Collection[str]) -> list[str]:
        """Holders other than the turn's program, in the order in which they are evicted."""
        others = [name for name in self.kept.programs if name != turn.request.program_id]
        prefix = match.source if isinstance(match.source, Prefix) else Prefix()
        # Stable: within each class the least recently used goes first.
        return sorted(others, key=lambda name: (self.kept.shares(name, prefix), name in waiting))

    def _trim(self) -> None:
        """Give up so much of what nobody holds that there is room for what is used."""
        self.kept.free(self.used + self.kept.idle_tokens - self.kv_tokens)

    def _seat(self, turn: Turn, match: Match) -> None:
        self.running.append(turn)
        self.lanes.add(turn, turn.length + min(turn.remaining, 2 * _GROWTH_TOKENS))
        if isinstance(match.source, Turn):
            assert match.source.lane is not None
            self.lanes.fill(turn, *match.source.lane.prefix(match.source.row, match.tokens))
            turn.tags = cut(match.source.tags, match.tokens)
            self.kept.take(turn.request.program_id, Prefix())
        else:
            for keys, values in match.source.segments():
                self.lanes.fill(turn, keys, values)
            turn.tags = ((match.source.oldest, 0),) if match.tokens else ()
            self.kept.take(turn.request.program_id, match.source)
        self._trim()

    def make_growth_room(self) -> list[Turn]:
        """Free one token for each running request; returns those that lost their row for it, youngest first.

        The oldest request never loses its row.
        """
        preempted: list[Turn] = []
        while (lacking := self.used + len(self.running) - self.kv_tokens) > 0:
            if lacking <= self.kept.leaving_tokens:
                self.kept.settle(wait=True)
            elif self.kept.programs:
                self._evict(next(iter(self.kept.programs)))
            elif self.kept.arriving_tokens:
                self.kept.settle(wait=True)
            else:
                preempted.append(self.running[-1])
                self._preempt(self.running[-1])
        self.kept.free(lacking + self.kept.idle_tokens)
        for turn in self.running:
            self.lanes.widen(turn, turn.length)
        return preempted

    def _preempt(self, turn: Turn) -> None:
        """What it has computed is soon needed again: worth a place in the lower tier."""
        if self.kept.lower is None:
            self.remove(turn)
        else:
            self.hold(turn)

    def _evict(self, program: str) -> None:
        self.kept.evict(program)
        self.evicted_programs += 1

    def remove(self, turn: Turn) -> None:
        """Take a running request out; its KV is gone."""
        self.running.remove(turn)
        self.lanes.remove(turn)
        turn.computed, turn.tags = 0, ()

    def hold(self, turn: Turn) -> None:
        """Take a running request out and hold the KV it has for its program, when that may be used again."""
        self._keep(turn, hold=True)

    def let_go(self, turn: Turn) -> None:
        """Take a running request out; the KV it has stays as long as nobody needs the room."""
        self._keep(turn, hold=False)

    def _keep(self, turn: Turn, *, hold: bool) -> None:
        if turn.computed and self._allowed(turn):
            assert turn.lane is not None
            kv = turn.lane.prefix(turn.row, turn.computed)
            node = self.kept.insert(turn.request.salt, turn.tokens[: turn.computed], kv, turn.tags[0][0])
            if hold:
                self.kept.hold(turn.request.program_id, node)
        self.remove(turn)

    def release(self, program_id: str) -> None:
        """Forget what a program holds, and do not hold what it is running."""
        self.kept.release(program_id)
        for turn in self.running:
            if turn.request.program_id == program_id:
                turn.hold = False

    def raise_floor(self, version: Version) -> int:
        """Nothing computed under an older version is used by a request from now on; holders dropped."""
        self.floor = version
        return self.kept.clear()

    def forget_older(self, version: Version) -> list[str]:
        """The same, and what is not older stays; the programs that lost what they held."""
        self.floor = version if self.floor is None else max(self.floor, version)
        return self.kept.forget_older(version)

    def retract_older(self, version: Version) -> tuple[Turn, ...]:
        """Take out the running requests with KV that an older version has computed; it is gone."""
        older = tuple(turn for turn in self.running if turn.tags and turn.tags[0][0] < version)
        for turn in older:
            self.remove(turn)
        return older

    def recompute(self) -> int:
        """Every running request computes its KV again; returns how many."""
        self.lanes.restart()
        for turn in self.running:
            turn.tags = ()
        return len(self.running)

    def _allowed(self, turn: Turn) -> bool:
        return self.floor is None or not turn.tags or turn.tags[0][0] >= self.floor
