"""Programs that not every version will do for: what they require and are pinned to, and how stale they are.

- A program waits for a version (Reason.VERSION) apart from the queues, so that it is in nobody's way.
- One that no version can serve any more is told so (Unserved), and may be submitted again.
- A pin of the policy lasts while an engine still has the version; a requirement is never given up.
- A program whose record is too stale to be trained is ended when that version opens, before anything is
  computed anew for it.
"""

from sostenuto.scheduler.acting import Foresight
from sostenuto.scheduler.actions import Action, Decode, EndStale, Evict, Unserved
from sostenuto.scheduler.books import Books
from sostenuto.scheduler.events import Prepared, Submitted, ToolReturned
from sostenuto.scheduler.fleet import EngineSeat
from sostenuto.scheduler.lifecycle import Move, Phase
from sostenuto.scheduler.program import NEVER, Program, Reason
from sostenuto.scheduler.requirements import ANY, Requirement
from sostenuto.scheduler.seat import Seat
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId, ProgramId, Version

_ENDABLE = frozenset({Phase.WAITING, Phase.READY, Phase.ACTING, Phase.PARKED, Phase.REASONING})


class Versioned(Books):
    """Books that know which engine's version will do for which program."""

    def __init__(
        self, settings: SchedulerSettings | None = None, *, foresight: Foresight | None = None
    ) -> None:
        super().__init__(settings, foresight=foresight)
        self._particular: dict[ProgramId, Program] = {}
        """Those that require something, or are pinned."""
        self._for_version: dict[ProgramId, Program] = {}
        """Those of them that wait for a version to come."""
        self._owed: list[Action] = []
        self._seen_revision = 0
        self._seen_version: Version | None = None
        self._opened_s = 0.0

    def _is_open(self, seat: Seat) -> bool:
        """Whether some program may start there."""
        return self.gate.may_start(seat.id) or self.gate.may_start_pinned(seat.id) is not None

    def _admits(self, program: Program, seat: Seat) -> bool:
        """Whether the program may start there now."""
        if program.id not in self._particular:
            return self.gate.may_start(seat.id)
        if self.gate.may_start(seat.id):
            return _suits(program, self.gate.version(seat.id))
        return _is_pinned_to(program, self.gate.may_start_pinned(seat.id))

    def _offers(self, engine_id: EngineId, program: Program) -> bool:
        """The same, and also while the engine changes for a moment."""
        if self.gate.serves(engine_id):
            return _suits(program, self.gate.version(engine_id))
        return _is_pinned_to(program, self.gate.may_start_pinned(engine_id))

    def _is_met(self, program: Program) -> bool:
        return any(self._offers(engine_id, program) for engine_id in self._seats)

    # ---- programs ----

    def _on_submitted(self, event: Submitted, now_s: float) -> list[Action]:
        actions = super()._on_submitted(event, now_s)
        program = self._programs.get(event.program_id)
        if program is not None and program.requires is not ANY:
            self._particular[program.id] = program
        if program is not None and event.may_be_ended:
            program.slack = _slack(event.trainable_until, self.gate.deployed)
        return actions

    def _on_prepared(self, program: Program, event: Prepared, now_s: float) -> None:
        self._require(program, event.requires)
        super()._on_prepared(program, event, now_s)

    def _on_tool_returned(self, program: Program, event: ToolReturned, now_s: float) -> None:
        self._require(program, event.requires)
        super()._on_tool_returned(program, event, now_s)

    def _require(self, program: Program, requires: Requirement | None) -> None:
        if requires is None:
            return
        program.requires = requires
        if requires is not ANY or program.pinned_to is not None:
            self._particular[program.id] = program
        else:
            self._particular.pop(program.id, None)

    def _became_runnable(self, program: Program, now_s: float) -> None:
        if program.id not in self._particular or self._is_met(program):
            super()._became_runnable(program, now_s)
        elif program.phase is Phase.READY:
            # What it holds is of a version that will not do for it.
            assert program.engine is not None
            self._owed.append(Evict(program.id, program.engine.id))
            self._give_up_kv(program, Move.EVICT, now_s)
        else:
            self._wait_for_version(program, now_s)

    def _wait_for_version(self, program: Program, now_s: float) -> None:
        wanted, deployed = program.requires.of(program.began), self.gate.deployed
        if program.pinned_to is not None:
            self._unpin(program)
            self._became_runnable(program, now_s)
            return
        self._note(program, Reason.VERSION, now_s)
        if deployed is None or wanted.may_come(deployed) or wanted.allows(deployed):
            self._for_version[program.id] = program
        else:
            self._owed.append(Unserved(program.id, wanted, deployed))

    def _leaves(self, program: Program, now_s: float) -> None:
        self._for_version.pop(program.id, None)
        super()._leaves(program, now_s)

    def _has_expired(self, program: Program) -> None:
        self._for_version.pop(program.id, None)
        super()._has_expired(program)

    def _has_finished(self, program: Program, now_s: float) -> None:
        self._particular.pop(program.id, None)
        super()._has_finished(program, now_s)

    def _unpin(self, program: Program) -> None:
        program.pinned_to = None
        if program.requires is ANY:
            self._particular.pop(program.id, None)

    def _start(self, program: Program, seat: EngineSeat, now_s: float) -> Decode:
        if program.phase is Phase.WAITING:
            program.kv_of = self.gate.version(seat.id)
        return super()._start(program, seat, now_s)

    # ---- what has changed in the gate ----

    def _follow_gate(self, now_s: float) -> list[Action]:
        """Place anew whoever a change of the gate concerns; with what was put off since the last look."""
        actions: list[Action] = []
        if self._seen_revision != self.gate.revision:
            self._seen_revision = self.gate.revision
            for seat in self._seats.values():
                seat.changes()
            if self._seen_version != self.gate.deployed:
                self._seen_version = self.gate.deployed
                actions += self._end_stale()
                self._pin()
                self._price_anew(now_s)
            for program in list(self._particular.values()):
                self._place_anew(program, now_s)
        self._follow_version()
        owed, self._owed = self._owed, []
        return actions + owed

    def _place_anew(self, program: Program, now_s: float) -> None:
        is_met = self._is_met(program)
        if program.pinned_to is not None and not is_met:
            self._unpin(program)
            is_met = self._is_met(program)
        if program.id in self._for_version:
            del self._for_version[program.id]
            self._became_runnable(program, now_s)
        elif not is_met and program.phase is Phase.WAITING and program.id in self._waiting:
            self._stops_waiting(program)
            self._wait_for_version(program, now_s)
        elif not is_met and (seat := self.seat_of(program)) is not None and program.id in seat.ready:
            seat.ready.discard(program.id)
            self._became_runnable(program, now_s)

    def _pin(self) -> None:
        """Those who began with an older version stay with it where an engine still has it."""
        if self.gate.terms.acting != "pin":
            return
        kept = {self.gate.may_start_pinned(engine_id) for engine_id in self._seats} - {None}
        for program in self._programs.values() if kept else ():
            if program.began in kept and program.phase in _ENDABLE:
                program.pinned_to = program.began
                self._particular[program.id] = program

    def _price_anew(self, now_s: float) -> None:
        """What KV will outlive the next change, and when that will be if it is like the last one."""
        since_s, self._opened_s = now_s - self._opened_s, now_s
        self._roster.marks.kept_from = self.gate.kept_from()
        self._roster.marks.next_version_s = now_s + since_s
        for seat in self._seats.values():
            seat.too_much_tokens = NEVER

    def _end_stale(self) -> list[Action]:
        deployed = self.gate.deployed
        if deployed is None or not self.gate.terms.end_stale:
            return []
        stale = [program for program in self._programs.values() if _is_stale(program, deployed)]
        actions: list[Action] = []
        for program in stale:
            assert program.trainable_until is not None
            actions.append(EndStale(program.id, program.trainable_until, deployed))
            program.slack = None
            self._has_expired(program)
        return actions


def _suits(program: Program, version: Version | None) -> bool:
    if version is None or program.pinned_to not in (None, version):
        return False
    return program.requires.of(program.began).allows(version)


def _is_pinned_to(program: Program, version: Version | None) -> bool:
    """Whether it is this version that it needs, which is not deployed any more."""
    wanted = program.requires.of(program.began)
    if version is None or not wanted.allows(version):
        return False
    return program.pinned_to == version or wanted == Requirement.exactly(version)


def _slack(trainable_until: Version | None, deployed: Version | None) -> int | None:
    """How many versions may open while its record can still be trained; None: any number."""
    if trainable_until is None or deployed is None or trainable_until.epoch != deployed.epoch:
        return None
    return trainable_until.number - deployed.number


def _is_stale(program: Program, deployed: Version) -> bool:
    # While its first turn runs, its oldest token may be of a later version than it was granted under.
    is_early = program.turn <= 1 and program.phase is Phase.REASONING
    if program.slack is None or program.began is None or program.phase not in _ENDABLE or is_early:
        return False
    return deployed > Version(program.began.epoch, program.began.number + program.slack)
