"""Members that fail, that come too late, and groups that are too old to be waited for, on virtual time."""

import re
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace

import anyio
import pytest
from pydantic import JsonValue

from fakes import FakeEngine, FakeRenderer, FakeTools
from sostenuto.errors import ConfigError, ToolServerError
from sostenuto.records import Trajectory
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.jobs.events import GivenUp, JobEvent, Replaced
from sostenuto.runtime.jobs.job import Stragglers
from sostenuto.runtime.jobs.plan import Plan, plan_of
from sostenuto.runtime.jobs.supply import GroupSupply
from sostenuto.runtime.journal import Journal
from sostenuto.runtime.ledger import Ledger
from sostenuto.runtime.program import ProgramSpec
from sostenuto.runtime.rollouts import Rollouts
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.tools.wire import Reward
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import CallId, EngineId, Episode, ProgramId, ToolCall, ToolResult, Version
from test_supply import Course, job

pytestmark = pytest.mark.looptime
_PROGRAM = re.compile(r"job-(\d+)(?:\.(\d+))?-(\d+)(?:\+(\d+))?")


@dataclass(frozen=True)
class Who:
    """What a program's id says of it."""

    group: int
    start: int
    member: int
    refill: int


def who(program_id: ProgramId) -> Who:
    parts = _PROGRAM.fullmatch(program_id)
    assert parts is not None, program_id
    group, start, member, refill = (int(part or 0) for part in parts.groups())
    return Who(group, start, member, refill)


@dataclass
class Moody(FakeTools):
    """Calls that some programs fail, and some take long."""

    fails: Callable[[Who], bool] = lambda _: False
    takes_s: Callable[[Who], float] = lambda _: 1.0
    calls_of: list[Who] = field(default_factory=list[Who])

    async def call(
        self, program_id: ProgramId, call_id: CallId, call: ToolCall, *, timeout_s: float, priority: int = 0
    ) -> ToolResult:
        program = who(program_id)
        self.calls_of.append(program)
        self.call_s = self.takes_s(program)
        if self.fails(program):
            raise ToolServerError("the sandbox died")
        return await super().call(program_id, call_id, call, timeout_s=timeout_s, priority=priority)

    async def reward(
        self, program_id: ProgramId, call_id: CallId, episode: Episode, *, timeout_s: float
    ) -> Reward:
        return Reward(value=float(who(program_id).member % 2), elapsed_s=0)


async def told(course: Course, tools: Moody) -> list[JobEvent]:
    await course.run(tools)
    statistics = course.ledger.statistics()
    assert statistics.closes
    assert (statistics.running, statistics.sealed) == (0, 0)
    assert not tools.live
    return course.said


async def test_a_member_that_the_infrastructure_failed_is_started_anew():
    tools = Moody(fails=lambda program: program.member == 2 and not program.refill)
    course = Course(job(staleness=0, steps=3), 1.0)
    events = await told(course, tools)
    replaced = [event for event in events if isinstance(event, Replaced)]
    assert [(event.program, event.by) for event in replaced[:1]] == [("job-000000-2", "job-000000-2+1")]
    outcomes = course.ledger.statistics().outcomes
    assert outcomes["trained"] == 3 * 4 * 4
    (failed,) = [count for name, count in outcomes.items() if name.startswith("failed(infrastructure")]
    assert failed == len(replaced) == 3 * 4


@pytest.mark.parametrize(("refills", "trained"), [(0, 3), (1, 3), (2, 4)])
async def test_it_is_started_anew_as_often_as_the_job_says(refills: int, trained: int):
    tools = Moody(fails=lambda program: program.member == 2 and program.refill < 2)
    course = Course(replace(job(staleness=0, steps=1), refills=refills), 1.0)
    await told(course, tools)
    assert course.ledger.statistics().outcomes["trained"] == 4 * trained


async def test_without_a_rule_a_group_waits_for_its_last_member_and_with_one_it_goes_on():
    def late(program: Who) -> float:
        return 5000.0 if (program.group, program.member) == (1, 3) else 1.0

    async def course(stragglers: Stragglers | None) -> tuple[float, dict[str, int]]:
        began_s = anyio.current_time()
        running = Course(replace(job(staleness=0, steps=2), stragglers=stragglers), 1.0)
        await told(running, Moody(takes_s=late))
        return anyio.current_time() - began_s, running.ledger.statistics().outcomes

    waited_s, whole = await course(None)
    assert waited_s > 500
    went_on_s, outcomes = await course(Stragglers(after_s=20.0))
    assert went_on_s < 60
    assert outcomes["dropped(straggler)"] == 1
    assert outcomes["trained"] == whole["trained"] - 1
    refilled_s, outcomes = await course(Stragglers(after_s=20.0, then="refill"))
    assert refilled_s < 100
    assert outcomes["recycled(straggler)"] == 1
    assert outcomes["dropped(straggler)"] == 1


async def test_a_straggler_that_is_quick_the_second_time_is_trained():
    tools = Moody(takes_s=lambda program: 5000.0 if program.member == 3 and not program.refill else 1.0)
    course = Course(replace(job(staleness=0, steps=1), stragglers=Stragglers(20.0, "refill")), 1.0)
    await told(course, tools)
    assert course.ledger.statistics().outcomes == {"trained": 16, "recycled(straggler)": 4}


