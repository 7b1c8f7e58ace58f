"""Sandboxes step down and come back as the scheduler says, on virtual time."""

import anyio
import pytest

from fakes import FakeEngine, FakeRenderer, FakeTools, spec
from sostenuto.errors import SandboxError
from sostenuto.runtime.dispatcher import open_dispatcher
from sostenuto.runtime.program import ProgramSpec
from sostenuto.scheduler.actions import Action, MoveSandbox
from sostenuto.scheduler.events import Event, SandboxMoved, ToolServerJoined, TurnEnded
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.tools.wire import Moved
from sostenuto.types import EngineId, Limits, ProgramId, SandboxRung, StopReason

pytestmark = pytest.mark.looptime

E0 = EngineId("e0")
SCRIPT = ("!look a", "!look b", "done")


class Pausing(Scheduler):
    """Pauses the sandbox of each program that calls a tool; keeps what it hears of sandboxes."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[SandboxMoved] = []

    def apply(self, event: Event, now_s: float) -> list[Action]:
        if isinstance(event, SandboxMoved):
            self.heard.append(event)
        actions = super().apply(event, now_s)
        if isinstance(event, TurnEnded):
            actions.append(MoveSandbox(event.program_id, SandboxRung.PAUSED))
        return actions


class StuckTools(FakeTools):
    async def move(self, program_id: ProgramId, rung: SandboxRung) -> Moved:
        await anyio.sleep(1)
        raise SandboxError(f"{program_id} has no sandbox")


async def test_the_scheduler_hears_which_rung_was_reached_and_what_that_took():
    policy, tools = Pausing(), FakeTools(move_s=0.25)
    engine = FakeEngine(script=SCRIPT)
    async with open_dispatcher(
        SchedulerSettings(), {E0: engine}, tools, FakeRenderer(), policy=policy
    ) as dispatcher:
        await dispatcher.run(spec("p"))
    moved = SandboxMoved(ProgramId("p"), SandboxRung.PAUSED, 0.25)
    assert policy.heard == [moved, moved]
    assert tools.moves == [("p", SandboxRung.PAUSED)] * 2


async def test_a_sandbox_that_cannot_be_moved_ends_no_program():
    engine = FakeEngine(script=SCRIPT)
    async with open_dispatcher(
        SchedulerSettings(), {E0: engine}, StuckTools(), FakeRenderer(), policy=Pausing()
    ) as dispatcher:
        trajectory = await dispatcher.run(spec("p"))
    assert trajectory.stop_reason is StopReason.ANSWERED


def with_sandbox(name: str) -> ProgramSpec:
    made = spec(name, limits=Limits(wall_s=1e6))
    return ProgramSpec(
        id=made.id, group_id=made.group_id, task_id=made.task_id, purpose=made.purpose,
        environment=made.environment.model_copy(update={"memory_bytes": 100}), task={}, limits=made.limits,
    )  # fmt: skip


async def test_where_sandboxes_fill_the_tool_server_those_that_wait_for_an_engine_step_down_and_come_back():
    names = [f"p{number}" for number in range(12)]
    tools = FakeTools(call_s=10.0)
    engine = FakeEngine(script=SCRIPT, decode_s=100.0, concurrency=1)
    async with open_dispatcher(SchedulerSettings(), {E0: engine}, tools, FakeRenderer()) as dispatcher:
        dispatcher.limit(ToolServerJoined(memory_bytes=300))
        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(dispatcher.run, with_sandbox(name))
    rungs = [rung for _, rung in tools.moves]
    assert SandboxRung.RECLAIMED in rungs
    assert rungs.count(SandboxRung.RUNNING) == len(rungs) - rungs.count(SandboxRung.RUNNING)
    assert len(tools.episodes) == len(names)
