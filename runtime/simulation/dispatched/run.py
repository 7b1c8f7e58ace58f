"""A policy, a workload and a fleet through the runtime's own dispatcher, on virtual time.

What `simulate` does with callbacks, here the dispatcher does with coroutines: every turn is granted, sent,
recorded and released as in a live run.  The same plans and fleet give the same run.
"""

import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import anyio
from anyio.abc import TaskGroup

from sostenuto.errors import ConfigError, EngineError
from sostenuto.records import Trajectory
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.program import ProgramSpec, Timeouts
from sostenuto.runtime.publishing import UpdatePolicy
from sostenuto.runtime.simulation.dispatched.engine import DispatchedEngine
from sostenuto.runtime.simulation.dispatched.loop import NothingToDo, VirtualLoop
from sostenuto.runtime.simulation.dispatched.renderer import SyntheticRenderer
from sostenuto.runtime.simulation.dispatched.script import Script, Stage
from sostenuto.runtime.simulation.dispatched.tools import DispatchedTools
from sostenuto.runtime.simulation.dispatched.transfer import Transfer
from sostenuto.runtime.simulation.fleet import Fleet
from sostenuto.runtime.simulation.plan import Plan, Workload
from sostenuto.runtime.simulation.profile import FleetProfile
from sostenuto.runtime.simulation.results import ProgramResult, RunResult
from sostenuto.runtime.simulation.tools import SimulatedTools
from sostenuto.runtime.simulation.waits import Waits
from sostenuto.runtime.simulation.world import STALLED_AFTER_S, Stalled
from sostenuto.scheduler.events import ToolServerJoined
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.scheduler.update_terms import DEFAULT, UpdateTerms
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import EngineId, Limits, ProgramId, Purpose, StopReason, Version

_NO_LIMIT_S = 1e12
_STALLED_AFTER_STEPS = 20_000


@dataclass(frozen=True, slots=True)
class Publications:
    """The versions that are published during a run."""

    every_s: float
    """A version begins so long after the last one, unless that is still on its way."""
    terms: UpdateTerms = DEFAULT
    transfers: Mapping[int, Transfer] = field(default_factory=dict[int, Transfer])
    """By the number of the engine; one without takes in every version as a whole."""
    count: int | None = None
    """The workload is run over and over until there were so many; None: once."""
    engine: type[DispatchedEngine] = DispatchedEngine


def simulate_dispatched(
    policy: Frame,
    workload: Workload,
    fleet: FleetProfile,
    *,
    seed: int = 0,
    grain: int = 64,
    publications: Publications | None = None,
) -> RunResult:
    """Run the workload to its end under `policy`, which has to be a new one.

    One token of the runtime stands for `grain` tokens of the plans.  What a turn may add is stated for a
    program as a whole.  A program that is turned away is over.  The policy's events are not counted.  Raises
    Stalled when the policy forgets a program.
    """
    if grain < 1:
        raise ConfigError(f"grain is {grain}; give at least 1: so many tokens of a plan go as one")
    run = _Run(policy, workload, fleet, grain=grain, publications=publications)
    began = time.perf_counter()
    try:
        anyio.run(run.whole, backend_options={"loop_factory": lambda: run.loop})
    except NothingToDo as error:
        raise run.stalled() from error
    return run.result(seed, time.perf_counter() - began)


