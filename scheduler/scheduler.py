"""Which program decodes next, where, and who gives up its KV for it.

- A program whose result is back goes on where its KV is; one without KV goes where its turn is over first.
- KV of acting programs is given up only when somebody waits for it and that pays (`Seat.cover`).
- Younger programs may pass one that does not fit, for so long and no longer (`Patience`): then an engine is
  cleared for it.
"""

from sostenuto.scheduler.acting import Acting, ActingByTool, ActingForeseen, Foresight
from sostenuto.scheduler.actions import Action, EngineJoined, Evict, Prepared, Refuse, Submitted, TurnEnded
from sostenuto.scheduler.frame import Frame, SchedulerSettings
from sostenuto.scheduler.kv import KvLedger
from sostenuto.scheduler.lifecycle import Move, Phase
from sostenuto.scheduler.order import FIRST, KeyQueue, Order
from sostenuto.scheduler.patience import Patience
from sostenuto.scheduler.prefetch import Prefetch
from sostenuto.scheduler.program import Program, Reason
from sostenuto.scheduler.rates import EngineRates
from sostenuto.scheduler.seat import Seat
from sostenuto.scheduler.tool_times import ToolTimes

__all__ = ["Scheduler", "SchedulerSettings"]

_SWEEP_S = 1.0
"""While somebody waits, engines that had no room are looked at again: hazards fall with time."""
_LOOK_PAST = 8
"""Programs that are tried behind one for which there is no room."""


