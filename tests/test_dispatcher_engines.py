"""Engines that die, come back and say how they are, on virtual time."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import pytest

from fakes import FakeEngine, FakeRenderer, FakeTools, spec
from sostenuto.errors import Blame, EngineError
from sostenuto.records import Trajectory
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.engines.wire import Capabilities, GenerateReply, GenerateRequest, Spans
from sostenuto.runtime.program import Timeouts
from sostenuto.scheduler.actions import Action
from sostenuto.scheduler.baselines.request_level import RequestSticky
from sostenuto.scheduler.events import EngineLoaded, EngineLost, Event, Submitted, Tick, TurnCost, TurnEnded
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId, GroupId, Limits, StopReason, Version

pytestmark = pytest.mark.looptime

E0, E1 = EngineId("e0"), EngineId("e1")
SCRIPT = ("!look a", "!look b", "done")


class Watched(Scheduler):
    """Keeps what it is told."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        super().__init__(settings)
        self.events: list[Event] = []

    def apply(self, event: Event, now_s: float) -> list[Action]:
        self.events.append(event)
        return super().apply(event, now_s)


class Alarm(Scheduler):
    """Asks for a Tick at each time of `due_s`, and keeps when it came."""

    def __init__(self) -> None:
        super().__init__()
        self.due_s = [10.0]
        self.ticks_s: list[float] = []

    def wake_at_s(self) -> float | None:
        return self.due_s[0] if self.due_s else None

    def apply(self, event: Event, now_s: float) -> list[Action]:
        if isinstance(event, Tick):
            self.ticks_s.append(now_s)
            self.due_s.pop(0)
        return super().apply(event, now_s)


@asynccontextmanager
async def dispatching(
    engines: Mapping[EngineId, FakeEngine], tools: FakeTools, policy: Frame | None = None
) -> AsyncGenerator[Dispatcher]:
    async with open_dispatcher(
        SchedulerSettings(), engines, tools, FakeRenderer(), policy=policy
    ) as dispatcher:
        yield dispatcher


async def run_with(
    dispatcher: Dispatcher, names: str, trouble: float, *happens: FakeEngine
) -> list[Trajectory]:
    """Run programs of these names; the engines `happens` die after `trouble` seconds."""
    done: list[Trajectory] = []

    async def run(name: str) -> None:
        done.append(await dispatcher.run(spec(name)))

    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(run, name)
        await anyio.sleep(trouble)
        for engine in happens:
            engine.dies()
    return sorted(done, key=lambda trajectory: trajectory.program_id)


def text_of(trajectory: Trajectory) -> bytes:
    return bytes(id_ for span in trajectory.spans() for id_ in span.token_ids.tolist())


def assert_nothing_left(dispatcher: Dispatcher, tools: FakeTools, *engines: FakeEngine) -> None:
    snapshot = dispatcher.scheduler.snapshot()
    assert snapshot.phases == {}
    assert all(state == (0, 0) for state in snapshot.engines.values())
    assert tools.live == set()
    assert all((engine.held, engine.decoding) == ({}, 0) for engine in engines)


@pytest.mark.parametrize("policy", [Scheduler, RequestSticky])
@pytest.mark.parametrize("dies_at_s", [0.5, 5.0, 11.5, 12.5, 23.5])
async def test_programs_of_a_dead_engine_go_on_elsewhere_with_exactly_their_tokens(
    policy: type[Frame], dies_at_s: float
):
    engines, tools = {E0: FakeEngine(SCRIPT), E1: FakeEngine(SCRIPT)}, FakeTools()
    # What a program said last is known by the engine that it is said to.
    engines[E1].turns = engines[E0].turns
    async with dispatching(engines, tools, policy()) as dispatcher:
        done = await run_with(dispatcher, "abcd", dies_at_s, engines[E0])
        assert_nothing_left(dispatcher, tools, *engines.values())
    assert [text_of(t) for t in done] == [b"hello!look a\0[a]!look b\0[b]done\0"] * 4
    assert [t.stop_reason for t in done] == [StopReason.ANSWERED] * 4
    assert [t.metrics["turns"] for t in done] == [3.0] * 4
    assert len(tools.calls) == 8


async def test_the_same_tokens_are_sent_again_and_nothing_else():
    engines, tools = {E0: FakeEngine(SCRIPT), E1: FakeEngine(SCRIPT)}, FakeTools()
    engines[E1].turns = engines[E0].turns
    async with dispatching(engines, tools) as dispatcher:
        await run_with(dispatcher, "a", 11.5, engines[E0])
    (_, cut_off), (again, _) = engines[E0].requests, engines[E1].requests
    assert cut_off.token_ids == again.token_ids
    assert cut_off.request_id != again.request_id


