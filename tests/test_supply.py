"""Groups in flight, on virtual time: never too stale, never wasted, always accounted for."""

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace

import anyio
import pytest
from pydantic import BaseModel

from fakes import FakeEngine, FakeRenderer, FakeTools
from sostenuto.envs.environment import Environment
from sostenuto.errors import SostenutoError, lone_error
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.inspection import oldest_of
from sostenuto.runtime.jobs.batch import Batch
from sostenuto.runtime.jobs.events import Dropped, JobEvent, NoSignal, Stalled, as_json
from sostenuto.runtime.jobs.group_rewards import GroupJudge
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.plan import plan_of
from sostenuto.runtime.jobs.supply import GroupSupply
from sostenuto.runtime.journal import Journal
from sostenuto.runtime.ledger import Ledger
from sostenuto.runtime.rollouts import Rollouts, Runner
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.tools.wire import ProgramState, Reward
from sostenuto.trainer.algorithms import GRPO
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import CallId, EngineId, Episode, ProgramId, SandboxRung, ToolCall, ToolResult

pytestmark = pytest.mark.looptime


class Number(BaseModel):
    number: int


class Counting(Environment[Number]):
    """Never run: the fake tool server stands for it."""

    async def reset(self, task: Number) -> str:
        return str(task.number)

    async def reward(self, episode: Episode) -> float:
        return float(episode.turns)


@dataclass
class Uneven(FakeTools):
    """Calls that take very different times; half of the groups have equal rewards."""

    longest_s: float = 60.0
    noise: random.Random = field(default_factory=lambda: random.Random(3))

    async def call(
        self, program_id: ProgramId, call_id: CallId, call: ToolCall, *, timeout_s: float, priority: int = 0
    ) -> ToolResult:
        self.call_s = self.noise.random() ** 3 * self.longest_s
        return await super().call(program_id, call_id, call, timeout_s=timeout_s, priority=priority)

    async def reward(
        self, program_id: ProgramId, call_id: CallId, episode: Episode, *, timeout_s: float
    ) -> Reward:
        group, member = (int(part) for part in program_id.split("-")[-2:])
        value = float(member % 2) if group % 2 else 1.0
        return Reward(value=value, elapsed_s=0)


@dataclass
class Course:
    """A job whose trainer takes `learn_s` a step."""

    job: RLJob
    learn_s: float
    ledger: Ledger = field(default_factory=Ledger)
    said: list[JobEvent] = field(default_factory=list[JobEvent])
    staleness: list[int] = field(default_factory=list[int])
    judge: GroupJudge | None = None
    around: Callable[[Runner], Runner] = lambda runner: runner
    seen: list[Batch] = field(default_factory=list[Batch])
    supply: GroupSupply = field(init=False)
    tools: FakeTools = field(default_factory=FakeTools)

    async def run(self, tools: FakeTools) -> None:
        self.tools = tools
        engine = FakeEngine(("!look a", "done"), kv_tokens=4000, concurrency=16)
        with closing(sqlite3.connect(":memory:")) as connection:
            settings = SchedulerSettings(live_programs=64)
            engines = {EngineId("e"): engine}
            async with open_dispatcher(settings, engines, tools, FakeRenderer()) as dispatcher:
                rollouts = Rollouts(self.around(dispatcher), self.ledger, Journal(connection))
                await self._train(dispatcher, rollouts)

    async def _train(self, dispatcher: Dispatcher, rollouts: Rollouts) -> None:
        supply = self.supply = GroupSupply(
            plan_of(self.job), rollouts, lambda: dispatcher.version, self.said.append, self.judge,
            inspect=lambda programs: oldest_of(dispatcher, self.tools, programs),
        )  # fmt: skip
        async with anyio.create_task_group() as generation:
            generation.start_soon(supply.generate)
            for _ in range(self.job.steps):
                batch = await supply.take()
                self.seen.append(batch)
                deployed = dispatcher.version
                self.staleness += [member.staleness(deployed) for member in batch.members]
                await anyio.sleep(self.learn_s)
                supply.trained(batch.groups)
                manifest = Manifest(version=str(deployed.next()), path="/none", nbytes=0, tensors=())
                await dispatcher.publish(manifest)
                supply.deployed()
            generation.cancel_scope.cancel()
        supply.close("job_over")


