"""Who is prepared, who decodes where, and who gives up KV.  `apply(event, now_s) -> actions`.

It reads no clock, does no I/O and awaits nothing.  The first policy:
- Programs are prepared in order of submission, a bounded number ahead of admission.
- The oldest program that can run goes first, under two caps: KV tokens and decode slots.  While it
  waits for KV of an engine, nothing younger is started there, so its wait is bounded by the turns that
  decode now: each of them ends in a phase that can give up its KV.
- A program whose KV is kept returns to the engine that keeps it.
- KV is given up only when someone waits for it: by the longest-acting program first (tool times are
  heavy-tailed: who has acted long will act long), then by the youngest one that is ready.
"""

import heapq
from dataclasses import dataclass, field
from typing import assert_never

from pydantic import BaseModel, ConfigDict, Field

from sostenuto.scheduler.actions import (
    Action,
    Answered,
    Decode,
    EngineEvent,
    EngineJoined,
    EngineLost,
    Event,
    Evict,
    Expire,
    Finished,
    Prepare,
    Prepared,
    ProgramEvent,
    PublicationBegun,
    Refuse,
    Submitted,
    Tick,
    ToolReturned,
    TurnEnded,
    UpdateCommitted,
    UpdateFailed,
    UpdateStaged,
)
from sostenuto.scheduler.fleet import AgeQueue, EngineSeat
from sostenuto.scheduler.gate import Gate
from sostenuto.scheduler.kv import KvLedger
from sostenuto.scheduler.lifecycle import Move, Phase, after
from sostenuto.scheduler.program import Program, Snapshot
from sostenuto.types import EngineId, ProgramId


class SchedulerSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    live_programs: int = Field(default=256, gt=0)
    """Programs with an environment at one time, prepared or being prepared."""

    prepare_ahead: int = Field(default=8, gt=0)
    """Environments that may be prepared before there is KV for them."""


@dataclass(slots=True)
class _Blocked:
    """What this round of admission has already found to be full."""

    engines: set[EngineId] = field(default_factory=set[EngineId])
    waiting: bool = False


