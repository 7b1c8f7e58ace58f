"""The runner of agents on virtual time: the agent is a coroutine of the tool server's fake."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import pytest
from pydantic import JsonValue

from fakes import END, FakeEngine, FakeRenderer, FakeTools, spec
from sostenuto.errors import Blame, EnvironmentFailure, SostenutoError
from sostenuto.records import Trajectory, validate
from sostenuto.runtime.agent_runner import AgentRunner
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.engines.wire import Sampling
from sostenuto.runtime.gateway.identity import Identity, Strength
from sostenuto.runtime.gateway.keys import Keys
from sostenuto.runtime.gateway.opening import OpenGateway
from sostenuto.runtime.gateway.sessions import Bounds, Lifetimes, Sessions
from sostenuto.runtime.gateway.turn import Ask
from sostenuto.runtime.program import ProgramSpec
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.tools.wire import EnvironmentRef, Prepared, Reward
from sostenuto.types import CallId, EngineId, Episode, Limits, Message, ProgramId, Purpose, StopReason

pytestmark = pytest.mark.looptime

E0 = EngineId("e0")
Say = Callable[..., Awaitable[str]]
"""Ask the model after these messages' texts."""
Agent = Callable[[Say], Awaitable[float]]


@dataclass
class AgentTools(FakeTools):
    """Its environments are agents, which have the gateway's programs as their model."""

    agent: Agent | None = None
    gateway: OpenGateway | None = None
    keys: list[str] = field(default_factory=list[str])
    most_live: int = 0

    async def prepare(
        self,
        program_id: ProgramId,
        environment: EnvironmentRef,
        task: dict[str, JsonValue],
        *,
        seed: int,
        timeout_s: float,
    ) -> Prepared:
        assert environment.gateway == "127.0.0.1:1"
        prepared = await super().prepare(program_id, environment, task, seed=seed, timeout_s=timeout_s)
        self.most_live = max(self.most_live, len(self.live))
        return prepared

    async def reward(
        self, program_id: ProgramId, call_id: CallId, episode: Episode, *, timeout_s: float
    ) -> Reward:
        assert self.gateway is not None
        assert self.agent is not None
        assert episode.model is not None
        assert (episode.model.base_url, call_id) == ("http://127.0.0.1:1/v1", "run")
        grantee = self.gateway.keys.find(episode.model.api_key)
        assert grantee is not None
        self.keys.append(episode.model.api_key)
        identity, sessions = Identity(grantee.program or "", Strength.KEY), self.gateway.sessions

        async def say(*texts: str) -> str:
            messages = [
                Message("user" if index % 2 == 0 else "assistant", text) for index, text in enumerate(texts)
            ]
            ask = Ask(messages=tuple(messages), sampling=Sampling(stop_token_ids=(END,)))
            _, told = await sessions.ask(identity, ask)
            assert told.turn is not None
            return told.turn.message.content

        del program_id, timeout_s
        try:
            return Reward(value=await self.agent(say), elapsed_s=0)
        except SostenutoError as error:
            raise EnvironmentFailure(f"the agent raised {error}") from error


@dataclass(frozen=True)
class Scene:
    dispatcher: Dispatcher
    runner: AgentRunner
    engine: FakeEngine
    tools: AgentTools
    gateway: OpenGateway

    async def run(self, *specs: ProgramSpec) -> dict[str, Trajectory]:
        done: dict[str, Trajectory] = {}

        async def run(one: ProgramSpec) -> None:
            done[one.id] = await self.runner.run(one)

        async with anyio.create_task_group() as group:
            for one in specs:
                group.start_soon(run, one)
        return done

    async def assert_nothing_left(self) -> None:
        await anyio.sleep(1)
        snapshot = self.dispatcher.scheduler.snapshot()
        assert snapshot.phases == {}
        assert snapshot.engines == {E0: (0, 0)}
        assert (self.engine.held, self.engine.decoding, self.tools.live) == ({}, 0, set())
        assert (len(self.gateway.sessions), len(self.gateway.keys)) == (0, 0)


@asynccontextmanager
async def scene(
    agent: Agent, *, settings: SchedulerSettings | None = None, kv_tokens: int = 1000
) -> AsyncGenerator[Scene]:
    engine, tools = FakeEngine(("one", "two"), kv_tokens=kv_tokens), AgentTools(prepare_s=1.0, agent=agent)
    async with (
        open_dispatcher(settings or SchedulerSettings(), {E0: engine}, tools, FakeRenderer()) as dispatcher,
        anyio.create_task_group() as returning,
        anyio.create_task_group() as running,
    ):
        bounds = Bounds(programs=100, turn_tokens=500)
        sessions = Sessions(
            dispatcher, running, returning, None, prefix="g", lifetimes=Lifetimes(), bounds=bounds
        )
        tools.gateway = OpenGateway("http://127.0.0.1:1", sessions, Keys())
        yield Scene(dispatcher, AgentRunner(dispatcher, tools.gateway), engine, tools, tools.gateway)
        running.cancel_scope.cancel()


async def two_turns(say: Say) -> float:
    first = await say("go")
    await anyio.sleep(1)
    assert await say("go", first, "on") == "two"
    return 0.5


