"""Which engine is slow: its times for a token, sampled and prefilled, against those of its peers.

The time for a token grows with the requests that run together, at most in proportion to them.  So an engine
that takes x seconds a token while b requests run, beside a peer that takes y while b' do, is slower than
load can explain by

    excess = x / (y * max(1, b / b'))

x, y, b and b' are medians of the last turns, and of the excesses over all peers the median counts: neither
one odd turn nor one odd peer makes a verdict.  An engine is slow when its excess stays above `SLOW`; it has
recovered when probes, one after the other, find it below `FINE`.  One that becomes slow again is probed
later each time.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from sostenuto.scheduler.events import TurnCost
from sostenuto.types import EngineId

SLOW, FINE = 3.0, 1.5
_TURNS = 16
"""From which medians are taken."""
_ENOUGH = 6
"""Turns without which there is no verdict."""
_FRESH_S = 120.0
"""Older turns say nothing about now."""
_JUDGED_EVERY_S = 2.0
_LASTS_S = 6.0
"""So long an engine has to be slow before it is."""
_PROBE_S = 5.0
_MOST_DOUBLINGS = 7
_PROBES = 3
"""Good ones in a row, after which an engine has recovered."""
_FORGIVEN_S = 1800.0
"""After so long without one, an earlier slowness does not count."""
_PREFILLED = 64
"""Tokens below which a prefill is mostly overhead."""


@dataclass(frozen=True, slots=True)
class _Turn:
    at_s: float
    sampled_s: float
    """For a token."""
    prefilled_s: float | None
    """For a token; None where too few were."""
    together: float


@dataclass(frozen=True, slots=True)
class _Usual:
    """Medians."""

    sampled_s: float
    prefilled_s: float | None
    together: float


@dataclass(slots=True)
class _Pace:
    """What is known of one engine."""

    peers: str
    turns: deque[_Turn] = field(default_factory=lambda: deque[_Turn](maxlen=_TURNS))
    judged_s: float = float("-inf")
    slow_since_s: float | None = None
    probe_at_s: float = float("inf")
    good_probes: int = 0
    times_out: int = 0
    last_out_s: float = float("-inf")

    def usual(self, now_s: float) -> _Usual | None:
        """None while too little is known that is not old."""
        fresh = [turn for turn in self.turns if now_s - turn.at_s <= _FRESH_S]
        if len(fresh) < _ENOUGH:
            return None
        prefilled = [turn.prefilled_s for turn in fresh if turn.prefilled_s is not None]
        return _Usual(
            median(turn.sampled_s for turn in fresh),
            median(prefilled) if len(prefilled) >= _ENOUGH else None,
            median(turn.together for turn in fresh),
        )


class Slowness:
    """Written with every turn.  Says who is slow; whether an engine can be spared is for others to know."""

    def __init__(self) -> None:
        self._paces: dict[EngineId, _Pace] = {}
        self._out: dict[EngineId, _Pace] = {}

    def joined(self, engine_id: EngineId, peers: str) -> None:
        """A new engine, or one that has started anew: nothing is known of it."""
        self._paces[engine_id] = _Pace(peers)
        self._out.pop(engine_id, None)

    def left(self, engine_id: EngineId) -> None:
        self._paces.pop(engine_id, None)
        self._out.pop(engine_id, None)

    @property
    def out(self) -> list[EngineId]:
        """Those that are out of use."""
        return list(self._out)

    def turned(self, engine_id: EngineId, cost: TurnCost, together: float, now_s: float) -> str:
        """A turn has ended there.  Why the engine is slow; empty when it is not, or not yet for certain."""
        pace, turn = self._paces[engine_id], _turn_of(cost, max(1.0, together), now_s)
        if turn is None or not pace.peers:
            return ""
        pace.turns.append(turn)
        if now_s < pace.judged_s + _JUDGED_EVERY_S:
            return ""
        pace.judged_s = now_s
        excess, reason = self._excess(pace, now_s)
        if excess < SLOW:
            pace.slow_since_s = None
            return ""
        if pace.slow_since_s is None:
            pace.slow_since_s = now_s
        return reason if now_s - pace.slow_since_s >= _LASTS_S else ""

    def take_out(self, engine_id: EngineId, now_s: float) -> None:
        """Nothing starts there any more: it is probed from now on."""
        pace = self._paces[engine_id]
        if now_s - pace.last_out_s > _FORGIVEN_S:
            pace.times_out = 0
        self._out[engine_id] = pace
        pace.good_probes, pace.last_out_s = 0, now_s
        pace.probe_at_s = now_s + _PROBE_S * 2.0 ** min(pace.times_out, _MOST_DOUBLINGS)
        pace.times_out += 1

    def take_in(self, engine_id: EngineId) -> None:
        """It is used again, and what it did before does not count."""
        pace = self._out.pop(engine_id)
        pace.slow_since_s, pace.probe_at_s = None, float("inf")
        pace.turns.clear()

    def probe_at_s(self) -> float | None:
        """When the next probe is due."""
        due_s = min((pace.probe_at_s for pace in self._out.values()), default=float("inf"))
        return due_s if due_s < float("inf") else None

    def take_due(self, now_s: float) -> list[EngineId]:
        """Whom to probe now; none of them again before `probed`."""
        due = [engine_id for engine_id, pace in self._out.items() if pace.probe_at_s <= now_s]
        for engine_id in due:
            self._out[engine_id].probe_at_s = float("inf")
        return due

    def probed(self, engine_id: EngineId, cost: TurnCost | None, now_s: float) -> bool:
        """Whether the engine has recovered."""
        pace = self._out.get(engine_id)
        if pace is None:
            return False
        turn = _turn_of(cost, 1.0, now_s) if cost is not None else None
        pace.good_probes = pace.good_probes + 1 if turn and self._is_fine(pace, turn) else 0
        pace.probe_at_s = now_s + _PROBE_S
        return pace.good_probes >= _PROBES

    def _is_fine(self, pace: _Pace, turn: _Turn) -> bool:
        """Against the last that is known of its peers, however old: they may have nothing to do."""
        theirs = [median(t.sampled_s for t in peer.turns) for peer in self._peers(pace) if peer.turns]
        return not theirs or turn.sampled_s <= FINE * median(theirs)

    def _peers(self, pace: _Pace) -> Iterator[_Pace]:
        for engine_id, peer in self._paces.items():
            if peer is not pace and peer.peers == pace.peers and engine_id not in self._out:
                yield peer

    def _excess(self, pace: _Pace, now_s: float) -> tuple[float, str]:
        """How much slower it is than load explains, and in words."""
        own = pace.usual(now_s)
        theirs = [usual for peer in self._peers(pace) if (usual := peer.usual(now_s)) is not None]
        if own is None or not theirs:
            return 0.0, ""
        sampled = _over(own.sampled_s, own.together, [(u.sampled_s, u.together) for u in theirs])
        found = (sampled, "sampled", own.sampled_s)
        if own.prefilled_s is not None:
            known = [(u.prefilled_s, u.together) for u in theirs if u.prefilled_s is not None]
            found = max(found, (_over(own.prefilled_s, own.together, known), "prefilled", own.prefilled_s))
        excess, what, took_s = found
        return excess, (
            f"slow: {took_s * 1000:.3g} ms for a {what} token, {excess:.1f} times what its peers need under "
            f"such load"
        )


def _over(own_s: float, together: float, theirs: list[tuple[float, float]]) -> float:
    ratios = [own_s / (peer_s * max(1.0, together / b)) for peer_s, b in theirs if peer_s > 0]
    return median(ratios) if ratios else 0.0


def _turn_of(cost: TurnCost, together: float, now_s: float) -> _Turn | None:
    """None for a turn that is too short to say anything."""
    if cost.generated_tokens < 2 or cost.decode_s <= 0:
        return None
    prefilled = cost.prefilled_tokens >= _PREFILLED and cost.prefill_s > 0
    return _Turn(
        now_s,
        cost.decode_s / cost.generated_tokens,
        cost.prefill_s / cost.prefilled_tokens if prefilled else None,
        together,
    )