class Scheduler:
    """Owner of all programs' phases.  One event at a time; never re-entered."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._programs: dict[ProgramId, Program] = {}
        self._engines: dict[EngineId, EngineSeat] = {}
        self._queued = AgeQueue()
        self._waiting = AgeQueue()
        self._leases: list[tuple[float, ProgramId]] = []
        self._submitted = 0
        self._preparing: set[ProgramId] = set()
        self._late_events = 0
        self.gate = Gate()

    def __repr__(self) -> str:
        counts = dict.fromkeys(Phase, 0)
        for program in self._programs.values():
            counts[program.phase] += 1
        shown = " ".join(f"{phase}={n}" for phase, n in counts.items() if n)
        return f"<Scheduler {shown or 'empty'} engines={len(self._engines)}>"

    def apply(self, event: Event, now_s: float) -> list[Action]:
        """Take in what happened and say what has to be done now.

        Events of an earlier turn or of a program that is over change nothing.  Raises InvalidTransition
        for an event that the lifecycle does not allow.
        """
        actions = self._take_in(event, now_s)
        actions += self._expire(now_s)
        actions += self._admit(now_s)
        actions += self._prepare(now_s)
        return actions

    def wake_at_s(self) -> float | None:
        """When a Tick is due: the next lease ends."""
        return self._leases[0][0] if self._leases else None

    def snapshot(self) -> Snapshot:
        return Snapshot(
            phases={program.id: program.phase for program in self._programs.values()},
            engines={
                seat.id: (seat.kv.statistics().reserved_tokens, len(seat.decoding))
                for seat in self._engines.values()
            },
            waiting=len(self._waiting),
            late_events=self._late_events,
        )

    # ---- what happened ----

    def _take_in(self, event: Event, now_s: float) -> list[Action]:
        match event:
            case Submitted():
                self._submit(event, now_s)
            case Tick():
                pass
            case (
                EngineJoined()
                | EngineLost()
                | PublicationBegun()
                | UpdateStaged()
                | UpdateCommitted()
                | UpdateFailed()
            ):
                return self._of_engine(event, now_s)
            case _:
                self._of_program(event, now_s)
        return []

    def _submit(self, event: Submitted, now_s: float) -> None:
        if event.program_id in self._programs:
            self._late_events += 1
            return
        self._submitted += 1
        program = Program(event.program_id, self._submitted, event.lease_s)
        program.since_s = now_s
        self._programs[program.id] = program
        self._queued.add(program.rank, program.id)

    def _of_program(self, event: ProgramEvent, now_s: float) -> None:
        program = self._programs.get(event.program_id)
        is_late = isinstance(event, TurnEnded | ToolReturned) and program and event.turn != program.turn
        if program is None or is_late:
            self._late_events += 1
            return
        if program.phase is not Phase.QUEUED:
            program.expires_s = now_s + program.lease_s
        self._advance(program, event, now_s)

    def _advance(self, program: Program, event: ProgramEvent, now_s: float) -> None:
        match event:
            case Prepared():
                self._become_prepared(program, event, now_s)
            case TurnEnded():
                self._begin_acting(program, event, now_s)
            case ToolReturned():
                self._take_result(program, event, now_s)
            case Answered():
                self._begin_scoring(program, now_s)
            case Finished():
                self._finish(program, now_s)
            case _:
                assert_never(event)

    def _begin_scoring(self, program: Program, now_s: float) -> None:
        self._move(program, Move.ANSWER, now_s)
        self._leave_engine(program)
        self._waiting.discard(program.id)
        self._preparing.discard(program.id)

    def _become_prepared(self, program: Program, event: Prepared, now_s: float) -> None:
        self._move(program, Move.PREPARED, now_s)
        self._preparing.discard(program.id)
        program.footprint, program.turn_tokens = event.footprint, event.turn_tokens
        self._waiting.add(program.rank, program.id)

    def _begin_acting(self, program: Program, event: TurnEnded, now_s: float) -> None:
        self._move(program, Move.CALL_TOOL, now_s)
        program.footprint, program.turn_tokens = event.footprint, 0
        seat = program.engine
        assert seat is not None
        seat.decoding.discard(program.id)
        seat.acting[program.id] = None
        seat.kv.reserve(program.id, event.footprint)

    def _take_result(self, program: Program, event: ToolReturned, now_s: float) -> None:
        self._move(program, Move.TOOL_RETURNED, now_s)
        program.footprint, program.turn_tokens = event.footprint, event.turn_tokens
        if program.engine is None:
            self._waiting.add(program.rank, program.id)
            return
        program.engine.acting.pop(program.id, None)
        program.engine.ready.add(program.rank, program.id)

    def _finish(self, program: Program, now_s: float) -> None:
        self._move(program, Move.FINISH, now_s)
        self._leave_engine(program)
        for queue in (self._queued, self._waiting):
            queue.discard(program.id)
        self._preparing.discard(program.id)
        del self._programs[program.id]

    def _of_engine(self, event: EngineEvent, now_s: float) -> list[Action]:
        match event:
            case EngineJoined():
                kv = KvLedger(event.kv_tokens, block_tokens=event.block_tokens)
                self._engines[event.engine_id] = EngineSeat(event.engine_id, kv, event.concurrency)
                self.gate.join(event.engine_id, event.version)
                return []
            case EngineLost():
                self._empty(event.engine_id, Move.LOSE_ENGINE, now_s)
                self._engines.pop(event.engine_id, None)
                return self.gate.leave(event.engine_id)
            case PublicationBegun():
                return self.gate.begin(event.version)
            case UpdateStaged():
                return self.gate.staged(event.engine_id, event.version)
            case UpdateCommitted():
                if event.dropped_kv:
                    self._empty(event.engine_id, Move.EVICT, now_s)
                return self.gate.committed(event.engine_id, event.version)
            case UpdateFailed():
                return self.gate.failed(event.engine_id, event.version, event.reason)
            case _:
                assert_never(event)

    def _empty(self, engine_id: EngineId, move: Move, now_s: float) -> None:
        """The engine has lost KV: of every program, or (EVICT) of those between turns."""
        seat = self._engines.get(engine_id)
        for program in list(self._programs.values()) if seat else []:
            decoding = program.phase is Phase.REASONING
            if program.engine is seat and not (decoding and move is Move.EVICT):
                self._give_up_kv(program, move, now_s)

    # ---- what to do now ----

    def _expire(self, now_s: float) -> list[Action]:
        expired: list[Action] = []
        while self._leases and self._leases[0][0] <= now_s:
            _, program_id = heapq.heappop(self._leases)
            program = self._programs.get(program_id)
            if program is None:
                continue
            if program.expires_s <= now_s:
                # Said once; the shell ends the program, which reports Finished.
                program.expires_s = float("inf")
                expired.append(Expire(program_id))
            elif program.expires_s != float("inf"):
                heapq.heappush(self._leases, (program.expires_s, program_id))
        return expired

    def _prepare(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        while (entry := self._queued.oldest()) and self._may_prepare():
            program = self._programs[entry[1]]
            self._queued.discard(program.id)
            self._move(program, Move.PREPARE, now_s)
            self._preparing.add(program.id)
            program.expires_s = now_s + program.lease_s
            heapq.heappush(self._leases, (program.expires_s, program.id))
            actions.append(Prepare(program.id))
        return actions

    def _may_prepare(self) -> bool:
        live = len(self._programs) - len(self._queued)
        ahead = len(self._preparing) + len(self._waiting)
        return live < self._settings.live_programs and ahead < self._settings.prepare_ahead

    def _admit(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        blocked = _Blocked({seat.id for seat in self._engines.values() if not self._open(seat)})
        while (program := self._next_runnable(blocked)) is not None:
            seat = program.engine or self._place(program, blocked)
            if seat is None:
                actions += self._refuse(program)
                blocked.waiting = program.id in self._waiting
            else:
                actions += self._start(program, seat, blocked, now_s)
        return actions

    def _open(self, seat: EngineSeat) -> bool:
        return seat.free_slots > 0 and self.gate.may_start(seat.id)

    def _next_runnable(self, blocked: _Blocked) -> Program | None:
        """The oldest program that an engine with a free slot could run."""
        open_seats = [seat for seat in self._engines.values() if seat.id not in blocked.engines]
        if not open_seats:
            return None
        heads = [seat.ready.oldest() for seat in open_seats]
        if not blocked.waiting:
            heads.append(self._waiting.oldest())
        oldest = min((head for head in heads if head is not None), default=None)
        return self._programs[oldest[1]] if oldest else None

    def _place(self, program: Program, blocked: _Blocked) -> EngineSeat | None:
        """The open engine with the most room, among those that could ever hold the program."""
        able = [
            seat
            for seat in self._engines.values()
            if seat.id not in blocked.engines and seat.kv.could_ever_hold(program.wanted)
        ]
        return max(able, key=lambda seat: (seat.kv.free_tokens, seat.free_slots), default=None)

    def _refuse(self, program: Program) -> list[Action]:
        """Refuse what no engine of the fleet can hold; otherwise it waits for one that is busy.

        A refused program is in no queue any more; its shell answers with Answered or Finished.
        """
        if any(seat.kv.could_ever_hold(program.wanted) for seat in self._engines.values()):
            return []
        largest = max(seat.kv.capacity_tokens for seat in self._engines.values())
        self._waiting.discard(program.id)
        return [Refuse(program.id, program.wanted.tokens, largest)]

    def _start(self, program: Program, seat: EngineSeat, blocked: _Blocked, now_s: float) -> list[Action]:
        if not seat.kv.could_ever_hold(program.wanted):
            self._leave_engine(program)
            return self._refuse_or_requeue(program, seat, now_s)
        actions: list[Action] = self._make_room(program, seat, now_s)
        if not seat.kv.reserve(program.id, program.wanted):
            blocked.engines.add(seat.id)
            return actions
        seat.ready.discard(program.id)
        self._waiting.discard(program.id)
        self._move(program, Move.DECODE, now_s)
        program.engine, program.turn = seat, program.turn + 1
        seat.decoding.add(program.id)
        if seat.free_slots == 0:
            blocked.engines.add(seat.id)
        return [*actions, Decode(program.id, seat.id, program.turn)]

    def _refuse_or_requeue(self, program: Program, seat: EngineSeat, now_s: float) -> list[Action]:
        """The program outgrew the engine that keeps its KV."""
        self._move(program, Move.EVICT, now_s)
        self._waiting.add(program.rank, program.id)
        return [Evict(program.id, seat.id), *self._refuse(program)]

    def _make_room(self, program: Program, seat: EngineSeat, now_s: float) -> list[Action]:
        """Evict until `program` fits; when nothing that may be evicted is enough, evict nothing."""
        if not seat.kv.missing_tokens(program.id, program.wanted):
            return []
        victims = self._victims(program, seat)
        freeable = sum(victim.footprint.private_tokens for victim in victims)
        if freeable < seat.kv.missing_tokens(program.id, program.wanted):
            return []
        actions: list[Action] = []
        for victim in victims:
            if not seat.kv.missing_tokens(program.id, program.wanted):
                break
            self._give_up_kv(victim, Move.EVICT, now_s)
            actions.append(Evict(victim.id, seat.id))
        return actions

    def _victims(self, program: Program, seat: EngineSeat) -> list[Program]:
        acting = [self._programs[id_] for id_ in seat.acting]
        ready = [self._programs[id_] for id_ in seat.ready.members() if id_ != program.id]
        younger = sorted((p for p in ready if p.rank > program.rank), key=lambda p: -p.rank)
        return acting + younger

    # ---- the only ways in which a program changes ----

    def _move(self, program: Program, move: Move, now_s: float) -> None:
        program.phase = after(program.phase, move, program=program.id)
        program.since_s = now_s

    def _give_up_kv(self, program: Program, move: Move, now_s: float) -> None:
        self._move(program, move, now_s)
        self._leave_engine(program)
        if program.phase is Phase.WAITING:
            self._waiting.add(program.rank, program.id)

    def _leave_engine(self, program: Program) -> None:
        if program.engine is not None:
            program.engine.forget(program.id)
            program.engine = None
