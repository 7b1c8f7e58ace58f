"""Which program decodes next, where, and who gives up its KV for it.

- A program whose result is back goes on where its KV is; one without KV goes where its turn is over first.
- KV of acting programs is given up only when somebody waits for it and that pays (`Seat.cover`); where the
  engine has a lower tier it goes there first.
- Others may pass a program that does not fit, for so long and no longer (`Patience`): then an engine is
  cleared for it.
- Sandboxes step down when one more is wanted and those of waiting programs would lie idle for longer than
  their coming back takes.
"""

from collections.abc import Iterable

from sostenuto.scheduler.actions import Action, Evict, MoveSandbox, Offload, Refuse
from sostenuto.scheduler.lifecycle import Move
from sostenuto.scheduler.order import FIRST, Key
from sostenuto.scheduler.paced import Paced
from sostenuto.scheduler.program import NEVER, Program, Reason
from sostenuto.scheduler.roster import loosest
from sostenuto.scheduler.seat import Seat, Taken
from sostenuto.types import SandboxRung

_SWEEP_S = 1.0
"""While somebody waits, engines that had no room are looked at again: rates of return fall with time."""
_LOOK_PAST = 2
"""Programs that are tried where the first of them may find no room."""
_LOOK_FAR = 64
"""Programs that are looked at for one that a certain engine can hold."""
_SNAPSHOT_AFTER = 20.0
"""A sandbox that lies idle for so many times what a snapshot costs is snapshotted."""


