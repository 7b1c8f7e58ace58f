"""Continuum, also CacheTTL (2511.02230): KV is pinned for a time to live while the tool runs.

    tau* = argmax over tau of  P(tau, tool) * (T * eta + PrefillReload) - tau

with P the share of the tool's calls so far that returned within tau, T the mean wait of a turn in the
queue, PrefillReload the time to prefill the program's context again, and eta how well the turns that a
program has had predict those that are left: minus their correlation, over finished programs, 1 before
there are any.  A tool with fewer than 100 calls is given 2 s.  The argmax is taken over 0 and 64 order
statistics of the calls.

Within an engine, programs whose KV is pinned go first, the rest by submission, first come first served;
the deadlock guard is that of `pins`.  The released code is simpler than the paper (it pins for 2 s what
returns within 2 s on average); this is the paper.  `ttl_s` fixes tau for all tools.
"""

from bisect import insort
from dataclasses import dataclass

from sostenuto.scheduler.baselines.engine_queue import Key
from sostenuto.scheduler.baselines.pins import PinnedQueue
from sostenuto.scheduler.fleet import EngineSeat
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.scheduler.program import Program
from sostenuto.scheduler.settings import SchedulerSettings

FEW_CALLS = 100
TTL_OF_FEW_S = 2.0
CANDIDATES = 64


@dataclass(slots=True)
class Predictability:
    """eta: minus the correlation of turns had and turns left, over all turns of finished programs."""

    count: int = 0
    had: int = 0
    left: int = 0
    had_had: int = 0
    had_left: int = 0
    left_left: int = 0

    def add(self, turns: int) -> None:
        """A program that took so many turns: after each of them, how many it has had and has left."""
        had = turns * (turns + 1) // 2
        had_had = had * (2 * turns + 1) // 3
        self.count += turns
        self.had += had
        self.left += had - turns
        self.had_had += had_had
        self.had_left += turns * had - had_had
        self.left_left += had_had - turns * turns

    @property
    def eta(self) -> float:
        n = self.count
        spread = (n * self.had_had - self.had**2) * (n * self.left_left - self.left**2)
        if spread <= 0:
            return 1.0
        return max(0.0, -(n * self.had_left - self.had * self.left) / spread**0.5)


class Continuum(PinnedQueue):
    """Time to live by tool; `ttl_s`: the same for all."""

    def __init__(self, settings: SchedulerSettings | None = None, *, ttl_s: float | None = None) -> None:
        super().__init__(settings)
        self._ttl_s = ttl_s
        self._calls_s: dict[str, list[float]] = {}
        """By tool, ascending."""
        self._wait_of_queue_s = 0.0
        self._turns = 0
        self._predictability = Predictability()

    def _key(self, program: Program, now_s: float) -> Key:
        return int(program.phase is not Phase.READY), program.rank

    def _keep_s(self, program: Program, seat: EngineSeat, now_s: float) -> float:
        if self._ttl_s is not None:
            return self._ttl_s
        calls_s = self._calls_s.get(program.tool, [])
        if len(calls_s) < FEW_CALLS:
            return TTL_OF_FEW_S
        wait_s = self._wait_of_queue_s / max(1, self._turns)
        return best_ttl_s(
            calls_s, wait_s * self._predictability.eta + self._reload_s(program.footprint.tokens)
        )

    def _has_waited(self, program: Program, waited_s: float) -> None:
        self._wait_of_queue_s += waited_s
        self._turns += 1

    def _tool_is_known(self, program: Program, acted_s: float, queued_s: float, now_s: float) -> None:
        del queued_s  # whoever schedules requests sees the whole gap
        insort(self._calls_s.setdefault(program.tool, []), acted_s)

    def _has_finished(self, program: Program, now_s: float) -> None:
        self._predictability.add(program.turn)


def best_ttl_s(calls_s: list[float], saved_s: float) -> float:
    """The tau that gains most, when a return in time saves `saved_s`; `calls_s` ascend."""
    n = len(calls_s)
    ranks = {max(1, n * i // CANDIDATES) for i in range(1, CANDIDATES + 1)}
    gains = [(rank / n * saved_s - calls_s[rank - 1], calls_s[rank - 1]) for rank in sorted(ranks)]
    gain, tau_s = max(gains, key=lambda entry: entry[0])
    return tau_s if gain > 0 else 0.0