async def test_the_loss_of_an_engine_is_told_once_however_many_calls_it_ends():
    engines = {E: FakeEngine(SCRIPT, kv_tokens=9000) for E in (E0, E1)}
    policy, tools = Watched(), FakeTools()
    async with dispatching(engines, tools, policy) as dispatcher:
        await run_with(dispatcher, "abcdefgh", 0.5, engines[E0])
    assert len(engines[E0].log) == 4
    assert [event for event in policy.events if isinstance(event, EngineLost)] == [EngineLost(E0)]


def patiently(
    engines: dict[EngineId, FakeEngine], tools: FakeTools
) -> AbstractAsyncContextManager[Dispatcher]:
    """Engines are waited for longer than any program runs."""
    timeouts = Timeouts(engine_return_s=1000)
    return open_dispatcher(SchedulerSettings(), engines, tools, FakeRenderer(), timeouts=timeouts)


async def test_when_no_engine_comes_back_in_time_every_program_ends_with_the_reason():
    engine, tools = FakeEngine(SCRIPT), FakeTools()
    done: list[Trajectory] = []
    async with dispatching({E0: engine}, tools) as dispatcher, anyio.create_task_group() as group:

        async def run(name: str) -> None:
            done.append(await dispatcher.run(spec(name)))

        group.start_soon(run, "a")
        await anyio.sleep(0.5)
        engine.dies()
        await anyio.sleep(100)
        await run("late")
    for trajectory in done:
        assert trajectory.outcome is not None
        assert trajectory.outcome.blame is Blame.INFRASTRUCTURE
        assert "no engine is left" in trajectory.outcome.reason
    assert len(done) == 2


async def test_without_an_engine_programs_wait_until_one_joins():
    engine, tools = FakeEngine(SCRIPT), FakeTools()
    async with patiently({E0: engine}, tools) as dispatcher, anyio.create_task_group() as group:
        done: list[Trajectory] = []

        async def run() -> None:
            done.append(await dispatcher.run(spec("a")))

        group.start_soon(run)
        await anyio.sleep(0.5)
        engine.dies()
        await anyio.sleep(99.5)
        assert done == []
        engine.starts_again()
        await dispatcher.join(E0)
        await anyio.sleep(24)
        assert [text_of(t) for t in done] == [b"hello!look a\0[a]!look b\0[b]done\0"]
        assert_nothing_left(dispatcher, tools, engine)


async def test_without_an_engine_the_deadline_of_a_program_ends_its_wait():
    engine, tools = FakeEngine(SCRIPT), FakeTools()
    async with patiently({E0: engine}, tools) as dispatcher, anyio.create_task_group() as group:
        done: list[Trajectory] = []

        async def run() -> None:
            done.append(await dispatcher.run(spec("a", limits=Limits(wall_s=60))))

        group.start_soon(run)
        await anyio.sleep(0.5)
        engine.dies()
        await anyio.sleep(60)
        assert [t.stop_reason for t in done] == [StopReason.DEADLINE]


async def test_an_engine_that_refuses_and_is_alive_fails_that_program_alone():
    class Refusing(FakeEngine):
        async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
            if request.program_id == "b":
                raise EngineError("engine e0: refused (400, token_ids)")
            return await super().generate(request, spans=spans)

    policy, tools = Watched(), FakeTools()
    async with dispatching({E0: Refusing(SCRIPT)}, tools, policy) as dispatcher:
        good, refused = await run_with(dispatcher, "ab", 0)
    assert good.stop_reason is StopReason.ANSWERED
    assert refused.outcome is not None
    assert refused.outcome.blame is Blame.INFRASTRUCTURE
    assert not [event for event in policy.events if isinstance(event, EngineLost)]


async def test_an_engine_that_does_not_answer_in_time_counts_as_lost():
    class Hanging(FakeEngine):
        joined = False

        async def capabilities(self) -> Capabilities:
            if self.joined:
                await anyio.sleep_forever()
            self.joined = True
            return await super().capabilities()

    engines, tools = {E0: Hanging(SCRIPT, fail_on_turn=0), E1: FakeEngine(SCRIPT)}, FakeTools()
    async with dispatching(engines, tools) as dispatcher:
        (done,) = await run_with(dispatcher, "a", 0)
        assert anyio.current_time() == 1 + 15 + 23
    assert done.stop_reason is StopReason.ANSWERED


async def test_what_a_dead_engine_still_answers_is_ignored():
    class Undead(FakeEngine):
        """Dies at its first call; the reply to any other is on its way by then."""

        async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
            self.requests.append(request)
            if len(self.requests) == 1:
                await anyio.sleep(0.1)
                self.dies()
                raise EngineError("engine e0: connection reset")
            with anyio.CancelScope(shield=True):
                await anyio.sleep(5)
            return FakeEngine(("nonsense",)).reply(request, 0)

    dead = Undead(kv_tokens=4000)
    engines, tools = {E0: dead, E1: FakeEngine(SCRIPT)}, FakeTools()
    async with dispatching(engines, tools) as dispatcher:
        done = await run_with(dispatcher, "abcd", 0)
    assert len(dead.requests) > 1
    assert [text_of(t) for t in done] == [b"hello!look a\0[a]!look b\0[b]done\0"] * 4


