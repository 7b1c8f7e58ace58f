"""One engine as the scheduler sees it, and what room on it costs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sostenuto.scheduler.acting import Acting
from sostenuto.scheduler.fleet import EngineSeat
from sostenuto.scheduler.kv import KvLedger
from sostenuto.scheduler.order import Key, KeyQueue
from sostenuto.scheduler.program import Program
from sostenuto.scheduler.rates import EngineRates


@dataclass(slots=True, kw_only=True)
class Seat(EngineSeat):
    """Ledger, slots, rates, and the programs that hold KV here."""

    rates: EngineRates
    acting: Acting
    ready: KeyQueue = field(default_factory=KeyQueue)
    acting_tokens: int = 0
    """Held by programs that act; an upper bound of what can be freed without taking from a ready one."""
    host: KvLedger | None = None
    """The lower tier; None: there is none."""
    host_tokens_s: float = 0.0
    is_open: bool = True
    """Whether something has changed since the last program found no room here."""
    too_much_tokens: float = float("inf")
    """So much could not be freed at a price that pays, when it was last looked at."""
    claimed_by: Program | None = None
    """It has waited long enough: nothing else starts here before it."""

    @property
    def free_slots(self) -> int:
        return min(self.concurrency, self.rates.decode_cap) - len(self.decoding)

    def hold(self, program: Program, now_s: float) -> None:
        """The program begins to act and keeps what its context takes."""
        self.acting.add(program, now_s)
        self.kv.reserve(program.id, program.footprint)
        program.held_tokens = program.footprint.private_tokens
        self.acting_tokens += program.held_tokens

    def stop_acting(self, program: Program) -> None:
        before = len(self.acting)
        self.acting.discard(program)
        if len(self.acting) < before:
            self.acting_tokens -= program.held_tokens

    def forget(self, program: Program) -> None:
        """It holds nothing on the device any more.  Safe to call twice."""
        self.stop_acting(program)
        self.ready.discard(program.id)
        self.decoding.discard(program.id)
        if self.kv.release(program.id):
            self.is_open = True
        if self.claimed_by is program:
            self.claimed_by = None

    def break_even_hazard(self, tokens: int, needed: int) -> float:
        """Below this chance of return per second, giving up `tokens` for a program that lacks `needed` pays.

        Holding them for g seconds keeps the other program from running for g seconds.  Giving them up
        costs a prefill of tokens/R seconds, in which the program itself and all that decode beside it
        stand still: g = max(tokens, needed) / R * (1 + decoding).  From the lower tier they come back
        without the others' standing still.
        """
        at_stake = max(tokens, needed)
        if self.host is not None:
            return self.host_tokens_s / at_stake
        return self.rates.prefill_tokens_s / (at_stake * (1 + len(self.decoding)))

    def cover(self, needed: int, now_s: float) -> list[Program] | None:
        """Acting programs whose KV, given up, frees `needed` tokens at the least cost; None: it does not pay.

        Those that are least likely to return go first.
        """
        if self.acting_tokens < needed or needed >= self.too_much_tokens:
            return None
        victims = cheapest(self._paying(needed, now_s), needed)
        if victims is None:
            self.too_much_tokens = needed
        return victims

    def clear(self, needed: int, now_s: float, before: Key) -> list[Program] | None:
        """The same whatever it costs, at last also from ready programs that come after `before`."""
        return cheapest(self._all(now_s, before), needed)

    def _paying(self, needed: int, now_s: float) -> Iterator[Program]:
        highest = self.break_even_hazard(0, needed)
        for hazard, program in self.acting.by_hazard(now_s):
            if hazard >= highest:
                break
            # Who was made to come back without its KV before is asked last.
            fatigued = hazard * (1 + program.evictions)
            if fatigued < self.break_even_hazard(program.held_tokens, needed):
                yield program

    def _all(self, now_s: float, before: Key) -> Iterator[Program]:
        for _, program in self.acting.by_hazard(now_s):
            yield program
        for program in self.ready.last_first():
            key = self.ready.key_of(program.id)
            if key is None or key <= before:
                break
            if program is not self.claimed_by:
                yield program


def cheapest(candidates: Iterable[Program], needed: int) -> list[Program] | None:
    """As many of `candidates`, in this order, as free `needed` tokens, without the superfluous."""
    picked: list[Program] = []
    lacking = needed
    for program in candidates:
        picked.append(program)
        lacking -= program.held_tokens
        if lacking <= 0:
            return pruned(picked, needed)
    return None


def pruned(picked: list[Program], needed: int) -> list[Program]:
    """Without those whose tokens are not needed once the later ones are given up."""
    surplus = sum(program.held_tokens for program in picked) - needed
    kept: list[Program] = []
    for program in reversed(picked):
        if program.held_tokens <= surplus:
            surplus -= program.held_tokens
        else:
            kept.append(program)
    kept.reverse()
    return kept