class Scheduler(Frame):
    """Owner of all programs' phases.  One event at a time; never re-entered.

    With `foresight` it is the clairvoyant one, for comparison: it knows how long each tool call takes.
    """

    def __init__(
        self, settings: SchedulerSettings | None = None, *, foresight: Foresight | None = None
    ) -> None:
        super().__init__(settings)
        self._seats: dict[str, Seat] = {}
        self._waiting = KeyQueue()
        self._ready = 0
        self._times = ToolTimes()
        self._order = Order()
        self._foresight = foresight
        self._swept_s = 0.0
        self._prefetch = Prefetch()
        self._newcomers: list[Program] = []
        """They began to wait since it was last decided."""
        self._unstarted = 0
        """Programs with an environment that have not begun their first turn."""
        self.patience = Patience()

    # ---- hooks ----

    def _waiting_count(self) -> int:
        return len(self._waiting)

    def _new_seat(self, event: EngineJoined) -> Seat:
        plain = super()._new_seat(event)
        acting: Acting = ActingForeseen(self._foresight) if self._foresight else ActingByTool(self._times)
        seat = Seat(
            plain.id,
            plain.kv,
            plain.concurrency,
            rates=EngineRates(event.prefill_tokens_s, event.concurrency),
            acting=acting,
            host=KvLedger(event.host_tokens) if event.host_tokens else None,
            host_tokens_s=event.host_tokens_s,
        )
        self._seats[seat.id] = seat
        return seat

    def _on_submitted(self, event: Submitted, now_s: float) -> list[Action]:
        actions = super()._on_submitted(event, now_s)
        program = self._programs.get(event.program_id)
        if program is not None and not actions:
            self._order.submitted(program)
        return actions

    def _may_prepare(self, now_s: float) -> bool:
        if not super()._may_prepare(now_s):
            return False
        ahead = len(self._preparing) + self._unstarted
        limit = self._settings.prepare_ahead
        if limit is None:
            free = sum(seat.kv.free_tokens for seat in self._seats.values())
            limit = self._prefetch.ahead(free, now_s)
        return ahead < limit

    def _on_prepared(self, program: Program, event: Prepared, now_s: float) -> None:
        self._prefetch.prepared(now_s - program.since_s, event.footprint.tokens + event.turn_tokens)
        self._unstarted += 1
        program.prepared = True
        super()._on_prepared(program, event, now_s)

    def _turn_is_known(self, program: Program, event: TurnEnded, now_s: float) -> None:
        seat, cost = self._seat_of(program), event.cost
        program.evictions = 0
        self.patience.turn_took(now_s - program.decoding_since_s)
        if seat is not None and cost is not None:
            seat.rates.prefilled(cost.prefilled_tokens, cost.prefill_s)
            seat.rates.decoded(cost.generated_tokens, cost.decode_s, len(seat.decoding))

    def _tool_is_known(self, program: Program, acted_s: float, now_s: float) -> None:
        self._times.learn(program.tool, acted_s)
        program.runnable_since_s = now_s

    def _began_acting(self, program: Program, now_s: float) -> None:
        seat = self._seat_of(program)
        assert seat is not None
        seat.hold(program, now_s)
        seat.is_open = True

    def _became_runnable(self, program: Program, now_s: float) -> None:
        key = self._order.key(program, self.gate.deployed)
        if program.turn == 0:
            program.runnable_since_s = now_s
        self.patience.began_to_wait(program)
        if program.phase is Phase.WAITING:
            self._waiting.add(key, program)
            self._newcomers.append(program)
            return
        seat = self._seat_of(program)
        assert seat is not None
        seat.stop_acting(program)
        seat.grew(max(0, program.wanted.private_tokens - program.held_tokens))
        seat.ready.add(key, program)
        seat.is_open = True

    def _leaves(self, program: Program, now_s: float) -> None:
        self._waiting.discard(program.id)
        self.patience.stopped_waiting(program)
        if program.turn == 0 and program.prepared:
            self._unstarted -= 1
            program.prepared = False
        for seat in self._seats.values():
            if seat.claimed_by is program:
                seat.claimed_by = None
        seat = self._seat_of(program)
        if seat is not None:
            seat.forget(program)
            seat.is_open = True

    def _has_finished(self, program: Program, now_s: float) -> None:
        for mate in self._order.finished(program):
            key = self._order.key(mate, self.gate.deployed)
            if mate.id in self._waiting:
                self._waiting.add(key, mate)
            seat = self._seat_of(mate)
            if seat is not None and mate.id in seat.ready:
                seat.ready.add(key, mate)

    def _look_again_s(self) -> float | None:
        waits = self._waiting or any(seat.ready for seat in self._seats.values())
        return self._swept_s + _SWEEP_S if waits and self._seats else None

    def _decide(self, now_s: float) -> list[Action]:
        if now_s >= self._swept_s + _SWEEP_S:
            self._swept_s = now_s
            for seat in self._seats.values():
                seat.is_open = True
                seat.too_much_tokens = float("inf")
        actions: list[Action] = self._serve_the_due(now_s)
        for seat in self._seats.values():
            if seat.is_open and seat.ready:
                actions += self._resume(seat, now_s)
        newcomers, self._newcomers = self._newcomers, []
        if self._waiting and any(seat.is_open for seat in self._seats.values()):
            actions += self._admit(now_s)
        for program in newcomers:
            if program.id in self._waiting and (made := self._place(program, now_s)) is not None:
                actions += made
        return actions

    # ---- those who have waited long enough ----

    def _serve_the_due(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        unclaimed = [s for s in self._seats.values() if s.claimed_by is None and self.gate.may_start(s.id)]
        claimants = {s.claimed_by.id for s in self._seats.values() if s.claimed_by is not None}
        for program in self.patience.in_order():
            if not unclaimed or now_s - program.runnable_since_s < self._settings.patience_s:
                break
            if program.id not in claimants and (seat := self._to_clear(program, unclaimed)) is not None:
                seat.claimed_by = program
                unclaimed.remove(seat)
        for seat in self._seats.values():
            actions += self._clear(seat, now_s)
        return actions

    def _to_clear(self, program: Program, unclaimed: list[Seat]) -> Seat | None:
        """Where its KV is; else the engine that has least to end before it fits."""
        home = self._seat_of(program)
        if home is not None:
            return home if home in unclaimed else None
        able = [seat for seat in unclaimed if seat.kv.could_ever_hold(program.wanted)]
        return max(able, key=lambda seat: seat.kv.free_tokens + seat.acting_tokens, default=None)

    def _clear(self, seat: Seat, now_s: float) -> list[Action]:
        """Start the program that the engine is kept clear for as soon as it fits."""
        program = seat.claimed_by
        if program is None or seat.free_slots <= 0 or not self.gate.may_start(seat.id):
            return []
        needed = seat.kv.missing_tokens(program.id, program.wanted)
        victims = seat.clear(needed, now_s, FIRST) if needed else []
        if victims is None:
            return []
        actions = self._evict(victims, seat, now_s)
        actions.append(self._begin(program, seat, now_s))
        return actions

    # ---- where the KV is ----

    def _resume(self, seat: Seat, now_s: float) -> list[Action]:
        """Programs that hold KV on `seat` and have their result."""
        actions: list[Action] = []
        if not self.gate.may_start(seat.id) or seat.claimed_by is not None:
            return actions
        for program in seat.ready.first_of(_LOOK_PAST):
            if seat.free_slots <= 0:
                self._note(program, Reason.SLOTS, now_s)
                break
            if program.id not in seat.ready:
                continue
            if not seat.kv.could_ever_hold(program.wanted):
                actions += self._outgrown(program, seat, now_s)
            elif (made := self._make_room(program, seat, now_s)) is not None:
                actions += made
                actions.append(self._begin(program, seat, now_s))
            else:
                self._note(program, Reason.KV, now_s)
        return actions

    def _outgrown(self, program: Program, seat: Seat, now_s: float) -> list[Action]:
        self._give_up_kv(program, Move.EVICT, now_s)
        return [Evict(program.id, seat.id), *self._refuse(program)]

    def _make_room(self, program: Program, seat: Seat, now_s: float) -> list[Action] | None:
        """Room for its next turn where its KV is; None when none can be had at a price that pays."""
        needed = seat.kv.missing_tokens(program.id, program.wanted)
        if not needed:
            return []
        victims = seat.cover(needed, now_s)
        if victims is None and not seat.decoding:
            victims = seat.clear(needed, now_s, seat.ready.key_of(program.id) or FIRST)
        return None if victims is None else self._evict(victims, seat, now_s)

    # ---- where there is none ----

    def _admit(self, now_s: float) -> list[Action]:
        """Programs that hold no KV, in order."""
        actions: list[Action] = []
        while True:
            started = 0
            for program in self._waiting.first_of(_LOOK_PAST):
                made = self._place(program, now_s)
                if made is not None:
                    actions += made
                    started += 1
            if not started or not self._waiting:
                break
        if self._waiting:
            for seat in self._seats.values():
                seat.is_open = False
        return actions

    def _place(self, program: Program, now_s: float) -> list[Action] | None:
        """Start it, or refuse it; None: it goes on waiting."""
        able = [s for s in self._seats.values() if s.kv.could_ever_hold(program.wanted)]
        if not able:
            return self._refuse(program) or None
        usable = [s for s in able if s.free_slots > 0 and self.gate.may_start(s.id) and s.claimed_by is None]
        if not usable:
            slots = any(self.gate.may_start(s.id) for s in able)
            self._note(program, Reason.SLOTS if slots else Reason.VERSION, now_s)
            return None
        needs = [(self._lacking(program, seat), seat) for seat in usable]
        free = [seat for needed, seat in needs if not needed]
        if free:
            seat = min(free, key=lambda seat: self._load_with(program, seat))
            return [self._begin(program, seat, now_s)]
        for needed, seat in sorted(needs, key=lambda pair: pair[0]):
            victims = seat.cover(needed, now_s)
            if victims is None and not seat.decoding:
                victims = seat.clear(needed, now_s, self._waiting.key_of(program.id) or FIRST)
            if victims is not None:
                evictions = self._evict(victims, seat, now_s)
                return [*evictions, self._begin(program, seat, now_s)]
        self._note(program, Reason.KV, now_s)
        return None

    def _lacking(self, program: Program, seat: Seat) -> int:
        """What has to be freed there, so that those who hold KV can go on as well."""
        headroom = seat.headroom_tokens if seat.decoding else 0
        growth = seat.kv.growth_tokens(program.id, program.wanted)
        return max(0, growth + headroom - seat.kv.free_tokens)

    def _load_with(self, program: Program, seat: Seat) -> float:
        """How full it would be, in programs: those that are there, and what has to be prefilled for this one.

        A prefix that is there already counts for what it saves and no more, so that one which all programs
        share does not draw them all to one engine.
        """
        growth = seat.kv.growth_tokens(program.id, program.footprint)
        return len(seat.kv) + growth / max(1, program.footprint.tokens)

    def _refuse(self, program: Program) -> list[Action]:
        """Refuse what no engine of the fleet can hold; its shell answers with Answered or Finished."""
        if not self._seats or any(s.kv.could_ever_hold(program.wanted) for s in self._seats.values()):
            return []
        largest = max(seat.kv.capacity_tokens for seat in self._seats.values())
        self._waiting.discard(program.id)
        return [Refuse(program.id, program.wanted.tokens, largest)]

    # ---- what changes ----

    def _begin(self, program: Program, seat: Seat, now_s: float) -> Action:
        reserved = seat.kv.reserve(program.id, program.wanted)
        assert reserved, f"{program.id} does not fit on {seat.id}"
        self._waiting.discard(program.id)
        seat.ready.discard(program.id)
        self.patience.stopped_waiting(program)
        for other in self._seats.values():
            if other.claimed_by is program:
                other.claimed_by = None
        if program.turn == 0:
            self._unstarted -= 1
            self._prefetch.admitted(now_s)
        return self._start(program, seat, now_s)

    def _evict(self, victims: list[Program], seat: Seat, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for victim in victims:
            victim.evictions += 1
            self._give_up_kv(victim, Move.EVICT, now_s)
            actions.append(Evict(victim.id, seat.id))
        return actions

    def _seat_of(self, program: Program) -> Seat | None:
        return self._seats.get(program.engine.id) if program.engine is not None else None
