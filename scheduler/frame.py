"""What every policy has in common: programs, phases, leases, late events, the version gate.

A policy is a subclass that overrides the hooks.  It decides nothing else: two policies that are
compared differ in their hooks alone.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from sostenuto.scheduler.actions import Action, Decode, Expire, Prepare, TurnAway
from sostenuto.scheduler.events import (
    Answered,
    EngineDraining,
    EngineJoined,
    EngineLoaded,
    EngineLost,
    Event,
    Finished,
    Heard,
    Interrupted,
    Prepared,
    ProgramEvent,
    PublicationBegun,
    SandboxMoved,
    Submitted,
    Tick,
    ToolReturned,
    ToolServerJoined,
    TurnEnded,
    UpdateCommitted,
    UpdateFailed,
    UpdateStaged,
)
from sostenuto.scheduler.fleet import AgeQueue, EngineSeat
from sostenuto.scheduler.leases import Leases
from sostenuto.scheduler.lifecycle import Move, Phase, after
from sostenuto.scheduler.program import NEVER, Doing, Program, Reason, Snapshot
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.scheduler.updates import Updates
from sostenuto.types import ProgramId

E = TypeVar("E", bound=ProgramEvent)
T = TypeVar("T", TurnEnded, ToolReturned, Interrupted)
_URGENT = 1 << 40
"""So much younger in rank is who has to go before all others."""
_Handler = Callable[[Any, float], list[Action]]


class Frame(Updates):
    """Owner of all programs' phases.  One event at a time; never re-entered."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        super().__init__()
        self._settings = settings or SchedulerSettings()
        self._programs: dict[ProgramId, Program] = {}
        self._queued = AgeQueue()
        self._leases = Leases()
        self._submitted = 0
        self._housed: set[ProgramId] = set()
        """Programs with an environment, or with one being made."""
        self._preparing: set[ProgramId] = set()
        """Those of them whose environment is being made."""
        self._late_events = 0
        self._waited_s: dict[Reason, float] = {}
        self._handlers: dict[type, _Handler] = {
            Submitted: self._on_submitted,
            Tick: self._on_tick,
            Prepared: self._of_program(self._on_prepared),
            TurnEnded: self._of_turn(self._on_turn_ended),
            ToolReturned: self._of_turn(self._on_tool_returned),
            Interrupted: self._of_turn(self._on_interrupted),
            Answered: self._of_program(self._on_answered),
            Finished: self._of_program(self._on_finished),
            Heard: self._of_program(_only_renew),
            SandboxMoved: self._of_program(self._on_sandbox_moved),
            EngineJoined: self._on_engine_joined,
            EngineLoaded: self._on_engine_loaded,
            EngineLost: self._on_engine_lost,
            EngineDraining: self._on_draining,
            ToolServerJoined: self._on_tool_server,
            PublicationBegun: self._on_begun,
            UpdateStaged: self._on_staged,
            UpdateCommitted: self._on_committed,
            UpdateFailed: self._on_update_failed,
        }

    def __repr__(self) -> str:
        counts = Counter(program.phase for program in self._programs.values())
        shown = " ".join(f"{phase}={n}" for phase, n in sorted(counts.items()))
        return f"<{type(self).__name__} {shown or 'empty'} engines={len(self._engines)}>"

    def apply(self, event: Event, now_s: float) -> list[Action]:
        """Take in what happened and say what has to be done now.

        Events of an earlier turn or of a program that is over change nothing.  Raises InvalidTransition
        for an event that the lifecycle does not allow.
        """
        self.gate.now_s = now_s
        actions = self._handlers[type(event)](event, now_s)
        actions += self._swap_engines(now_s)
        for program_id in self._leases.expired(self._programs, now_s):
            self._has_expired(self._programs[program_id])
            actions.append(Expire(program_id))
        actions += self._decide(now_s)
        actions += self._prepare(now_s)
        return actions

    def wake_at_s(self) -> float | None:
        """When a Tick is due: a lease ends or the policy wants to look again."""
        look_s = self._look_again_s()
        wake_s = min(self._leases.next_s, self.gate.wake_at_s(), NEVER if look_s is None else look_s)
        return None if wake_s == NEVER else wake_s

    def snapshot(self) -> Snapshot:
        return Snapshot.of(
            self._programs.values(), self._engines.values(), waiting=self._waiting_count(),
            late_events=self._late_events, waited_s=self._waited_s,
        )  # fmt: skip

    def oldest(self, program_ids: Iterable[ProgramId]) -> Doing | None:
        """Of those that are not over, the one that was submitted first, and what it does."""
        here = [self._programs[program_id] for program_id in program_ids if program_id in self._programs]
        return Doing.of(min(here, key=lambda program: program.rank)) if here else None

    def waits_of(self, program_id: ProgramId) -> dict[Reason, float]:
        """Seconds that a program which is not over has waited so far, by reason."""
        return dict(self._programs[program_id].waited_s)

    # ---- hooks ----

    @abstractmethod
    def _decide(self, now_s: float) -> list[Action]:
        """What follows from what is known now."""

    @abstractmethod
    def _became_runnable(self, program: Program, now_s: float) -> None:
        """Nothing is missing but an engine.  READY: `program.engine` holds its KV.  WAITING: nobody does."""

    @abstractmethod
    def _began_acting(self, program: Program, now_s: float) -> None:
        """Its tool runs; its KV is on `program.engine`."""

    @abstractmethod
    def _leaves(self, program: Program, now_s: float) -> None:
        """It gives up its engine and any place in a queue; `program.engine` is cleared afterwards."""

    def _look_again_s(self) -> float | None:
        """When the policy wants a Tick."""
        return None

    def _waiting_count(self) -> int:
        """Programs in the policy's own queues that nothing is missing but an engine."""
        return 0

    def _new_seat(self, event: EngineJoined) -> EngineSeat:
        return EngineSeat.joined(event)

    def _awaited(self, tools: tuple[str, ...]) -> str:
        """The one of `tools` whose return the next turn waits for; "" for none."""
        return tools[0] if tools else ""

    def _turn_is_known(self, program: Program, event: TurnEnded, now_s: float) -> None:
        """A turn's cost, before the program begins to act."""
        del program, event, now_s

    def _tool_is_known(self, program: Program, acted_s: float, queued_s: float, now_s: float) -> None:
        """How long a tool call took, and waited of that, before the program becomes runnable."""
        del program, acted_s, queued_s, now_s

    def _has_expired(self, program: Program) -> None:
        """It is ended: nothing else is said of it."""
        del program

    def _has_finished(self, program: Program, now_s: float) -> None:
        """The program is about to be forgotten."""
        del program, now_s

    def _on_engine_loaded(self, event: EngineLoaded, now_s: float) -> list[Action]:
        return self._on_tick(event, now_s)

    def _on_tool_server(self, event: ToolServerJoined, now_s: float) -> list[Action]:
        return self._on_tick(event, now_s)

    def _on_sandbox_moved(self, program: Program, event: SandboxMoved, now_s: float) -> None:
        del program, event, now_s

    def _may_prepare(self, now_s: float) -> bool:
        """Whether one more environment may be made now."""
        del now_s
        oldest = self._queued.oldest()
        is_urgent = oldest is not None and self._programs[oldest[1]].is_urgent
        reserved = 0 if is_urgent else self._settings.reserved_programs
        return len(self._housed) < self._settings.live_programs - reserved

    def _held_on(self, seat: EngineSeat) -> list[Program]:
        """Programs whose KV is there."""
        return [program for program in self._programs.values() if program.engine is seat]

    # ---- what happened to programs ----

    def _of_program(self, handle: Callable[[Program, E, float], None]) -> Callable[[E, float], list[Action]]:
        def guarded(event: E, now_s: float) -> list[Action]:
            program = self._programs.get(event.program_id)
            if program is None:
                self._late_events += 1
                return []
            self._leases.renew(program, now_s)
            handle(program, event, now_s)
            return []

        return guarded

    def _of_turn(self, handle: Callable[[Program, T, float], None]) -> Callable[[T, float], list[Action]]:
        guarded = self._of_program(handle)

        def current(event: T, now_s: float) -> list[Action]:
            program = self._programs.get(event.program_id)
            if program is not None and (program.turn != event.turn or _is_overtaken(program, event)):
                self._late_events += 1
                return []
            return guarded(event, now_s)

        return current

    def _on_tick(self, event: Event, now_s: float) -> list[Action]:
        """Nothing has changed but the time."""
        del event, now_s
        return []

    def _on_submitted(self, event: Submitted, now_s: float) -> list[Action]:
        if event.program_id in self._programs:
            self._late_events += 1
            return []
        limit = self._settings.queue_limit
        is_bounded = event.has_environment and not event.is_urgent
        if is_bounded and limit is not None and len(self._queued) >= limit:
            return [TurnAway(event.program_id, self._retry_after_s(now_s))]
        self._submitted += 1
        rank = self._submitted - (_URGENT if event.is_urgent else 0)
        program = Program.submitted(event, rank, now_s)
        self._programs[program.id] = program
        program.waits_for(Reason.SANDBOX, now_s)
        if not program.has_environment:
            return [self._begin_preparing(program, now_s)]
        self._queued.add(program.rank, program.id)
        return []

    def _retry_after_s(self, now_s: float) -> float:
        """When to try again: as long as the oldest in the queue has waited, and no less than a second."""
        oldest = self._queued.oldest()
        waited_s = now_s - self._programs[oldest[1]].submitted_s if oldest else 0.0
        return max(1.0, waited_s)

    def _on_prepared(self, program: Program, event: Prepared, now_s: float) -> None:
        self._move(program, Move.PREPARED, now_s)
        self._preparing.discard(program.id)
        program.lacks_engine(event.footprint, event.turn_tokens)
        self._note(program, Reason.ORDER, now_s)
        self._became_runnable(program, now_s)

    def _on_turn_ended(self, program: Program, event: TurnEnded, now_s: float) -> None:
        self._move(program, Move.CALL_TOOL, now_s)
        program.has_sampled = True
        self._turn_is_known(program, event, now_s)
        program.lacks_engine(event.footprint, 0)
        program.tool = self._awaited(event.tools)
        assert program.engine is not None
        program.engine.decoding.discard(program.id)
        self._note(program, Reason.TOOL, now_s)
        self._began_acting(program, now_s)

    def _on_tool_returned(self, program: Program, event: ToolReturned, now_s: float) -> None:
        acted_s = now_s - program.acting_since_s
        self._move(program, Move.TOOL_RETURNED, now_s)
        program.lacks_engine(event.footprint, event.turn_tokens)
        self._tool_is_known(program, acted_s, event.queued_s, now_s)
        self._note(program, Reason.ORDER, now_s)
        self._became_runnable(program, now_s)

    def _on_interrupted(self, program: Program, event: Interrupted, now_s: float) -> None:
        """What KV it leaves behind may still be found by what it sends next."""
        program.has_sampled = program.has_sampled or event.tokens > 0
        if not program.has_sampled:
            program.began = None
        self._give_up_kv(program, Move.LOSE_ENGINE, now_s)

    def _on_answered(self, program: Program, event: object, now_s: float) -> None:
        del event
        self._move(program, Move.ANSWER, now_s)
        self._leave(program, now_s)
        self._preparing.discard(program.id)
        self._note(program, None, now_s)

    def _on_finished(self, program: Program, event: Finished, now_s: float) -> None:
        del event
        self._move(program, Move.FINISH, now_s)
        self._leave(program, now_s)
        self._note(program, None, now_s)
        self._has_finished(program, now_s)
        self._queued.discard(program.id)
        self._preparing.discard(program.id)
        self._housed.discard(program.id)
        del self._programs[program.id]

    # ---- what happened to engines ----

    def _on_engine_joined(self, event: EngineJoined, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if event.engine_id in self._engines:
            actions += self._on_engine_lost(EngineLost(event.engine_id), now_s)
        actions += self.gate.join(event.engine_id, event.version, tells_kv_age=event.tells_kv_age)
        self._engines[event.engine_id] = self._new_seat(event)
        return actions

    def _on_engine_lost(self, event: EngineLost, now_s: float) -> list[Action]:
        self._empty(event.engine_id, Move.LOSE_ENGINE, now_s)
        self._engines.pop(event.engine_id, None)
        return self.gate.leave(event.engine_id)

    # ---- time ----

    def _prepare(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        while (entry := self._queued.oldest()) and self._may_prepare(now_s):
            actions.append(self._begin_preparing(self._programs[entry[1]], now_s))
        return actions

    def _begin_preparing(self, program: Program, now_s: float) -> Action:
        self._queued.discard(program.id)
        self._move(program, Move.PREPARE, now_s)
        if program.has_environment:
            self._housed.add(program.id)
            self._preparing.add(program.id)
        self._leases.begin(program, now_s)
        return Prepare(program.id)

    # ---- the only ways in which a program changes ----

    def _move(self, program: Program, move: Move, now_s: float) -> None:
        program.phase = after(program.phase, move, program=program.id)
        program.since_s = now_s
        if move is Move.CALL_TOOL:
            program.acting_since_s = now_s

    def _note(self, program: Program, reason: Reason | None, now_s: float) -> None:
        """What it waits for from now on."""
        since_s = program.reason_since_s
        before = program.waits_for(reason, now_s)
        if before is not None:
            self._waited_s[before] = self._waited_s.get(before, 0.0) + now_s - since_s

    def _start(self, program: Program, seat: EngineSeat, now_s: float) -> Decode:
        """The program decodes its next turn on `seat`."""
        self._move(program, Move.DECODE, now_s)
        self._note(program, None, now_s)
        program.engine, program.turn = seat, program.turn + 1
        program.began = program.began or self.gate.version(seat.id)
        program.decoding_since_s = now_s
        seat.decoding.add(program.id)
        return Decode(program.id, seat.id, program.turn, program.required)

    def _give_up_kv(self, program: Program, move: Move, now_s: float) -> None:
        """EVICT or LOSE_ENGINE: the program goes on without its KV."""
        waited = program.phase is Phase.READY
        self._move(program, move, now_s)
        self._leave(program, now_s)
        if program.phase is Phase.WAITING:
            if not waited:
                program.runnable_since_s = now_s
                self._note(program, Reason.ORDER, now_s)
            self._became_runnable(program, now_s)

    def _leave(self, program: Program, now_s: float) -> None:
        self._leaves(program, now_s)
        if program.engine is not None:
            program.engine.decoding.discard(program.id)
            program.engine = None


def _only_renew(program: Program, event: Heard, now_s: float) -> None:
    """The lease was renewed by hearing of it."""
    del program, event, now_s


def _is_overtaken(program: Program, event: ProgramEvent) -> bool:
    """Whether the turn was lost with its engine, and this is the engine's last word."""
    return isinstance(event, TurnEnded | Interrupted) and program.phase is Phase.WAITING