def job(*, staleness: int, tasks: int = 1000, steps: int = 12) -> RLJob:
    return RLJob(
        env=Counting,
        model=".",
        tasks=[Number(number=n) for n in range(tasks)],
        steps=steps,
        groups_per_step=4,
        max_staleness=staleness,
        algorithm=GRPO(group_size=4),
    )


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("learn_s", [1.0, 200.0])
async def test_finished_work_is_used_within_the_bound_whatever_it_took(staleness: int, learn_s: float):
    course = Course(job(staleness=staleness), learn_s)
    await course.run(Uneven())
    assert max(course.staleness) <= staleness
    assert {event.reason for event in course.said if isinstance(event, Dropped)} <= {"no_signal", "job_over"}
    statistics = course.ledger.statistics()
    assert statistics.closes
    assert (statistics.running, statistics.sealed) == (0, 0)
    assert set(statistics.outcomes) <= {
        "trained",
        "dropped(no_signal)",
        "dropped(job_over)",
        "cancelled(user)",
    }


@dataclass
class Hanging(Uneven):
    """One call of the third group comes back after five minutes."""

    async def call(
        self, program_id: ProgramId, call_id: CallId, call: ToolCall, *, timeout_s: float, priority: int = 0
    ) -> ToolResult:
        if program_id == "job-000002-1":
            await anyio.sleep(300)
        return await super().call(program_id, call_id, call, timeout_s=timeout_s, priority=priority)

    async def state_of(self, program_id: ProgramId) -> ProgramState | None:
        if program_id not in self.live:
            return None
        return ProgramState(
            program_id=program_id, owner="us", age_s=1, left_s=1, phase="calling",
            reason="calling look for 40 s", sandbox="bubblewrap", rung=SandboxRung.RUNNING,
        )  # fmt: skip


async def test_when_no_group_is_completed_the_oldest_program_is_named_with_all_that_it_does():
    course = Course(replace(job(staleness=0, steps=1), stalled_after_s=40.0), 1.0)
    await course.run(Hanging(longest_s=10.0))
    stalled = [event for event in course.said if isinstance(event, Stalled)]
    # From the last group that was completed, again and again until this one is.
    assert len(stalled) == 7
    seen = stalled[-1].oldest
    assert seen is not None
    assert (seen.program, seen.turn, seen.phase, seen.tool) == ("job-000002-1", 1, "acting", "look")
    assert 270 < seen.since_s < 300
    assert stalled[-1].programs == ("job-000002-1",)
    assert str(stalled[-1]) == (
        "no group was completed for 40 s; waiting for job-000002-1: turn 1, acting for "
        f"{seen.since_s:.0f} s, tool look, engine e, sandbox: bubblewrap, running; calling look for 40 s"
    )
    assert b'"tool":"look"' in as_json(stalled[-1], at="now")


async def test_nobody_is_named_while_groups_are_completed_however_long_a_step_takes():
    course = Course(replace(job(staleness=1, steps=3), stalled_after_s=65.0), 500.0)
    await course.run(Uneven())
    assert not [event for event in course.said if isinstance(event, Stalled)]


async def test_a_batch_without_any_signal_is_told_and_another_is_sampled():
    course = Course(job(staleness=1), 1.0)
    with anyio.move_on_after(200):
        await course.run(FakeTools(call_s=1.0))
    told = {(event.groups, event.reward) for event in course.said if isinstance(event, NoSignal)}
    assert told == {(4, 1.0)}
    assert course.ledger.statistics().outcomes["dropped(no_signal)"] > 32


async def test_programs_that_all_fail_end_the_job_with_their_reason():
    course = Course(job(staleness=1), 1.0)
    with (
        pytest.raises(SostenutoError, match=r"in a row failed, the last ones as: failed\(environment"),
        lone_error(),
    ):
        await course.run(Uneven(prompt="x" * 5000))
    assert course.ledger.statistics().closes
