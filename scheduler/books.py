"""What the scheduler knows of programs, engines and sandboxes, kept up to date with every event.

Nothing is decided here: `Scheduler` adds that.
"""

from collections.abc import Iterable

from sostenuto.scheduler.acting import Acting, ActingByTool, ActingForeseen, Foresight
from sostenuto.scheduler.actions import Action
from sostenuto.scheduler.events import (
    EngineDraining,
    EngineJoined,
    EngineLoaded,
    EngineLost,
    Prepared,
    SandboxMoved,
    Submitted,
    ToolServerJoined,
    TurnEnded,
    UpdateCommitted,
    UpdateFailed,
)
from sostenuto.scheduler.fleet import EngineSeat
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.kv import KvLedger
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.scheduler.order import KeyQueue, Order
from sostenuto.scheduler.patience import Patience
from sostenuto.scheduler.prefetch import Prefetch
from sostenuto.scheduler.program import NEVER, Program
from sostenuto.scheduler.rates import EngineRates
from sostenuto.scheduler.roster import Roster
from sostenuto.scheduler.sandboxes import SandboxLedger
from sostenuto.scheduler.seat import Seat
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.scheduler.tool_times import ToolTimes
from sostenuto.scheduler.window import Window
from sostenuto.types import Version


class Books(Frame):
    """Queues, ledgers and what is learned.

    With `foresight` the true time of each tool call is known: the clairvoyant scheduler, for comparison.
    """

    def __init__(
        self, settings: SchedulerSettings | None = None, *, foresight: Foresight | None = None
    ) -> None:
        super().__init__(settings)
        self._roster = Roster()
        self._seats = self._roster.seats
        self._waiting = KeyQueue()
        """Programs that hold no KV and lack nothing else."""
        self._newcomers: list[Program] = []
        """They began to wait since it was last decided."""
        self._unstarted = 0
        """Programs with an environment that have not begun their first turn."""
        self._times = ToolTimes()
        self._order = Order()
        self._prefetch = Prefetch()
        self._sandboxes = SandboxLedger()
        self._foresight = foresight
        self._mean_wait_s = 0.0
        self._ordered_for: Version | None = None
        self.patience = Patience()

    def seat_of(self, program: Program) -> Seat | None:
        """Where its KV is."""
        return self._seats.get(program.engine.id) if program.engine is not None else None

    # ---- engines ----

    def _new_seat(self, event: EngineJoined) -> Seat:
        plain = EngineSeat.joined(event)
        acting: Acting = ActingForeseen(self._foresight) if self._foresight else ActingByTool(self._times)
        seat = Seat(
            plain.id,
            plain.kv,
            plain.concurrency,
            rates=EngineRates(event.prefill_tokens_s, event.concurrency),
            acting=acting,
            gives_up_parts=event.gives_up_parts and not event.host_tokens,
            window=Window() if event.kv_tokens is None else None,
            host=KvLedger(event.host_tokens) if event.host_tokens else None,
            host_tokens_s=event.host_tokens_s,
            marks=self._roster.marks,
        )
        seat.follow_window()
        self._roster.join(seat)
        return seat

    def _on_engine_lost(self, event: EngineLost, now_s: float) -> list[Action]:
        actions = super()._on_engine_lost(event, now_s)
        lost = self._roster.leave(event.engine_id)
        for program in list(self._programs.values()) if lost and lost.host else []:
            if program.offloaded_to is lost:
                program.offloaded_to = None
        return actions

    def _on_committed(self, event: UpdateCommitted, now_s: float) -> list[Action]:
        seat = self._seats.get(event.engine_id)
        if seat is None or not self.gate.expects_commit(event.engine_id, event.version):
            return super()._on_committed(event, now_s)
        for program in list(seat.offloaded.values()) if event.dropped_kv else []:
            program.leave_host()
        seat.changes()
        self._roster.stir_all()
        return super()._on_committed(event, now_s)

    def _on_draining(self, event: EngineDraining, now_s: float) -> list[Action]:
        self._roster.stir_all()
        return super()._on_draining(event, now_s)

    def _on_update_failed(self, event: UpdateFailed, now_s: float) -> list[Action]:
        self._roster.stir_all()
        return super()._on_update_failed(event, now_s)

    def _on_engine_loaded(self, event: EngineLoaded, now_s: float) -> list[Action]:
        del now_s
        seat = self._seats.get(event.engine_id)
        if seat is not None and seat.window is not None:
            seat.window.loaded(event.preemptions, event.hit_rate, len(seat.decoding))
            seat.follow_window()
        return []

    def _held_on(self, seat: EngineSeat) -> list[Program]:
        return [self._programs[program_id] for program_id in seat.kv.holders()]

    # ---- sandboxes ----

    def _on_tool_server(self, event: ToolServerJoined, now_s: float) -> list[Action]:
        del now_s
        self._sandboxes.join(event)
        return []

    def _on_sandbox_moved(self, program: Program, event: SandboxMoved, now_s: float) -> None:
        del now_s
        self._sandboxes.moved(program.id, event.rung, event.elapsed_s)

    def _may_prepare(self, now_s: float) -> bool:
        if not super()._may_prepare(now_s) or not self._next_sandbox_fits():
            return False
        limit = self._settings.prepare_ahead
        if limit is None:
            limit = self._prefetch.ahead(self._roster.free_tokens(), now_s)
        return len(self._preparing) + self._unstarted < limit

    def _next_sandbox_fits(self) -> bool:
        oldest = self._queued.oldest()
        return oldest is None or self._sandboxes.fits(self._programs[oldest[1]].sandbox)

    def _begin_preparing(self, program: Program, now_s: float) -> Action:
        if program.has_environment:
            self._sandboxes.hold(program.id, program.sandbox)
        return super()._begin_preparing(program, now_s)

    # ---- programs ----

    def _on_submitted(self, event: Submitted, now_s: float) -> list[Action]:
        is_new = event.program_id not in self._programs
        actions = super()._on_submitted(event, now_s)
        program = self._programs.get(event.program_id)
        if program is not None and is_new:
            self._order.submitted(program)
        return actions

    def _on_prepared(self, program: Program, event: Prepared, now_s: float) -> None:
        took_s = now_s - program.since_s
        super()._on_prepared(program, event, now_s)
        if not program.has_environment:
            return
        self._prefetch.prepared(took_s, event.footprint.tokens + event.turn_tokens)
        self._unstarted += 1
        program.is_unstarted = True

    def _turn_is_known(self, program: Program, event: TurnEnded, now_s: float) -> None:
        seat, cost = self.seat_of(program), event.cost
        took_s = now_s - program.decoding_since_s
        self.patience.turn_took(took_s)
        program.fatigue /= 2
        if seat is None:
            return
        if seat.free_slots <= 0:
            seat.changes()
        together = seat.program_seconds(now_s) - program.decoding_from
        if cost is not None and took_s > 0:
            seat.rates.prefilled(cost.prefilled_tokens, cost.prefill_s)
            seat.rates.decoded(
                cost.generated_tokens, cost.decode_s, together / took_s, judged=seat.is_crowded
            )
        if seat.window is not None:
            seat.window.turn_ended(seat.kv.capacity_tokens - seat.kv.free_tokens)
            seat.follow_window()

    def _awaited(self, tools: tuple[str, ...]) -> str:
        return max(tools, key=self._times.mean_s, default="")

    def _began_acting(self, program: Program, now_s: float) -> None:
        seat = self.seat_of(program)
        assert seat is not None
        seat.hold(program, now_s)
        self._look_if_idle(seat)

    def _tool_is_known(self, program: Program, acted_s: float, queued_s: float, now_s: float) -> None:
        # How long others keep a tool busy says nothing about the tool.
        self._times.learn(program.tool, max(0.0, acted_s - queued_s))
        program.runnable_since_s = now_s

    def _became_runnable(self, program: Program, now_s: float) -> None:
        key = self._order.key(program, self.gate.deployed)
        if program.turn == 0:
            program.runnable_since_s = now_s
        self.patience.began_to_wait(program)
        seat = self.seat_of(program)
        if program.phase is Phase.WAITING or seat is None:
            self._waiting.add(key, program)
            self._newcomers.append(program)
            return
        seat.stop_acting(program)
        seat.grew(max(0, program.wanted.private_tokens - program.held_tokens))
        seat.is_ready(program, key)

    def _leaves(self, program: Program, now_s: float) -> None:
        if program.phase is Phase.WAITING and program in self.patience:
            # It only loses its KV, and keeps its place among those who wait.
            self._unclaim(program)
        else:
            self._stops_waiting(program)
        seat = self.seat_of(program)
        if seat is not None:
            seat.program_seconds(now_s)
            if seat.free_slots <= 0:
                seat.changes()
            seat.forget(program)
            self._look_if_idle(seat)

    def _look_if_idle(self, seat: Seat) -> None:
        """Nothing decodes there any more: whatever KV costs may be given up now."""
        if not seat.decoding:
            seat.changes()
            seat.too_much_tokens = NEVER

    def _stops_waiting(self, program: Program) -> None:
        """It is in no queue any more, and no engine is kept clear for it."""
        self._waiting.discard(program.id)
        self.patience.stopped_waiting(program)
        if program.is_unstarted:
            self._unstarted -= 1
            program.is_unstarted = False
        self._unclaim(program)

    def _has_expired(self, program: Program) -> None:
        self._stops_waiting(program)
        if (seat := self.seat_of(program)) is not None:
            seat.ready.discard(program.id)

    def _unclaim(self, program: Program) -> None:
        if program.claims is not None:
            program.claims.unclaim()

    def _on_answered(self, program: Program, event: object, now_s: float) -> None:
        program.leave_host()
        if program.phase is Phase.REASONING:
            self.patience.turn_took(now_s - program.decoding_since_s)
        super()._on_answered(program, event, now_s)

    def _has_finished(self, program: Program, now_s: float) -> None:
        program.leave_host()
        self._sandboxes.release(program.id)
        self._order_anew(self._order.finished(program))

    def _follow_version(self) -> None:
        """A version that has opened changes how urgent records are."""
        if self._ordered_for == self.gate.deployed:
            return
        self._ordered_for = self.gate.deployed
        self._order_anew(p for p in self.patience.everybody() if p.trainable_until is not None)

    def _order_anew(self, programs: Iterable[Program]) -> None:
        for program in programs:
            key = self._order.key(program, self.gate.deployed)
            seat = self.seat_of(program)
            if program.id in self._waiting:
                self._waiting.add(key, program)
            elif seat is not None and program.id in seat.ready:
                seat.is_ready(program, key)

    def _waited(self, program: Program, now_s: float) -> None:
        """It is about to decode: keep count of how long programs wait."""
        waited_s = now_s - program.runnable_since_s
        self._mean_wait_s += 0.05 * (waited_s - self._mean_wait_s)

    def _waiting_count(self) -> int:
        return len(self._waiting)