class Scheduler(Paced):
    """Owner of all programs' phases.  One event at a time; never re-entered."""

    _swept_s = 0.0

    def _look_again_s(self) -> float | None:
        waits = self._seats and (len(self.patience) > 0 or self._is_short_of_sandboxes())
        probe_s = super()._look_again_s()
        sweep_s = self._swept_s + _SWEEP_S if waits else None
        return min((s for s in (probe_s, sweep_s) if s is not None), default=None)

    def _decide(self, now_s: float) -> list[Action]:
        actions = self._keep_pace(now_s)
        actions += self._follow_gate(now_s)
        if now_s >= self._swept_s + _SWEEP_S:
            actions += self._sweep(now_s)
        if not len(self.patience):
            self._newcomers.clear()
            return actions
        actions += self._serve_the_due(now_s)
        stirred = self._roster.take_stirred()
        for seat in stirred:
            if seat.may_resume:
                actions += self._resume(seat, now_s)
        newcomers, self._newcomers = self._newcomers, []
        if len(self._waiting):
            actions += self._admit(newcomers, stirred, now_s)
        return actions

    def _sweep(self, now_s: float) -> list[Action]:
        self._swept_s = now_s
        for seat in self._seats.values():
            seat.changes()
            seat.too_much_tokens = float("inf")
        return self._make_room_for_sandbox()

    # ---- those who have waited long enough ----

    def _serve_the_due(self, now_s: float) -> list[Action]:
        if not self.patience.is_anybody_due(now_s - self._settings.patience_s):
            return []
        for seat in self._roster.claimed_and_stirred():
            if seat.claimed_by is not None and not self._admits(seat.claimed_by, seat):
                seat.unclaim()
        if self._roster.has_unclaimed:
            self._claim_for_the_due(now_s)
        actions: list[Action] = []
        for seat in self._roster.claimed_and_stirred():
            if seat.claimed_by is not None:
                actions += self._clear(seat, seat.claimed_by, now_s)
        return actions

    def _claim_for_the_due(self, now_s: float) -> None:
        for program in self.patience.due(now_s - self._settings.patience_s, _LOOK_FAR):
            if not self._roster.has_unclaimed:
                break
            if program.claims is None and (seat := self._to_clear(program)) is not None:
                seat.claim(program)

    def _to_clear(self, program: Program) -> Seat | None:
        """Where its KV is; else the engine that has least to end before it fits."""
        home = self.seat_of(program)
        if home is not None:
            return home if home.claimed_by is None and self._admits(program, home) else None
        return loosest(
            seat
            for seat in self._seats.values()
            if seat.claimed_by is None
            and self._admits(program, seat)
            and seat.could_ever_hold(program.wanted)
        )

    def _clear(self, seat: Seat, program: Program, now_s: float) -> list[Action]:
        """Start the program that the engine is kept clear for as soon as it fits."""
        if self.seat_of(program) is seat and not seat.could_ever_hold(program.wanted):
            return self._outgrown(program, seat, now_s)
        if seat.free_slots <= 0 or not self._admits(program, seat):
            return []
        needed = seat.kv.missing_tokens(program.id, program.wanted)
        victims = seat.clear(program, needed, now_s, FIRST) if needed else []
        if victims is None:
            return []
        started = self._begin(program, seat, victims, now_s)
        if started is None:
            seat.unclaim()
        return started or []

    # ---- where the KV is ----

    def _resume(self, seat: Seat, now_s: float) -> list[Action]:
        """Programs that hold KV on `seat` and have their result."""
        actions: list[Action] = []
        if self._particular or not self.gate.may_start(seat.id):
            actions += self._forsake(seat, now_s)
        while self._is_open(seat) and seat.claimed_by is None and seat.may_resume:
            started = self._resume_first(seat, now_s)
            actions += started
            if not started:
                break
        return actions

    def _resume_first(self, seat: Seat, now_s: float) -> list[Action]:
        actions: list[Action] = []
        seat.ready_needs = NEVER
        for program in seat.ready.first_of(_LOOK_PAST):
            if seat.free_slots <= 0:
                self._note(program, Reason.SLOTS, now_s)
                break
            if program.id not in seat.ready or not self._admits(program, seat):
                continue
            if not seat.could_ever_hold(program.wanted):
                actions += self._outgrown(program, seat, now_s)
                continue
            started = self._start_at_home(program, seat, now_s)
            if started is None:
                started = self._start_elsewhere(program, seat, now_s)
            actions += started or []
        if actions:
            seat.ready_needs = 0
        return actions

    def _forsake(self, seat: Seat, now_s: float) -> list[Action]:
        """Programs with KV on an engine that takes none of their requests go elsewhere, where one does."""
        actions: list[Action] = []
        for program in list(seat.ready.last_first()):
            if self._admits(program, seat):
                continue
            if not self.gate.is_changing(seat.id) and self._is_met(program):
                self._give_up_kv(program, Move.EVICT, now_s)
                actions.append(Evict(program.id, seat.id))
            else:
                self._note(program, Reason.VERSION, now_s)
        return actions

    def _outgrown(self, program: Program, seat: Seat, now_s: float) -> list[Action]:
        self._give_up_kv(program, Move.EVICT, now_s)
        return [Evict(program.id, seat.id), *self._refuse(program)]

    def _start_at_home(self, program: Program, seat: Seat, now_s: float) -> list[Action] | None:
        needed = seat.kv.missing_tokens(program.id, program.wanted)
        key = seat.ready.key_of(program.id) or FIRST
        victims = self._victims(program, needed, seat, key, now_s)
        if victims is None:
            seat.ready_needs = min(seat.ready_needs, seat.kv.free_tokens + needed)
            self._note(program, Reason.KV, now_s)
            return None
        return self._begin(program, seat, victims, now_s)

    def _start_elsewhere(self, program: Program, home: Seat, now_s: float) -> list[Action] | None:
        """It has waited as long as computing its KV anew takes: another engine with room may do that."""
        anew_s = home.prefill_s(program.wanted.private_tokens)
        if len(self._seats) == 1 or now_s - program.runnable_since_s < anew_s:
            return None
        others = [
            s
            for s in self._usable(program, self._roster.roomiest())
            if s is not home and not s.lacking_tokens(program)
        ]
        if not others:
            return None
        seat = min(others, key=lambda other: other.load_with(program))
        self._give_up_kv(program, Move.EVICT, now_s)
        return [Evict(program.id, home.id), *(self._begin(program, seat, [], now_s) or [])]

    # ---- where there is none ----

    def _admit(self, newcomers: list[Program], stirred: list[Seat], now_s: float) -> list[Action]:
        """Programs that hold no KV: in order where an engine has changed, else only those that are new."""
        actions: list[Action] = []
        seats = [seat for seat in stirred if seat.may_admit]
        while seats and len(self._waiting):
            for seat in seats:
                seat.is_changed, seat.waiting_needs = False, NEVER
            made = [self._place(program, seats, now_s) for program in self._first_for(seats)]
            started = [action for some in made for action in some or ()]
            actions += started
            # Who comes next in the queue has not been tried anywhere.
            seats = self._roster.roomiest() if started else []
        if newcomers:
            seats = self._roster.roomiest()
            first = {program.id for program in self._first_for(seats)}
            for program in newcomers:
                if program.id in first:
                    actions += self._place(program, seats, now_s) or []
                elif program.id in self._waiting:
                    actions += self._refuse(program)
        return actions

    def _first_for(self, seats: list[Seat]) -> list[Program]:
        """Who comes first: for each of `seats` the first few that it could hold if it were empty.

        Who has to wait for another engine does not stand in the way of others.
        """
        first = self._waiting.first_of(_LOOK_PAST)
        able = [seat for seat in seats if seat.claimed_by is None and self._is_open(seat)]
        if not able or all(map(self._roster.fits_all, (program.wanted for program in first))):
            return first
        tries = {seat.id: _LOOK_PAST for seat in able}
        first.clear()
        for program in self._waiting.first_of(_LOOK_FAR):
            fits = [seat for seat in able if tries[seat.id] and seat.could_ever_hold(program.wanted)]
            for seat in fits:
                tries[seat.id] -= 1
            if fits or not self._roster.able(program.wanted):
                first.append(program)
        return first

    def _usable(self, program: Program, seats: Iterable[Seat]) -> list[Seat]:
        return [
            seat
            for seat in seats
            if seat.claimed_by is None
            and seat.free_slots > 0
            and self._admits(program, seat)
            and seat.could_ever_hold(program.wanted)
        ]

    def _place(self, program: Program, seats: list[Seat], now_s: float) -> list[Action] | None:
        """Start it on one of `seats`, or refuse it; None: it goes on waiting."""
        usable = self._usable(program, seats)
        if not usable:
            return self._wait_or_refuse(program, now_s)
        needs = [(seat.lacking_tokens(program), seat) for seat in usable]
        free = [seat for needed, seat in needs if not needed]
        if free:
            seat = min(free, key=lambda seat: seat.load_with(program))
            return self._begin(program, seat, [], now_s)
        for needed, seat in needs:
            seat.waiting_needs = min(seat.waiting_needs, seat.kv.free_tokens + needed)
        key = self._waiting.key_of(program.id) or FIRST
        for needed, seat in sorted(needs, key=lambda pair: pair[0]):
            victims = self._victims(program, needed, seat, key, now_s)
            if victims is not None:
                return self._begin(program, seat, victims, now_s)
        self._note(program, Reason.KV, now_s)
        return None

    def _wait_or_refuse(self, program: Program, now_s: float) -> list[Action] | None:
        if refused := self._refuse(program):
            return refused
        verified = any(
            self._admits(program, seat) and seat.could_ever_hold(program.wanted)
            for seat in self._seats.values()
        )
        self._note(program, Reason.SLOTS if verified else Reason.VERSION, now_s)
        return None

    def _refuse(self, program: Program) -> list[Action]:
        """Refuse what no engine of the fleet can hold; its shell answers with Answered or Finished."""
        if not self._seats or any(s.could_ever_hold(program.wanted) for s in self._seats.values()):
            return []
        self._stops_waiting(program)
        largest = max(seat.kv.capacity_tokens for seat in self._seats.values())
        return [Refuse(program.id, program.wanted.tokens, largest)]

    # ---- what changes ----

    def _victims(
        self, program: Program, needed: int, seat: Seat, key: Key, now_s: float
    ) -> list[Taken] | None:
        """Who gives up KV so that `needed` tokens are free; None when that does not pay."""
        if not needed:
            return []
        victims = seat.cover(needed, now_s)
        if victims is None and not seat.decoding:
            # Nothing runs there, so nothing would change by waiting.
            victims = seat.clear(program, needed, now_s, key)
        return victims

    def _begin(self, program: Program, seat: Seat, victims: list[Taken], now_s: float) -> list[Action] | None:
        """Decode its next turn there; None, and nothing changes, while there is no room for its sandbox."""
        is_due = now_s - program.runnable_since_s >= self._settings.patience_s
        sandbox = self._wake_sandbox(program, is_due=is_due)
        if sandbox is None:
            self._note(program, Reason.SANDBOX, now_s)
            return None
        actions = [*sandbox, *self._evict(victims, seat, now_s)]
        if program.offloaded_to is not None and program.offloaded_to is not seat:
            actions.append(Evict(program.id, program.offloaded_to.id))
        program.leave_host()
        fits = seat.takes_in(program)
        assert fits, f"{program.id} does not fit on {seat.id}"
        if program.is_unstarted:
            self._prefetch.admitted(now_s)
        self.patience.served(program, now_s, self._settings.patience_s, self._roster.able(program.wanted))
        self._waited(program, now_s)
        self._stops_waiting(program)
        program.decoding_from = seat.program_seconds(now_s)
        actions.append(self._start(program, seat, now_s))
        return actions

    def _evict(self, victims: list[Taken], seat: Seat, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for victim, tokens in victims:
            if tokens < victim.held_tokens:
                seat.trim(victim, tokens)
                continue
            victim.fatigue += 1
            self._give_up_kv(victim, Move.EVICT, now_s)
            actions += self._one_rung_down(victim, tokens, seat)
        return actions

    def _one_rung_down(self, victim: Program, tokens: int, seat: Seat) -> list[Action]:
        """To the lower tier, where the longest parked make room; without one, the KV is dropped."""
        if seat.host is None or tokens > seat.host.capacity_tokens:
            return [Evict(victim.id, seat.id)]
        actions: list[Action] = []
        while seat.host.free_tokens < tokens:
            oldest = next(iter(seat.offloaded.values()))
            oldest.leave_host()
            actions.append(Evict(oldest.id, seat.id))
        seat.put_on_host(victim, tokens)
        return [*actions, Offload(victim.id, seat.id)]

    # ---- sandboxes ----

    def _is_short_of_sandboxes(self) -> bool:
        return self._sandboxes.is_limited and len(self._queued) > 0 and not self._next_sandbox_fits()

    def _make_room_for_sandbox(self) -> list[Action]:
        """The next environment does not fit: sandboxes of programs that wait for KV step down."""
        oldest = self._queued.oldest()
        if oldest is None or not self._is_short_of_sandboxes():
            return []
        return self._step_down(self._programs[oldest[1]]) or []

    def _wake_sandbox(self, program: Program, *, is_due: bool) -> list[Action] | None:
        """Its sandbox is needed again, after this turn; None when there is no room for it."""
        if self._sandboxes.rung(program.id) in (None, SandboxRung.RUNNING):
            return []
        actions: list[Action] = []
        if not self._sandboxes.can_run(program.id):
            made = self._step_down(program, is_due=is_due)
            if made is None:
                return None
            actions = made
        self._sandboxes.move(program.id, SandboxRung.RUNNING)
        return [*actions, MoveSandbox(program.id, SandboxRung.RUNNING)]

    def _step_down(self, wanting: Program, *, is_due: bool = False) -> list[Action] | None:
        """Free what the sandbox of `wanting` takes; None when that cannot be done or does not pay.

        For one that is due whether it pays or not, and also from programs that are ready.
        """
        rung = SandboxRung.RECLAIMED
        snapshot_s = self._sandboxes.return_s(SandboxRung.SNAPSHOTTED)
        if self._mean_wait_s > _SNAPSHOT_AFTER * snapshot_s or not self._sandboxes.reclaims:
            rung = SandboxRung.SNAPSHOTTED
        if self._mean_wait_s < self._sandboxes.return_s(rung) and not is_due:
            return None
        queues = [self._waiting, *(seat.ready for seat in self._seats.values() if is_due)]
        idle = (program for queue in queues for program in queue.last_first() if program is not wanting)
        stepping = self._sandboxes.step_down(wanting.sandbox, idle)
        for program in stepping:
            self._sandboxes.move(program.id, rung)
        return [MoveSandbox(program.id, rung) for program in stepping] or None