async def test_a_record_is_what_the_agent_was_told():
    async with scene(two_turns) as stage:
        done = await stage.run(spec("a"))
        validate(done["a"])
        assert (done["a"].reward, done["a"].outcome, done["a"].group_id) == (0.5, None, "g")
        (sequence,) = done["a"].sequences
        text = bytes(i for span in sequence for i in span.token_ids.tolist())
        assert text == b"goone\0ontwo\0"
        assert done["a"].usage.environment_s == 1.0
        await stage.assert_nothing_left()


@pytest.mark.parametrize("at_s", [0.0, 1.0, 2.0, 3.0, 4.0])
async def test_cancelled_after_any_step_it_leaves_nothing(at_s: float):
    """The instants at which it is prepared, called, acts, is called again and ends; step by step."""
    async with scene(two_turns) as stage:
        for steps in range(24):
            async with anyio.create_task_group() as group:
                group.start_soon(stage.run, spec(f"p{steps}"))
                await anyio.sleep(at_s)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            await stage.assert_nothing_left()


async def test_an_agent_has_its_place_before_its_environment_is_made():
    async with scene(two_turns, settings=SchedulerSettings(live_programs=2)) as stage:
        done = await stage.run(*(spec(name) for name in "abcdef"))
        assert [trajectory.reward for trajectory in done.values()] == [0.5] * 6
        assert stage.tools.most_live == 2
        await stage.assert_nothing_left()


async def test_an_agent_that_is_turned_away_has_failed_for_the_infrastructure():
    settings = SchedulerSettings(live_programs=1, queue_limit=1)
    async with scene(two_turns, settings=settings) as stage:
        done = await stage.run(*(spec(name) for name in "abc"))
        (away,) = [trajectory for trajectory in done.values() if trajectory.outcome]
        assert away.outcome is not None
        assert away.outcome.blame is Blame.INFRASTRUCTURE
        assert "too many programs wait" in str(away.outcome)
        await stage.assert_nothing_left()


async def test_a_failed_call_that_was_made_good_costs_nothing_and_another_one_the_reward():
    async def agent(say: Say) -> float:
        stage.engine.fail_on_turn = 0
        with pytest.raises(SostenutoError):
            await say("go")
        if stage.engine.log[-1][1] == "good":
            stage.engine.fail_on_turn = -1
            await say("go")
        return 0.0

    async with scene(agent) as stage:
        good = (await stage.run(spec("good")))["good"]
        assert (good.reward, good.outcome) == (0.0, None)
        bad = (await stage.run(spec("bad")))["bad"]
        assert bad.outcome is not None
        assert (bad.reward, bad.outcome.blame) == (None, Blame.INFRASTRUCTURE)
        assert "generate of turn 0 broke" in str(bad.outcome)
        await stage.assert_nothing_left()


async def test_a_call_that_still_runs_when_its_agent_has_ended_is_ended():
    async def agent(say: Say) -> float:
        await say("go")
        left.start_soon(given_up, say)
        await anyio.sleep(0.5)
        return 1.0

    async def given_up(say: Say) -> None:
        with pytest.raises(SostenutoError, match="is over"):
            await say("something else")

    async with scene(agent) as stage, anyio.create_task_group() as left:
        done = await stage.run(spec("a"))
        validate(done["a"])
        assert done["a"].reward == 1.0
        assert done["a"].metrics["turns"] == 1
        await stage.assert_nothing_left()


async def test_no_engine_that_comes_back_fails_it_wherever_it_is():
    async with scene(two_turns) as stage:
        for after_s in (0.5, 1.5, 2.5):
            name = f"p{after_s:g}"
            done: dict[str, Trajectory] = {}

            async def run(name: str = name, done: dict[str, Trajectory] = done) -> None:
                done.update(await stage.run(spec(name)))

            async with anyio.create_task_group() as group:
                group.start_soon(run)
                await anyio.sleep(after_s)
                stage.engine.dies()
                stage.dispatcher.give_up("the engines are gone")
            outcome = done[name].outcome
            assert outcome is not None, name
            assert outcome.blame is Blame.INFRASTRUCTURE
            assert "the engines are gone" in str(outcome)
            stage.engine.starts_again()
            await stage.dispatcher.join(E0)
            await stage.assert_nothing_left()


async def test_an_agent_that_comes_to_a_limit_may_still_return_its_reward():
    async def agent(say: Say) -> float:
        said = ["go"]
        try:
            while True:
                said += [await say(*said), "on"]
        except SostenutoError:
            return 0.25

    async with scene(agent) as stage:
        few = spec("few", limits=Limits(turns=3, wall_s=100))
        short = spec("short", limits=Limits(turns=30, total_tokens=20, wall_s=100))
        done = await stage.run(few, short)
        assert {name: (t.reward, t.stop_reason) for name, t in done.items()} == {
            "few": (0.25, StopReason.TURN_LIMIT),
            "short": (0.25, StopReason.CONTEXT_FULL),
        }
        assert max(len(i.token_ids) for i in stage.engine.requests if i.program_id == "short") < 20
        await stage.assert_nothing_left()


async def test_training_has_the_jobs_temperature_and_noise():
    async with scene(two_turns) as stage:
        await stage.run(spec("a"), spec("b", purpose=Purpose.EVALUATE))
        assert {request.sampling.temperature for request in stage.engine.requests} == {1.0}
        seeds = [request.sampling.seed for request in stage.engine.requests if request.program_id == "a"]
        assert len(set(seeds)) == 2
