"""What the dispatcher tells tools of a program, and the scheduler of the time that tools took."""

from pathlib import Path

import pytest

from fakes import FakeEngine, FakeRenderer, FakeTools, spec
from fakes_training import Number
from sostenuto.runtime.dispatcher import open_dispatcher
from sostenuto.runtime.jobs.evaluate import Evaluation
from sostenuto.runtime.journal import open_journal
from sostenuto.runtime.ledger import Ledger
from sostenuto.runtime.rollouts import Rollouts
from sostenuto.runtime.turn_costs import queued_s_of
from sostenuto.scheduler.program import Program
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.types import EngineId, Limits, ToolResult, ToolStatus

E0 = EngineId("e0")


class Observed(Scheduler):
    """Notes what it was told of each call, and what it has learned of the tool since."""

    def __init__(self) -> None:
        super().__init__(SchedulerSettings())
        self.seen: list[tuple[str, float, float, float]] = []

    def _tool_is_known(self, program: Program, acted_s: float, queued_s: float, now_s: float) -> None:
        super()._tool_is_known(program, acted_s, queued_s, now_s)
        self.seen.append((program.tool, acted_s, queued_s, self._times.mean_s(program.tool)))


async def played(tools: FakeTools, *script: str, priority: int = 0) -> Observed:
    policy = Observed()
    program = spec("a", priority=priority)
    async with open_dispatcher(
        SchedulerSettings(), {E0: FakeEngine(script)}, tools, FakeRenderer(), policy=policy
    ) as dispatcher:
        await dispatcher.run(program)
    return policy


@pytest.mark.looptime
async def test_the_scheduler_learns_how_long_a_tool_runs_and_not_how_long_others_keep_it_busy():
    tools = FakeTools(slow={"busy": 2.0}, queued={"busy": 30.0})
    policy = await played(tools, "!busy 1", "done")
    assert policy.seen == [("busy", 32.0, 30.0, 2.0)]


@pytest.mark.looptime
async def test_of_calls_that_run_together_the_wait_of_the_last_one_counts():
    tools = FakeTools(slow={"long": 40.0, "busy": 1.0}, queued={"busy": 30.0})
    policy = await played(tools, "!long 1\n!busy 1", "done")
    assert policy.seen == [("long", 40.0, 0.0, 40.0)]


def test_a_turn_without_calls_has_not_waited_for_any():
    assert queued_s_of([]) == 0.0
    late = ToolResult(ToolStatus.TIMEOUT, "it did not begin", queued_s=9.0)
    assert queued_s_of([ToolResult(ToolStatus.OK, "", elapsed_s=5.0), late]) == 9.0


@pytest.mark.looptime
async def test_calls_have_the_priority_of_their_program():
    tools = FakeTools()
    await played(tools, "!look 1\n!look 2", "done", priority=-1)
    assert tools.priorities == [-1, -1]


async def test_programs_of_an_evaluation_go_before_those_of_training(tmp_path: Path):
    tools, engine = FakeTools(call_s=0.0), FakeEngine(("!look 1", "done"), decode_s=0.0)
    held_out = Evaluation(
        [Number(number=1)],
        EnvironmentRef(name="fake", import_path="fake:Fake"),
        Limits(),
        seed=1,
        name="held-out",
    )
    async with (
        open_journal(tmp_path / "journal.db") as journal,
        open_dispatcher(SchedulerSettings(), {E0: engine}, tools, FakeRenderer()) as dispatcher,
    ):
        rollouts = Rollouts(dispatcher, Ledger(), journal)
        await rollouts.run(spec("training"))
        await held_out.run(rollouts, temperature=1.0, step=0, version=dispatcher.version)
    assert tools.priorities == [0, -1]