class _Run:
    def __init__(
        self,
        policy: Frame,
        workload: Workload,
        profile: FleetProfile,
        *,
        grain: int,
        publications: Publications | None,
    ) -> None:
        self.loop = VirtualLoop(self._watch)
        self._clock = self.loop.clock
        self._policy = policy
        self._publications = publications
        self._published = 0
        self._rounds = 0
        self._workload = workload
        self._profile = profile
        waits = Waits()
        names = sorted({turn.tool for plan in workload.programs for turn in plan.turns if turn.tool})
        self._stage = Stage(
            Fleet(profile.engine, self._clock, waits),
            SimulatedTools(profile.tools, workload.tool_concurrency, self._clock),
            waits,
            grain,
            tuple(names),
        )
        self._to_come = deque(sorted(workload.programs, key=lambda plan: plan.arrival_s))
        self._results: list[ProgramResult] = []
        self._makespan_s = 0.0
        self._quiet_steps = 0
        self._quiet_since_s = 0.0

    async def whole(self) -> None:
        async with self._dispatcher() as dispatcher, anyio.create_task_group() as beside:
            if self._publications is not None:
                beside.start_soon(self._publish, dispatcher, self._publications)
            async with anyio.create_task_group() as programs:
                if self._workload.concurrency is None:
                    await self._arrivals(dispatcher, programs)
                else:
                    for _ in range(min(self._workload.concurrency, len(self._to_come))):
                        programs.start_soon(self._one_after_the_other, dispatcher)
            self._makespan_s = self._clock.now_s()
            self._stage.fleet.close()
            beside.cancel_scope.cancel()

    @asynccontextmanager
    async def _dispatcher(self) -> AsyncGenerator[Dispatcher]:
        terms = self._publications.terms if self._publications else DEFAULT
        engines = {EngineId(f"engine-{n}"): self._engine(n) for n in range(self._profile.engines)}
        tools = DispatchedTools(self._stage, self._clock, self._policy)
        async with open_dispatcher(
            SchedulerSettings(),
            engines,
            tools,
            SyntheticRenderer(self._stage.tool_names),
            timeouts=Timeouts(),
            update=UpdatePolicy(terms),
            policy=self._policy,
        ) as dispatcher:
            dispatcher.limit(ToolServerJoined(memory_bytes=self._profile.tools.memory_bytes))
            yield dispatcher

    def _engine(self, number: int) -> DispatchedEngine:
        engine_id = EngineId(f"engine-{number}")
        self._stage.fleet.join(engine_id, Version(0, 0))
        engine = self._stage.fleet.engine(engine_id)
        assert engine is not None
        if self._publications is None:
            return DispatchedEngine(engine, self._stage, self._clock)
        transfer = self._publications.transfers.get(number)
        return self._publications.engine(engine, self._stage, self._clock, transfer)

    async def _arrivals(self, dispatcher: Dispatcher, programs: TaskGroup) -> None:
        while self._to_come:
            await anyio.sleep_until(self._to_come[0].arrival_s)
            programs.start_soon(self._one, dispatcher, self._to_come.popleft())

    async def _one_after_the_other(self, dispatcher: Dispatcher) -> None:
        while self._to_come or self._goes_on():
            await self._one(dispatcher, self._to_come.popleft())

    def _goes_on(self) -> bool:
        """Whether the workload is run once more: then it is to come again."""
        publications = self._publications
        if publications is None or publications.count is None or self._published >= publications.count:
            return False
        self._rounds += 1
        self._to_come.extend(
            replace(plan, id=ProgramId(f"{plan.id}~{self._rounds}")) for plan in self._workload.programs
        )
        return True

    async def _one(self, dispatcher: Dispatcher, plan: Plan) -> None:
        script = self._stage.scripts[plan.id] = Script(plan, self._stage, self._clock.now_s())
        trajectory = await dispatcher.run(_spec(script))
        script.ends(_failure(trajectory), self._clock.now_s())
        self._results.append(script.result)
        del self._stage.scripts[plan.id]

    async def _publish(self, dispatcher: Dispatcher, publications: Publications) -> None:
        every_s, number = publications.every_s, dispatcher.version.number
        while publications.count is None or self._published < publications.count:
            await anyio.sleep(every_s - self._clock.now_s() % every_s)
            number += 1
            manifest = Manifest(version=str(Version(0, number)), path="", nbytes=0, tensors=())
            # Where every engine fails, the fleet waits for the next one.
            with suppress(EngineError):
                await dispatcher.publish(manifest)
            self._published += 1
        # What is still to come of this round is not waited for.
        self._to_come.clear()

    def _watch(self) -> None:
        """Nothing but the passing of time for a day, or for very many steps: somebody was forgotten."""
        is_coming = self._workload.concurrency is None and self._to_come
        if self._stage.in_motion or is_coming:
            self._quiet_steps = 0
            return
        now_s = self._clock.now_s()
        if not self._quiet_steps:
            self._quiet_since_s = now_s
        self._quiet_steps += 1
        if now_s - self._quiet_since_s > STALLED_AFTER_S or self._quiet_steps > _STALLED_AFTER_STEPS:
            self._quiet_steps = 0
            raise NothingToDo("nothing but time has passed for long")

    def stalled(self) -> Stalled:
        scripts = list(self._stage.scripts.values())
        shown = ", ".join(str(script) for script in scripts[:8])
        more = f" and {len(scripts) - 8} more" if len(scripts) > 8 else ""
        return Stalled(
            f"{type(self._policy).__name__} has nothing in motion at {self._clock.now_s():.0f} s and "
            f"{len(scripts)} programs are not over: {shown}{more}; the policy shows {self._policy!r}"
        )

    def result(self, seed: int, wall_s: float) -> RunResult:
        usage, profile = self._stage.tools.usage, self._profile
        return RunResult(
            type(self._policy).__name__,
            self._workload.name,
            f"{profile.engines} x {profile.engine.name}",
            seed,
            makespan_s=self._makespan_s,
            programs=self._results,
            engines=self._stage.fleet.results,
            peak_sandbox_bytes=usage.peak_memory_bytes,
            peak_disk_bytes=usage.peak_disk_bytes,
            peak_sandboxes=usage.peak_sandboxes,
            wall_s=wall_s,
        )


def _spec(script: Script) -> ProgramSpec:
    plan = script.plan
    return ProgramSpec(
        id=plan.id,
        group_id=plan.group,
        group_size=plan.group_size,
        task_id=plan.id,
        purpose=Purpose.EVALUATE,
        environment=EnvironmentRef(name="simulated", memory_bytes=plan.sandbox.memory_bytes),
        task={},
        limits=Limits(turns=len(plan.turns), turn_tokens=script.turn_limit_grains, wall_s=_NO_LIMIT_S),
    )


def _failure(trajectory: Trajectory) -> str:
    """Why the program ended before its plan; empty when it did not."""
    if trajectory.outcome is not None:
        return trajectory.outcome.reason
    stop = trajectory.stop_reason
    return "" if stop is StopReason.ANSWERED else f"stopped: {stop}"
