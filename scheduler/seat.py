"""One engine as the scheduler sees it, and what room on it costs."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import expm1

from sostenuto.scheduler.acting import Acting, Candidate
from sostenuto.scheduler.fleet import EngineSeat
from sostenuto.scheduler.kv import Footprint, KvLedger
from sostenuto.scheduler.order import Key, KeyQueue
from sostenuto.scheduler.program import Program
from sostenuto.scheduler.rates import EngineRates
from sostenuto.scheduler.window import Window
from sostenuto.types import EngineId, ProgramId, Version

Taken = tuple[Program, int]
"""(program, how many of its tokens it gives up)."""

_SMOOTHING = 0.05
_CROWDED = 0.25
_LOOKED_AT = 64
"""Programs among which the cheapest cover is sought; more where those together have too little."""
_ASKED = 1024
"""Programs of which it is asked whether giving up their KV pays, the least likely to return first."""
_CERTAIN = 1e3
"""Rate of a program that has its result already."""


@dataclass(slots=True)
class Marks:
    """Engines that stand out."""

    stirred: dict[EngineId, "Seat"] = field(default_factory=dict[EngineId, "Seat"])
    """Something has changed there since they were looked at."""
    claimed: dict[EngineId, "Seat"] = field(default_factory=dict[EngineId, "Seat"])
    """They are kept clear for a program."""
    kept_from: Version | None = None
    """KV of an older version is lost when the next one comes; None: none is."""
    next_version_s: float = float("inf")
    """When that is expected."""


@dataclass(slots=True, kw_only=True)
class Seat(EngineSeat):
    """Ledger, slots, rates, and the programs that hold KV here."""

    rates: EngineRates
    acting: Acting
    ready: KeyQueue = field(default_factory=KeyQueue)
    acting_tokens: int = 0
    """Held by programs that act; an upper bound of what can be freed without taking from a ready one."""
    holding: int = 0
    """How many act."""
    growth_tokens: float = 0.0
    """What a program that holds KV lacks for its next turn, on average."""
    host: KvLedger | None = None
    """The lower tier; None: there is none."""
    gives_up_parts: bool = False
    """Whether a program can give up the end of its KV and keep the rest."""
    window: Window | None = None
    """The budget that was found, where the engine does not say how large its pool is."""
    offloaded: OrderedDict[ProgramId, Program] = field(default_factory=OrderedDict[ProgramId, Program])
    """Who has KV in the lower tier, longest there first."""
    host_tokens_s: float = 0.0
    is_changed: bool = True
    """Whether more than free tokens has changed since the last program found no room here."""
    waiting_needs: float = 0
    """With so many free tokens one of the first that wait could start."""
    ready_needs: float = 0
    """With so many free tokens one of the first that are ready could start."""
    too_much_tokens: float = float("inf")
    """So much could not be freed at a price that pays, when it was last looked at."""
    claimed_by: Program | None = None
    """It has waited long enough: nothing else starts here before it."""
    marks: Marks = field(default_factory=Marks, repr=False)
    """One for all engines of a fleet."""

    def stir(self) -> None:
        self.marks.stirred[self.id] = self

    def changes(self) -> None:
        """More than free tokens has changed: whoever found no room here may find some."""
        self.is_changed = True
        self.stir()

    @property
    def free_slots(self) -> int:
        return (self.rates.decode_cap if self.is_crowded else self.concurrency) - len(self.decoding)

    @property
    def may_resume(self) -> bool:
        """Whether a look at its ready programs can come to something."""
        return len(self.ready) > 0 and (self.is_changed or self.kv.free_tokens >= self.ready_needs)

    @property
    def may_admit(self) -> bool:
        return self.is_changed or self.kv.free_tokens >= self.waiting_needs

    @property
    def is_crowded(self) -> bool:
        """Whether KV is short: then each token that decodes longer than it must is taken from another."""
        return self.kv.free_tokens < _CROWDED * self.kv.capacity_tokens

    def takes_in(self, program: Program) -> bool:
        """The program will decode here: it holds what its next turn needs.  False: there is no room."""
        self.stir()
        self.ready.discard(program.id)
        return self.kv.reserve(program.id, program.wanted)

    def is_ready(self, program: Program, key: Key) -> None:
        """The program has its result, and its KV is here."""
        self.ready.add(key, program)
        self.ready_needs = 0
        self.stir()

    def hold(self, program: Program, now_s: float) -> None:
        """The program begins to act and keeps what its context takes."""
        self.stir()
        self.acting.add(program, now_s)
        self.holding += 1
        self.kv.reserve(program.id, program.footprint)
        program.held_tokens = program.footprint.private_tokens
        self.acting_tokens += program.held_tokens

    @property
    def headroom_tokens(self) -> int:
        """Kept free for those who act: without it each would hold its KV idle when its result is back."""
        return int(self.holding * self.growth_tokens)

    def grew(self, tokens: int) -> None:
        self.growth_tokens += _SMOOTHING * (tokens - self.growth_tokens)

    def stop_acting(self, program: Program) -> None:
        before = len(self.acting)
        self.acting.discard(program)
        if len(self.acting) < before:
            self.acting_tokens -= program.held_tokens
            self.holding -= 1

    def forget(self, program: Program) -> None:
        """It holds nothing on the device any more.  Safe to call twice."""
        self.stir()
        self.stop_acting(program)
        self.ready.discard(program.id)
        self.decoding.discard(program.id)
        self.kv.release(program.id)

    def claim(self, program: Program) -> None:
        """From now on it is kept clear for the program."""
        self.claimed_by, program.claims = program, self
        self.marks.claimed[self.id] = self
        self.stir()

    def unclaim(self) -> None:
        """It is not kept clear for anybody any more."""
        if self.claimed_by is not None:
            self.claimed_by.claims = None
            self.claimed_by = None
            del self.marks.claimed[self.id]
            self.changes()

    def lacking_tokens(self, program: Program) -> int:
        """What has to be freed for it, so that those who hold KV here can go on as well."""
        headroom = self.headroom_tokens if self.decoding else 0
        growth = self.kv.growth_tokens(program.id, program.wanted)
        return max(0, growth + headroom - self.kv.free_tokens)

    def load_with(self, program: Program) -> float:
        """How full it would be, in programs: those that are there, and what has to be prefilled for this one.

        A prefix that is there already counts for what it saves and no more, so that one which all programs
        share does not draw them all to one engine.
        """
        load = float(len(self.kv))
        if program.offloaded_to is not self:
            growth = self.kv.growth_tokens(program.id, program.footprint)
            load += growth / max(1, program.footprint.tokens)
        return load

    def put_on_host(self, program: Program, tokens: int) -> None:
        """Its KV is in the lower tier, which has room for it."""
        assert self.host is not None
        self.host.reserve(program.id, Footprint(tokens))
        self.offloaded[program.id] = program
        program.offloaded_to = self

    def take_from_host(self, program_id: ProgramId) -> None:
        if self.host is not None:
            self.host.release(program_id)
        self.offloaded.pop(program_id, None)

    def program_seconds(self, now_s: float) -> float:
        """Integral over time of how many decode here; to be asked for before that changes."""
        return self.rates.program_seconds(len(self.decoding), now_s)

    def prefill_s(self, tokens: int) -> float:
        return tokens / self.rates.prefill_tokens_s

    def could_ever_hold(self, wanted: Footprint) -> bool:
        """Whether it fits an empty engine.  A budget that was only found gives way."""
        if self.window is not None:
            self.window.ensure(wanted.tokens + self.kv.block_tokens * (1 + len(wanted.shared)))
            self.follow_window()
        return self.kv.could_ever_hold(wanted)

    def follow_window(self) -> None:
        if self.window is not None and self.window.tokens != self.kv.capacity_tokens:
            self.kv.resize(self.window.tokens)
            self.stir()

    def break_even_rate(self, tokens: int, needed: int) -> float:
        """Below this rate of return, giving up `tokens` for a program that lacks `needed` pays.

        Holding them for g seconds keeps the other from running for g seconds, at the pace at which one
        decodes here now.  Giving them up costs a prefill of tokens/R seconds, in which the program itself
        and all that decode beside it stand still.  Break-even:

            g * pace = max(tokens, needed) / R * (1 + decoding)

        which grows from the time to prefill one program, on an idle engine, to about that of the whole
        pool, on a full one.  From a lower tier tokens come back without the others' standing still.
        """
        at_stake = max(tokens, needed)
        if self.host is not None:
            return self.host_tokens_s * self.rates.pace / at_stake
        return self.rates.prefill_tokens_s * self.rates.pace / (at_stake * (1 + len(self.decoding)))

    def cover(self, needed: int, now_s: float) -> list[Taken] | None:
        """What acting programs give up to free `needed` tokens at the least cost; None: it does not pay.

        Those that are least likely to return go first.
        """
        if self.acting_tokens < needed or needed >= self.too_much_tokens:
            return None
        if self.gives_up_parts:
            taken = self._ends(needed, now_s)
        else:
            paying = first_enough(self._paying(needed, now_s), needed)
            paying.sort(key=lambda candidate: candidate[0])
            taken = whole(cheapest(paying, needed))
        if taken is None:
            self.too_much_tokens = needed
        return taken

    def trim(self, program: Program, tokens: int) -> None:
        """It acts on without the last `tokens` of its KV."""
        program.held_tokens -= tokens
        self.acting_tokens -= tokens
        self.stir()
        self.kv.reserve(program.id, Footprint(program.held_tokens, program.footprint.shared))

    def _ends(self, needed: int, now_s: float) -> list[Taken] | None:
        """No more of each than is lacking: what an engine does that overwrites from the end."""
        highest = self.break_even_rate(0, needed)
        taken: list[Taken] = []
        lacking = -(-needed // self.kv.block_tokens) * self.kv.block_tokens
        for rate, program in islice(self.acting.by_rate(now_s), _ASKED):
            if rate >= highest:
                break
            if self._worth(rate, program, now_s) < highest:
                tokens = min(program.held_tokens, lacking)
                taken.append((program, tokens))
                lacking -= tokens
            if lacking <= 0:
                return taken
        return None

    def clear(self, program: Program, needed: int, now_s: float, before: Key) -> list[Taken] | None:
        """The same for `program` whatever it costs, at last also from ready ones that come after `before`."""
        candidates = first_enough(self._all(now_s, before), needed)
        candidates.sort(key=lambda candidate: candidate[0])
        victims = cheapest(candidates, needed)
        if victims is not None or self.decoding:
            return whole(victims)
        # What they share, and what is left of their last blocks, is freed only with all of them.
        without = {program.id, *(victim.id for _, victim in candidates)}
        return whole(candidates) if self.kv.fits_without(without, program.wanted) else None

    def _paying(self, needed: int, now_s: float) -> Iterator[Candidate]:
        highest = self.break_even_rate(0, needed)
        for rate, program in islice(self.acting.by_rate(now_s), _ASKED):
            if rate >= highest:
                break
            worth = self._worth(rate, program, now_s)
            if worth < self.break_even_rate(program.held_tokens, needed):
                yield worth, program

    def _worth(self, rate: float, program: Program, now_s: float) -> float:
        """Who was made to come back without its KV before is asked last."""
        return self._lasting(rate, program, now_s) * (1 + program.fatigue)

    def _lasting(self, rate: float, program: Program, now_s: float) -> float:
        """At which rate its KV is come back to: what a change of version takes, if that is before it."""
        kept_from = self.marks.kept_from
        if kept_from is None or program.kv_of is None or program.kv_of >= kept_from:
            return rate
        return rate * -expm1(-rate * max(0.0, self.marks.next_version_s - now_s))

    def _all(self, now_s: float, before: Key) -> Iterator[Candidate]:
        for rate, program in self.acting.by_rate(now_s):
            yield self._lasting(rate, program, now_s), program
        for program in self.ready.last_first():
            key = self.ready.key_of(program.id)
            if key is None or key <= before:
                break
            if program is not self.claimed_by:
                yield _CERTAIN, program


def whole(victims: list[Candidate] | None) -> list[Taken] | None:
    return None if victims is None else [(program, program.held_tokens) for _, program in victims]


def first_enough(candidates: Iterable[Candidate], needed: int) -> list[Candidate]:
    """The first few, or as many as have `needed` tokens together; all when that is too few."""
    taken: list[Candidate] = []
    tokens = 0
    for candidate in candidates:
        taken.append(candidate)
        tokens += candidate[1].held_tokens
        if len(taken) >= _LOOKED_AT and tokens >= needed:
            break
    return taken


def cheapest(candidates: Sequence[Candidate], needed: int) -> list[Candidate] | None:
    """Those whose tokens together are at least `needed`, at about the least cost; None when all are too few.

    The cost of one is its rate of return times its tokens.  Candidates are taken by rising rate; after each,
    the cheapest one that would be enough to end with is tried.
    """
    best: list[Candidate] | None = None
    best_cost = paid = 0.0
    lacking = needed
    for taken, candidate in enumerate(candidates):
        enough = (c for c in candidates[taken:] if c[1].held_tokens >= lacking)
        last = min(enough, key=_cost, default=None)
        if last is not None and (best is None or paid + _cost(last) < best_cost):
            best, best_cost = [*candidates[:taken], last], paid + _cost(last)
        paid += _cost(candidate)
        lacking -= candidate[1].held_tokens
        if lacking <= 0 or (best is not None and paid >= best_cost):
            break
    return None if best is None else pruned(best, needed)


def pruned(picked: list[Candidate], needed: int) -> list[Candidate]:
    """Without those whose tokens are not needed once the others are given up, the dearest first."""
    surplus = sum(program.held_tokens for _, program in picked) - needed
    kept: list[Candidate] = []
    for rate, program in sorted(picked, key=_cost, reverse=True):
        if program.held_tokens <= surplus:
            surplus -= program.held_tokens
        else:
            kept.append((rate, program))
    return kept


def _cost(candidate: Candidate) -> float:
    rate, program = candidate
    return rate * program.held_tokens
