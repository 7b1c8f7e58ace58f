"""A policy, a workload and a fleet on virtual time: the shell of a simulated run.

It decides nothing.  The policy hears of one event at a time and whatever it answers is carried out before
the next; the same plans, fleet and faults give the same run.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from sostenuto.errors import ConfigError, SostenutoError
from sostenuto.runtime.simulation.clock import EventClock, Timer
from sostenuto.runtime.simulation.faults import ClientDies, EngineDies, Fault
from sostenuto.runtime.simulation.fleet import Fleet
from sostenuto.runtime.simulation.plan import Plan, Workload
from sostenuto.runtime.simulation.profile import FleetProfile
from sostenuto.runtime.simulation.program import Scene, SimulatedProgram
from sostenuto.runtime.simulation.results import ProgramResult, RunResult, Series
from sostenuto.runtime.simulation.tools import SimulatedTools
from sostenuto.runtime.simulation.waits import Waits
from sostenuto.scheduler.actions import (
    CommitUpdate,
    Decode,
    Evict,
    Expire,
    MoveSandbox,
    Offload,
    Opened,
    Prepare,
    PublicationFailed,
    Quarantine,
    Refuse,
    StageUpdate,
    TurnAway,
)
from sostenuto.scheduler.events import (
    EngineLost,
    Event,
    Finished,
    PublicationBegun,
    SandboxMoved,
    Tick,
    ToolServerJoined,
    UpdateCommitted,
    UpdateStaged,
)
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.update_terms import DEFAULT, KEEP_ALL
from sostenuto.types import EngineId, ProgramId, Version

ENDLESS_LEASE_S = 1e12
STALLED_AFTER_S = 86_400.0
"""Nothing but the passing of time for so long: the policy has forgotten somebody."""
_STALLED_AFTER_CALLS = 100_000
_SAMPLES = 2_048


class Stalled(SostenutoError):  # noqa: N818 - reads as the fact it states
    """The policy lets programs wait for ever: a bug in the policy."""


def simulate(  # noqa: PLR0913 - one keyword for each thing a run can differ in
    policy: Frame,
    workload: Workload,
    fleet: FleetProfile,
    *,
    seed: int = 0,
    timeline: bool = False,
    series: bool = False,
    publish_every_s: float | None = None,
    keep_kv: bool = False,
    faults: Sequence[Fault] = (),
    report_every_s: float | None = 5.0,
) -> RunResult:
    """Run the workload to its end under `policy`, which has to be a new one.

    `seed` is noted in the result: all chance is in the workload.  `series`: fill in the curves over time.
    `keep_kv`: whether KV outlives the update of the weights every `publish_every_s`.  Engines report their
    load every `report_every_s`.  Raises Stalled when the policy forgets a program.
    """
    world = _World(policy, workload, fleet, timeline=timeline, keep_kv=keep_kv, faults=faults)
    began = time.perf_counter()
    world.open()
    if report_every_s is not None:
        world.every(report_every_s, world.report)
    if publish_every_s is not None:
        world.every(publish_every_s, world.publish)
    if series:
        world.sample()
    world.run()
    return world.result(seed, time.perf_counter() - began)


class _World:
    def __init__(
        self,
        policy: Frame,
        workload: Workload,
        fleet: FleetProfile,
        *,
        timeline: bool,
        keep_kv: bool,
        faults: Sequence[Fault],
    ) -> None:
        self._policy = policy
        self._workload = workload
        self._profile = fleet
        self._keep_kv = keep_kv
        self._faults = faults
        self._leases = {fault.program_id: fault.lease_s for fault in faults if isinstance(fault, ClientDies)}
        self._clock = EventClock()
        self._waits = Waits()
        self._fleet = Fleet(fleet.engine, self._clock, self._waits)
        self._tools = SimulatedTools(fleet.tools, workload.tool_concurrency, self._clock)
        self._scene = Scene(
            self._feed, self._clock, self._fleet, self._tools, self._waits, self._program_is_over, timeline
        )
        self._programs: dict[ProgramId, SimulatedProgram] = {}
        self._results: list[ProgramResult] = []
        self._to_come = deque(sorted(workload.programs, key=lambda plan: plan.arrival_s))
        self._left = len(workload.programs)
        self._coming = 0
        """Arrivals and faults that are still to happen."""
        self._events: deque[Event] = deque()
        self._is_feeding = False
        self._event_count = 0
        self._tick: Timer | None = None
        self._tick_s = float("inf")
        self._waiting: Series = []
        self._sample_s = 1.0
        self._carry: dict[type, Callable[[Any], None]] = {
            Prepare: lambda action: self._programs[action.program_id].prepare(),
            Decode: lambda action: self._programs[action.program_id].decode(action),
            Evict: self._evict,
            Offload: self._offload,
            MoveSandbox: self._move_sandbox,
            TurnAway: self._turn_away,
            Refuse: self._refuse,
            Expire: lambda action: self._end(action.program_id, "nothing was heard of it for its lease"),
            StageUpdate: self._stage,
            CommitUpdate: self._commit,
            Opened: _nothing,
            PublicationFailed: _nothing,
            Quarantine: _nothing,
        }

    # ---- the run ----

    def open(self) -> None:
        self._check()
        limits = self._profile.tools
        self._feed(ToolServerJoined(limits.memory_bytes, limits.disk_bytes, limits.cpus))
        for number in range(self._profile.engines):
            self._feed(self._fleet.join(_engine_id(number), Version(0, 0)))
        for fault in self._faults:
            self._at(fault.at_s, lambda fault=fault: self._happens(fault))
        concurrency = self._workload.concurrency
        if concurrency is None:
            for plan in self._to_come:
                self._at(plan.arrival_s, lambda plan=plan: self._submit(plan))
            self._to_come.clear()
        else:
            for _ in range(min(concurrency, len(self._to_come))):
                self._submit(self._to_come.popleft())

    def run(self) -> None:
        clock, scene = self._clock, self._scene
        quiet_since_s, quiet_calls = 0.0, 0
        while self._left:
            if not clock.step():
                raise self._stalled()
            if scene.in_motion or self._coming:
                quiet_calls = 0
            elif not quiet_calls:
                quiet_since_s, quiet_calls = clock.now_s(), 1
            else:
                quiet_calls += 1
                is_long = clock.now_s() - quiet_since_s > STALLED_AFTER_S
                if is_long or quiet_calls > _STALLED_AFTER_CALLS:
                    raise self._stalled()

    def result(self, seed: int, wall_s: float) -> RunResult:
        self._fleet.close()
        usage = self._tools.usage
        profile = self._profile
        return RunResult(
            type(self._policy).__name__,
            self._workload.name,
            f"{profile.engines} x {profile.engine.name}",
            seed,
            makespan_s=self._clock.now_s(),
            programs=self._results,
            engines=self._fleet.results,
            peak_sandbox_bytes=usage.peak_memory_bytes,
            peak_disk_bytes=usage.peak_disk_bytes,
            peak_sandboxes=usage.peak_sandboxes,
            waiting=self._waiting,
            events=self._event_count,
            wall_s=wall_s,
        )

    def _check(self) -> None:
        for fault in self._faults:
            if isinstance(fault, EngineDies) and not 0 <= fault.engine < self._profile.engines:
                raise ConfigError(
                    f"faults: engine {fault.engine} is to die, the fleet has {self._profile.engines}; "
                    "count from 0"
                )

    def _stalled(self) -> Stalled:
        waiting = list(self._programs.values())
        shown = ", ".join(f"{program.plan.id} {program.phase}" for program in waiting[:8])
        more = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
        return Stalled(
            f"{type(self._policy).__name__} has nothing in motion at {self._clock.now_s():.0f} s and "
            f"{len(waiting)} programs are not over: {shown}{more}; the policy shows {self._policy!r}"
        )

    # ---- what happens by itself ----

    def every(self, seconds: float, do: Callable[[], None]) -> None:
        def again() -> None:
            do()
            self._clock.call_at(self._clock.now_s() + seconds, again)

        self._clock.call_at(self._clock.now_s() + seconds, again)

    def report(self) -> None:
        for event in self._fleet.report():
            self._feed(event)

    def publish(self) -> None:
        """A new version, unless the one before is still on its way."""
        gate = self._policy.gate
        if gate.publishing is None and gate.deployed is not None:
            terms = KEEP_ALL if self._keep_kv else DEFAULT
            self._feed(PublicationBegun(gate.deployed.next(), terms))

    def sample(self) -> None:
        """Points of the curves, at half the rate whenever there are many."""
        self._fleet.sample()
        self._waiting.append((self._clock.now_s(), self._waits.programs))
        if len(self._waiting) >= _SAMPLES:
            self._sample_s *= 2
            for curve in [
                self._waiting,
                *(c for e in self._fleet.results for c in (e.used_tokens, e.decoding)),
            ]:
                del curve[1::2]
        self._clock.call_at(self._clock.now_s() + self._sample_s, self.sample)

    def _at(self, when_s: float, do: Callable[[], None]) -> None:
        self._coming += 1

        def now() -> None:
            self._coming -= 1
            do()

        self._clock.call_at(when_s, now)

    def _happens(self, fault: Fault) -> None:
        if isinstance(fault, ClientDies):
            if (program := self._programs.get(fault.program_id)) is not None:
                program.go_silent()
            return
        engine_id = _engine_id(fault.engine)
        if self._fleet.has(engine_id):
            self._fleet.lose(engine_id)
            self._feed(EngineLost(engine_id))
            if fault.back_after_s is not None:
                self._at(self._clock.now_s() + fault.back_after_s, lambda: self._comes_back(engine_id))

    def _comes_back(self, engine_id: EngineId) -> None:
        deployed = self._policy.gate.deployed
        self._feed(self._fleet.join(engine_id, deployed or Version(0, 0)))

    def _submit(self, plan: Plan) -> None:
        program = SimulatedProgram(plan, self._scene, self._leases.get(plan.id, ENDLESS_LEASE_S))
        self._programs[plan.id] = program
        program.submit()

    def _program_is_over(self, program: SimulatedProgram) -> None:
        self._left -= 1
        self._results.append(program.result)
        if self._to_come:
            self._submit(self._to_come.popleft())

    # ---- the policy ----

    def _feed(self, event: Event) -> None:
        self._events.append(event)
        if self._is_feeding:
            return
        self._is_feeding = True
        events, carry, policy = self._events, self._carry, self._policy
        now_s = self._clock.now_s()
        while events:
            event = events.popleft()
            self._event_count += 1
            if type(event) is Finished:
                self._note_waits(event.program_id)
            actions = policy.apply(event, now_s)
            for action in actions:
                carry[type(action)](action)
        self._is_feeding = False
        self._set_tick(now_s)

    def _note_waits(self, program_id: ProgramId) -> None:
        waits = self._policy.waits_of(program_id)
        self._programs.pop(program_id).result.waits_by_reason_s = {r.value: s for r, s in waits.items()}

    def _set_tick(self, now_s: float) -> None:
        wake_s = self._policy.wake_at_s()
        if wake_s is not None and wake_s < self._tick_s:
            if self._tick is not None:
                self._tick.cancel()
            self._tick_s = wake_s
            self._tick = self._clock.call_at(wake_s, self._wake)

    def _wake(self) -> None:
        """A tick that is not due any more is put off."""
        self._tick, self._tick_s = None, float("inf")
        now_s = self._clock.now_s()
        wake_s = self._policy.wake_at_s()
        if wake_s is not None and wake_s <= now_s:
            self._feed(Tick())
        else:
            self._set_tick(now_s)

    # ---- what the policy asks for ----

    def _evict(self, action: Evict) -> None:
        self._fleet.release(action.engine_id, action.program_id)
        if (program := self._programs.get(action.program_id)) is not None:
            program.evicted()

    def _offload(self, action: Offload) -> None:
        if (engine := self._fleet.engine(action.engine_id)) is not None:
            engine.offload(action.program_id)
        if (program := self._programs.get(action.program_id)) is not None:
            program.evicted()

    def _move_sandbox(self, action: MoveSandbox) -> None:
        program_id, rung = action.program_id, action.rung
        self._tools.move(program_id, rung, lambda s: self._feed(SandboxMoved(program_id, rung, s)))

    def _turn_away(self, action: TurnAway) -> None:
        program = self._programs[action.program_id]
        self._at(self._clock.now_s() + action.retry_after_s, program.submit)

    def _refuse(self, action: Refuse) -> None:
        needs, most = action.needed_tokens, action.largest_tokens
        self._end(
            action.program_id, f"refused: its next turn needs {needs} tokens of KV, engines have {most}"
        )

    def _end(self, program_id: ProgramId, failed: str) -> None:
        if (program := self._programs.get(program_id)) is not None:
            program.end(failed)

    def _stage(self, action: StageUpdate) -> None:
        engine = self._fleet.engine(action.engine_id)
        if engine is not None:
            engine.stage(lambda: self._feed(UpdateStaged(action.engine_id, action.version)))

    def _commit(self, action: CommitUpdate) -> None:
        engine_id, version, drops = action.engine_id, action.version, not self._keep_kv
        engine = self._fleet.engine(engine_id)
        if engine is not None:
            said = UpdateCommitted(engine_id, version, drops)
            engine.commit(version, keep_kv=self._keep_kv, done=lambda: self._feed(said))


def _engine_id(number: int) -> EngineId:
    return EngineId(f"engine-{number}")


def _nothing(action: object) -> None:
    del action