async def test_an_engine_that_is_back_with_old_weights_is_not_taken_in():
    engine = FakeEngine(version="0.3")
    async with dispatching({E0: engine}, FakeTools()) as dispatcher:
        engine.version = "0.2"
        with pytest.raises(EngineError, match=r"e0 serves version 0\.2, and 0\.3 is deployed; start it"):
            await dispatcher.join(E0)


async def test_engines_say_every_few_seconds_how_they_are_and_may_fail_to():
    engines = {E0: FakeEngine(), E1: FakeEngine()}
    policy = Watched()
    async with dispatching(engines, FakeTools(), policy):
        await anyio.sleep(5.5)
        engines[E1].dies()
        await anyio.sleep(5)
    told = [event for event in policy.events if isinstance(event, EngineLoaded)]
    assert [event.engine_id for event in told] == [E0, E1, E0]
    assert {(event.waiting, event.used_share, event.hit_rate) for event in told} == {(3, 0.4, 0.25)}


async def test_the_policy_is_told_of_group_and_limits_and_what_turns_cost():
    policy, tools = Watched(), FakeTools()
    async with dispatching({E0: FakeEngine(("!look a", "done"))}, tools, policy) as dispatcher:
        await dispatcher.run(spec("a", group_size=4, trainable_until=Version(0, 2)))
    (submitted,) = (event for event in policy.events if isinstance(event, Submitted))
    assert (submitted.group, submitted.group_size) == (GroupId("g"), 4)
    assert submitted.trainable_until == Version(0, 2)
    (ended,) = (event for event in policy.events if isinstance(event, TurnEnded))
    assert ended.tools == ("look",)
    assert ended.cost == TurnCost(prefilled_tokens=5, prefill_s=0, generated_tokens=8, decode_s=1)


async def test_the_policy_is_told_of_every_tool_that_a_turn_calls_and_of_none_that_it_made_up():
    script = ("!look a", "!test a", "!look b\n!test b", "!made_up c", "done")
    policy = Watched()
    async with dispatching({E0: FakeEngine(script)}, FakeTools(slow={"test": 30.0}), policy) as dispatcher:
        await dispatcher.run(spec("a"))
    ended = [event.tools for event in policy.events if isinstance(event, TurnEnded)]
    assert ended == [("look",), ("test",), ("look", "test"), ()]


async def test_a_program_that_is_turned_away_is_overloaded_and_nothing_of_it_has_begun():
    policy, tools = Watched(SchedulerSettings(live_programs=1, queue_limit=1)), FakeTools()
    async with dispatching({E0: FakeEngine(SCRIPT)}, tools, policy) as dispatcher:
        done = await run_with(dispatcher, "abc", 0)
        assert_nothing_left(dispatcher, tools)
    outcomes = [t.outcome for t in done]
    assert outcomes[:2] == [None, None]
    assert outcomes[2] is not None
    assert outcomes[2].blame is Blame.INFRASTRUCTURE
    assert "submit it again in 1 s" in outcomes[2].reason
    assert text_of(done[2]) == b""
    assert {program for program, _, _ in tools.calls} == {"a", "b"}


async def cancel_at(step: int) -> int:
    """Cancel programs at the `step`-th turn of the loop while engines die and return; how many had ended."""
    engines = {E: FakeEngine(SCRIPT, decode_s=0.0, kv_tokens=100) for E in (E0, E1)}
    engines[E1].turns = engines[E0].turns
    tools, ended = FakeTools(call_s=0.0), list[Trajectory]()
    async with dispatching(engines, tools) as dispatcher:

        async def run(name: str) -> None:
            limits = Limits(turn_tokens=24, wall_s=100)
            ended.append(await dispatcher.run(spec(name, limits=limits)))

        async with anyio.create_task_group() as group:
            for name in "abcd":
                group.start_soon(run, name)
            for turn in range(step):
                if turn == 5:
                    engines[E0].dies()
                if turn == 9:
                    engines[E0].starts_again()
                    await dispatcher.join(E0)
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        await anyio.sleep(1)
        assert_nothing_left(dispatcher, tools, *engines.values())
    return len(ended)


async def test_cancelled_at_any_await_while_an_engine_dies_a_program_leaves_nothing():
    step = 0
    while await cancel_at(step) < 4:
        step += 1
    assert step > 10


async def test_time_is_told_when_it_was_asked_for_also_when_that_changes_meanwhile():
    policy = Alarm()
    async with dispatching({E0: FakeEngine(SCRIPT)}, FakeTools(), policy) as dispatcher:
        await anyio.sleep(1)
        policy.due_s = [3.0, 20.0]
        await dispatcher.join(E0)
        await anyio.sleep(6)
        policy.due_s = [30.0]
        await dispatcher.join(E0)
        await anyio.sleep(40)
    assert policy.ticks_s == pytest.approx([3.0, 30.0], abs=0.01)
