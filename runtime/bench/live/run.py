"""One policy on freshly started engines, from the first program to the last."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial

import anyio

from sostenuto.runtime.bench.live.program import Course, ReplayedProgram
from sostenuto.runtime.bench.live.replay import ReplayEngine, ReplayRenderer, ReplayTools
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.program import ProgramSpec
from sostenuto.runtime.simulation.plan import Plan, Workload
from sostenuto.runtime.simulation.results import RunResult
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.types import EngineId, Limits, Purpose

_ENVIRONMENT = EnvironmentRef(name="replay")
_LONGEST_S = 24 * 3600.0


async def replay(
    policy: Frame,
    workload: Workload,
    engines: Mapping[EngineId, Engine],
    *,
    seed: int,
    time_scale: float = 1.0,
) -> RunResult:
    """Run every program of the workload.  The engines are new: what they have done is this run's."""
    began_s = anyio.current_time()
    course = Course(workload, lambda: anyio.current_time() - began_s)
    facts = {engine_id: await engine.capabilities() for engine_id, engine in engines.items()}
    replaying = {
        engine_id: ReplayEngine(engine_id, engine, course, kv_tokens=facts[engine_id].kv_tokens)
        for engine_id, engine in engines.items()
    }
    vocabulary = min(fact.tokenizer_size or fact.vocabulary_size for fact in facts.values())
    tools = ReplayTools(course, policy, workload.tool_concurrency, time_scale=time_scale)
    renderer = ReplayRenderer(course, vocabulary)
    async with open_dispatcher(SchedulerSettings(), replaying, tools, renderer, policy=policy) as dispatcher:
        began_s = anyio.current_time()
        await _run_all(workload, partial(_run, dispatcher, course, seed), time_scale)
        makespan_s = course.now_s()
    for engine in replaying.values():
        await engine.close()
    return RunResult(
        type(policy).__name__,
        workload.name,
        f"{len(engines)} x {next(iter(facts.values())).model}",
        seed,
        makespan_s=makespan_s,
        programs=course.results(),
        engines=[engine.result for engine in replaying.values()],
        waiting=course.waiting,
        wall_s=makespan_s,
    )


async def _run_all(workload: Workload, run: Callable[[Plan], Awaitable[None]], time_scale: float) -> None:
    """Closed: so many at one time; open: each when its plan says."""

    async def one_after_the_other(plans: Iterator[Plan]) -> None:
        for plan in plans:
            await run(plan)

    async def later(plan: Plan) -> None:
        await anyio.sleep(plan.arrival_s * time_scale)
        await run(plan)

    async with anyio.create_task_group() as group:
        if workload.concurrency is None:
            for plan in workload.programs:
                group.start_soon(later, plan)
            return
        to_come = iter(workload.programs)
        for _ in range(workload.concurrency):
            group.start_soon(one_after_the_other, to_come)


async def _run(dispatcher: Dispatcher, course: Course, seed: int, plan: Plan) -> None:
    program = course.submit(plan)
    trajectory = await dispatcher.run(_spec(program, seed))
    outcome = trajectory.outcome
    program.ends(outcome.reason if outcome else "")


def _spec(program: ReplayedProgram, seed: int) -> ProgramSpec:
    plan = program.plan
    return ProgramSpec(
        id=plan.id,
        group_id=plan.group,
        task_id=plan.id,
        purpose=Purpose.EVALUATE,
        environment=_ENVIRONMENT,
        task={},
        limits=Limits(turns=len(plan.turns), turn_tokens=program.turn_limit_tokens, wall_s=_LONGEST_S),
        seed=seed,
        group_size=plan.group_size,
    )