async def test_a_group_that_has_become_too_old_is_given_up_and_its_task_started_anew_once():
    tools = Moody(takes_s=lambda program: 5000.0 if program.group == 0 else 1.0)
    course = Course(replace(job(staleness=1, steps=8), sampler="ready_first"), 5.0)
    events = await told(course, tools)
    given_up = [event for event in events if isinstance(event, GivenUp)]
    assert [(event.group, event.programs, event.again) for event in given_up] == [
        ("job-000000", 4, True),
        ("job-000000.2", 4, False),
    ]
    assert "bound 1" in given_up[0].reason
    outcomes = course.ledger.statistics().outcomes
    assert (outcomes["recycled(stale)"], outcomes["dropped(stale)"]) == (4, 4)
    assert max(course.staleness) <= 1


@pytest.mark.parametrize("sampler", ["in_order", "fifo", "ready_first", "windowed:6"])
@pytest.mark.parametrize("staleness", [0, 2])
async def test_whatever_the_sampler_the_books_close_and_the_bound_holds(sampler: str, staleness: int):
    tools = Moody(
        fails=lambda program: program.group % 5 == 1 and program.member == 0 and not program.refill,
        takes_s=lambda program: float((program.group * 37 + program.member * 11) % 60),
    )
    rule = Stragglers(after_s=30.0, then="refill")
    course = Course(
        replace(job(staleness=staleness, steps=10), sampler=sampler, stragglers=rule, groups_per_step=3), 4.0
    )
    await told(course, tools)
    assert max(course.staleness) <= staleness
    assert course.ledger.statistics().outcomes["trained"] > 10 * 3 * 2


@dataclass
class Part:
    """Some steps of a job, from a state on; what is sampled, and what is trained."""

    plan: Plan
    tools: Moody = field(default_factory=Moody)
    trained: list[int] = field(default_factory=list[int])
    state: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])

    async def run(self, steps: int, state: Mapping[str, JsonValue] | None = None) -> None:
        engines = {EngineId("e"): FakeEngine(("!look a", "done"), kv_tokens=4000, concurrency=16)}
        with closing(sqlite3.connect(":memory:")) as connection:
            async with open_dispatcher(
                SchedulerSettings(), engines, self.tools, FakeRenderer()
            ) as dispatcher:
                rollouts = Rollouts(dispatcher, Ledger(), Journal(connection))
                supply = GroupSupply(self.plan, rollouts, lambda: dispatcher.version, lambda _: None)
                if state is not None:
                    supply.load_state_dict(state)
                async with anyio.create_task_group() as generation:
                    generation.start_soon(supply.generate)
                    for _ in range(steps):
                        await self._step(supply, dispatcher)
                    await anyio.sleep(1.5)
                    self.state = supply.state_dict()
                    generation.cancel_scope.cancel()
                supply.close("job_over")

    async def _step(self, supply: GroupSupply, dispatcher: Dispatcher) -> None:
        batch = await supply.take()
        self.trained += [who(group.members[0].program_id).group for group in batch.groups]
        supply.trained(batch.groups)
        version = str(dispatcher.version.next())
        await dispatcher.publish(Manifest(version=version, path="/none", nbytes=0, tensors=()))
        supply.deployed()


async def test_who_goes_on_samples_anew_what_had_not_come_to_its_end_and_nothing_else():
    plan = plan_of(replace(job(staleness=1, steps=6), sampler="in_order"))
    first, second = Part(plan), Part(plan)
    await first.run(3)
    assert first.state["used"] == 12
    assert first.state["sampler"] == {"sampler": "in_order", "selected": 12}
    assert first.state["tasks"] == {"next": 20, "again": list(range(12, 20)), "there": []}
    await second.run(3, first.state)
    assert first.trained + second.trained == list(range(24))
    assert {program.group for program in first.tools.calls_of} <= set(range(20))
    assert {program.group for program in second.tools.calls_of} == set(range(12, 24))


def test_nonsense_is_refused():
    with pytest.raises(ConfigError, match="after_s is 0; give more than 0 seconds"):
        Stragglers(after_s=0)
    with pytest.raises(ConfigError, match="sampler: 'fifi'"):
        replace(job(staleness=0), sampler="fifi")
    with pytest.raises(ConfigError, match="windowed:4 or more"):
        replace(job(staleness=0), sampler="windowed:2")
    with pytest.raises(ConfigError, match="refills: -1"):
        replace(job(staleness=0), refills=-1)
    supply = GroupSupply(plan_of(job(staleness=0)), *nothing())
    with pytest.raises(ConfigError, match="is no place in them"):
        supply.load_state_dict({"used": 0, "tasks": {"next": "x"}, "sampler": {}})
    with pytest.raises(ConfigError, match="the state is of 'in_order'"):
        supply.load_state_dict(
            {"used": 0, "tasks": {"next": 0, "again": []}, "sampler": {"sampler": "in_order"}}
        )


class Nobody:
    async def run(self, spec: ProgramSpec) -> Trajectory:
        raise NotImplementedError(spec.id)


def nothing() -> tuple[Rollouts, Callable[[], Version], Callable[[JobEvent], None]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        rollouts = Rollouts(Nobody(), Ledger(), Journal(connection))
    return rollouts, lambda: Version(0, 0), lambda _: None
