"""The dispatcher on virtual time: every instant is exact and costs nothing."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest

from fakes import END, FakeEngine, FakeRenderer, FakeTools, spec
from sostenuto.errors import Blame, EngineError, ToolServerError
from sostenuto.records import Producer, Trajectory
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.program import ProgramSpec
from sostenuto.runtime.publishing import UpdatePolicy
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.scheduler.update_terms import DEFAULT, KEEP_ALL
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import EngineId, Limits, OutcomeKind, StopReason, ToolStatus, Version

pytestmark = pytest.mark.looptime

E0 = EngineId("e0")


@asynccontextmanager
async def dispatching(
    engine: FakeEngine, tools: FakeTools, settings: SchedulerSettings | None = None, *, keep_kv: bool = False
) -> AsyncGenerator[Dispatcher]:
    async with open_dispatcher(
        settings or SchedulerSettings(),
        {E0: engine},
        tools,
        FakeRenderer(),
        update=UpdatePolicy(KEEP_ALL if keep_kv else DEFAULT),
    ) as dispatcher:
        yield dispatcher


async def run_all(dispatcher: Dispatcher, specs: list[ProgramSpec]) -> list[Trajectory]:
    done: dict[str, Trajectory] = {}

    async def run(one: ProgramSpec) -> None:
        done[one.id] = await dispatcher.run(one)

    async with anyio.create_task_group() as group:
        for one in specs:
            group.start_soon(run, one)
    return [done[one.id] for one in specs]


def assert_nothing_left(dispatcher: Dispatcher, engine: FakeEngine, tools: FakeTools) -> None:
    snapshot = dispatcher.scheduler.snapshot()
    assert snapshot.phases == {}
    assert all(engine_state == (0, 0) for engine_state in snapshot.engines.values())
    assert (engine.held, engine.decoding, tools.live) == ({}, 0, set())


async def test_decoding_of_one_program_overlaps_the_tool_call_of_another():
    engine, tools = FakeEngine(("!look a", "done"), concurrency=1), FakeTools(call_s=30)
    async with dispatching(engine, tools) as dispatcher:
        await run_all(dispatcher, [spec("a"), spec("b")])
        assert engine.log == [(0, "a"), (1, "b"), (31, "a"), (32, "b")]
        assert_nothing_left(dispatcher, engine, tools)


async def test_the_record_is_what_was_sent_and_returned():
    engine, tools = FakeEngine(("!look a", "done")), FakeTools()
    async with dispatching(engine, tools) as dispatcher:
        trajectory = await dispatcher.run(spec("a"))
    (sequence,) = trajectory.sequences
    assert [span.producer for span in sequence] == [
        Producer.USER,
        Producer.POLICY,
        Producer.ENVIRONMENT,
        Producer.POLICY,
    ]
    ids = [id_ for span in sequence for id_ in span.token_ids.tolist()]
    assert bytes(ids) == b"hello!look a\0[a]done\0"
    assert trajectory.trained_tokens == len("!look a") + len("done") + 2
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.reward == 1.0
    assert trajectory.oldest_version == Version(0, 0)


async def test_time_is_split_by_what_it_was_spent_on():
    engine, tools = FakeEngine(("!look a", "done"), decode_s=2), FakeTools(call_s=7, prepare_s=3)
    async with dispatching(engine, tools) as dispatcher:
        usage = (await dispatcher.run(spec("a"))).usage
    assert (usage.decode_s, usage.tool_s, usage.environment_s, usage.queue_s) == (4, 7, 3, 0)


async def test_the_next_turn_of_a_held_program_prefills_only_what_is_new():
    engine, tools = FakeEngine(("!look a", "done")), FakeTools()
    async with dispatching(engine, tools) as dispatcher:
        usage = (await dispatcher.run(spec("a"))).usage
    assert usage.cached_tokens == len("hello!look a\0")
    assert usage.prefilled_tokens == len("hello") + len("[a]")


async def test_parallel_calls_run_together_and_answer_in_order():
    engine, tools = FakeEngine(("!look 1\n!look 2\n!look 3", "done")), FakeTools(call_s=10)
    async with dispatching(engine, tools) as dispatcher:
        await dispatcher.run(spec("a"))
        assert anyio.current_time() == 12
    assert [m.content for m in tools.episodes[0].messages if m.role == "tool"] == ["[1]", "[2]", "[3]"]
    assert len({call_id for _, call_id, _ in tools.calls}) == 3


async def test_a_malformed_call_is_answered_without_the_tool_server():
    engine, tools = FakeEngine(("! oops", "done")), FakeTools()
    async with dispatching(engine, tools) as dispatcher:
        trajectory = await dispatcher.run(spec("a"))
    assert tools.calls == []
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert tools.episodes[0].messages[2].content == "a call needs a name"


@pytest.mark.parametrize(
    ("limits", "script", "stop"),
    [
        (Limits(turns=2), ("!look a",), StopReason.TURN_LIMIT),
        (Limits(tool_calls=3), ("!look a",), StopReason.TOOL_CALL_LIMIT),
        (Limits(turn_tokens=4), ("a long answer",), StopReason.TURN_TOKENS),
        (Limits(total_tokens=30), ("!look a",), StopReason.TOTAL_TOKENS),
        (Limits(wall_s=25), ("!look a",), StopReason.DEADLINE),
        (Limits(), ("!finish a",), StopReason.ENVIRONMENT_DONE),
        (Limits(turns=100, turn_tokens=30), ("!look a",), StopReason.CONTEXT_FULL),
    ],
)
async def test_every_end_has_a_reason_and_is_scored(
    limits: Limits, script: tuple[str, ...], stop: StopReason
):
    engine, tools = FakeEngine(script, kv_tokens=100), FakeTools()
    async with dispatching(engine, tools) as dispatcher:
        trajectory = await dispatcher.run(spec("a", limits=limits))
        assert_nothing_left(dispatcher, engine, tools)
    assert trajectory.stop_reason is stop
    assert trajectory.reward == 1.0
    assert tools.episodes[0].stop_reason is stop


async def test_a_prompt_that_no_engine_can_hold_ends_that_program_alone():
    engine, tools = FakeEngine(kv_tokens=40), FakeTools(prompt="x" * 60)
    async with dispatching(engine, tools) as dispatcher:
        trajectory = await dispatcher.run(spec("big"))
        assert trajectory.outcome is not None
        assert trajectory.outcome.blame is Blame.ENVIRONMENT
        assert "the prompt alone has 60 tokens: 40 tokens are allowed in all" in trajectory.outcome.reason
        tools.prompt = "small"
        assert (await dispatcher.run(spec("small"))).stop_reason is StopReason.ANSWERED


@pytest.mark.parametrize(
    ("status", "blame"),
    [
        (ToolStatus.ENVIRONMENT_FAILURE, Blame.ENVIRONMENT),
        (ToolStatus.INFRASTRUCTURE_FAILURE, Blame.INFRASTRUCTURE),
    ],
)
async def test_a_failed_part_is_the_outcome_of_its_program_and_never_a_reward(
    status: ToolStatus, blame: Blame
):
    engine, tools = FakeEngine(("!look a\n!look b", "done")), FakeTools(status=status)
    async with dispatching(engine, tools) as dispatcher:
        trajectory = await dispatcher.run(spec("a"))
        assert_nothing_left(dispatcher, engine, tools)
    assert trajectory.reward is None
    assert trajectory.outcome is not None
    assert (trajectory.outcome.kind, trajectory.outcome.blame) == (OutcomeKind.FAILED, blame)
    assert "look" in trajectory.outcome.reason


async def test_a_broken_engine_turn_is_an_infrastructure_failure_that_keeps_the_tokens():
    engine, tools = FakeEngine(("!look a", "done"), fail_on_turn=1), FakeTools()
    async with dispatching(engine, tools) as dispatcher:
        trajectory = await dispatcher.run(spec("a"))
    assert trajectory.outcome is not None
    assert trajectory.outcome.blame is Blame.INFRASTRUCTURE
    assert trajectory.trained_tokens == len("!look a") + 1


async def test_kv_pressure_moves_the_longest_acting_and_everybody_ends():
    engine = FakeEngine(("!look a", "!look b", "done"), kv_tokens=60, concurrency=4)
    tools = FakeTools(call_s=20)
    limits = Limits(turn_tokens=16, wall_s=10_000)
    async with dispatching(engine, tools) as dispatcher:
        done = await run_all(dispatcher, [spec(f"p{n}", limits=limits) for n in range(12)])
        assert_nothing_left(dispatcher, engine, tools)
    assert all(t.stop_reason is StopReason.ANSWERED for t in done)
    assert engine.most_held <= 60


async def test_a_version_is_published_while_programs_run_and_tokens_know_theirs():
    engine, tools = FakeEngine(("!look a", "done")), FakeTools(call_s=30)
    manifest = Manifest(version="0.1", path="/none", nbytes=0, tensors=())
    done: list[Trajectory] = []
    async with dispatching(engine, tools) as dispatcher, anyio.create_task_group() as group:

        async def run() -> None:
            done.append(await dispatcher.run(spec("a")))

        group.start_soon(run)
        await anyio.sleep(5)
        publication = await dispatcher.publish(manifest)
        assert (publication.version, publication.stage_s, publication.pause_s) == (Version(0, 1), 1, 0.25)
    assert [v.version for v in done[0].version_spans] == [Version(0, 0), Version(0, 1)]
    assert done[0].staleness(dispatcher.version) == 1


async def test_a_version_that_no_engine_takes_is_an_error_that_names_why():
    engine, tools = FakeEngine(broken_update="checksum of lm_head.weight"), FakeTools()
    manifest = Manifest(version="0.1", path="/none", nbytes=0, tensors=())
    async with dispatching(engine, tools) as dispatcher:
        with pytest.raises(EngineError, match=r"0\.1 could not be published: e0: checksum of lm_head"):
            await dispatcher.publish(manifest)
        assert dispatcher.version == Version(0, 0)


async def cancel_at(step: int) -> int:
    """Start three programs, cancel them at the `step`-th turn of the loop; how many had ended by then."""
    engine = FakeEngine(("!look a\n!look b", "done"), decode_s=0.0, kv_tokens=60)
    tools = FakeTools(call_s=0.0)
    ended: list[Trajectory] = []
    async with dispatching(engine, tools) as dispatcher:

        async def run(name: str) -> None:
            limits = Limits(turn_tokens=24, wall_s=100)
            ended.append(await dispatcher.run(spec(name, limits=limits)))

        async with anyio.create_task_group() as group:
            for name in "abc":
                group.start_soon(run, name)
            for _ in range(step):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        await anyio.sleep(1)
        assert_nothing_left(dispatcher, engine, tools)
    return len(ended)


async def test_cancelled_at_any_await_a_program_leaves_nothing():
    step = 0
    while await cancel_at(step) < 3:
        step += 1
    assert step > 10


async def test_a_tool_server_that_breaks_during_release_does_not_hide_the_result():
    class Broken(FakeTools):
        async def release(self, program_id: str) -> None:
            self.live.discard(program_id)
            raise ToolServerError("connection reset")

    async with dispatching(FakeEngine(), Broken()) as dispatcher:
        assert (await dispatcher.run(spec("a"))).reward == 1.0


def test_the_end_token_is_what_the_fake_policy_ends_with():
    assert FakeRenderer.stop_token_ids == (END,)
