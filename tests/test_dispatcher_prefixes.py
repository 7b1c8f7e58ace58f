"""Prompts that programs have in common are counted once, where the engines hold them once."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest

from fakes import FakeEngine, FakeRenderer, FakeTools, spec
from sostenuto.records import Producer
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.engines.wire import Capabilities
from sostenuto.runtime.rendering.renderer import Extension, Piece
from sostenuto.scheduler.actions import Action
from sostenuto.scheduler.events import Event, Prepared, ToolReturned, TurnEnded
from sostenuto.scheduler.kv import Footprint
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.tools.wire import Reward, ToolSchema
from sostenuto.types import CallId, EngineId, Episode, Limits, Message, ProgramId

pytestmark = pytest.mark.looptime

PROMPT = "x" * 1000
LIMITS = Limits(turn_tokens=16, wall_s=10_000)
TURN = len("!look a\0")
RESULT = len("[a]")
ONCE = 992 + 8 * 32
"""62 blocks that the members have in common, and 2 for the rest of each with its turn."""


@dataclass
class SharingEngine(FakeEngine):
    """Says that it holds a common prefix once; it is not more than its word."""

    block_tokens: int = 16
    shares_prefixes: bool = True

    async def capabilities(self) -> Capabilities:
        facts = await super().capabilities()
        shares = {"shares_prefixes": self.shares_prefixes, "block_tokens": self.block_tokens}
        return facts.model_copy(update=shares)


class Listening(Scheduler):
    """Keeps what each program last reported that it holds."""

    def __init__(self) -> None:
        super().__init__(SchedulerSettings(prepare_ahead=64))
        self.reported: dict[str, list[Footprint]] = {}

    def apply(self, event: Event, now_s: float) -> list[Action]:
        if isinstance(event, Prepared | TurnEnded | ToolReturned):
            self.reported.setdefault(event.program_id, []).append(event.footprint)
        return super().apply(event, now_s)

    def reserved(self) -> list[int]:
        return [tokens for tokens, _ in self.snapshot().engines.values()]


@dataclass
class Rewriting(FakeRenderer):
    """Its template changes the beginning when the first result comes."""

    def extend(
        self,
        before: Sequence[Message],
        turn: Message,
        sampled_ids: Sequence[int],
        *,
        context_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> Extension:
        del before, turn, sampled_ids, new, tools
        return Extension((Piece(Producer.USER, [ord("y"), *context_ids[1:]]),), rewritten=True)


class SlowToScore(FakeTools):
    async def reward(
        self, program_id: ProgramId, call_id: CallId, episode: Episode, *, timeout_s: float
    ) -> Reward:
        await anyio.sleep(100)
        return await super().reward(program_id, call_id, episode, timeout_s=timeout_s)


@asynccontextmanager
async def dispatching(
    *engines: FakeEngine, tools: FakeTools | None = None, renderer: FakeRenderer | None = None
) -> AsyncGenerator[tuple[Dispatcher, Listening]]:
    policy = Listening()
    async with open_dispatcher(
        SchedulerSettings(),
        {EngineId(f"e{n}"): engine for n, engine in enumerate(engines)},
        tools or FakeTools(prompt=PROMPT),
        renderer or FakeRenderer(),
        policy=policy,
    ) as dispatcher:
        yield dispatcher, policy


async def run_group(dispatcher: Dispatcher, size: int, name: str = "p") -> None:
    async with anyio.create_task_group() as group:
        for n in range(size):
            group.start_soon(dispatcher.run, spec(f"{name}{n}", limits=LIMITS, group_size=size))


@pytest.mark.parametrize(
    ("shares", "kv_tokens", "together"), [(True, ONCE, 8), (True, ONCE - 16, 7), (False, ONCE, 1)]
)
async def test_a_group_decodes_together_where_its_prompt_is_held_once(
    shares: bool, kv_tokens: int, together: int
):
    engine = SharingEngine(("!look a", "done"), kv_tokens=kv_tokens, shares_prefixes=shares)
    async with dispatching(engine) as (dispatcher, policy):
        await run_group(dispatcher, 8)
        assert engine.most_decoding == together
        assert sum(at_s == 0 for at_s, _ in engine.log) == together
        assert policy.reserved() == [0]


async def test_what_comes_after_the_prompt_is_private():
    async with dispatching(SharingEngine(("!look a", "done"), kv_tokens=8_000)) as (dispatcher, policy):
        await run_group(dispatcher, 2)
    first, acted, returned = policy.reported["p1"]
    assert first.shared == acted.shared == returned.shared
    assert [segment.tokens for segment in first.shared] == [992]
    assert [one.private_tokens for one in (first, acted, returned)] == [8, 8 + TURN, 8 + TURN + RESULT]
    assert policy.reported["p0"] == policy.reported["p1"]


async def test_the_last_block_of_a_prompt_is_computed_anew_and_private():
    engine, tools = SharingEngine(kv_tokens=8_000), FakeTools(prompt="x" * 63 * 16)
    async with dispatching(engine, tools=tools) as (dispatcher, policy):
        await run_group(dispatcher, 2)
    assert policy.reported["p1"][0].private_tokens == 16


async def test_a_program_alone_holds_its_prompt_for_itself():
    async with dispatching(SharingEngine(("!look a", "done"), kv_tokens=8_000)) as (dispatcher, policy):
        await dispatcher.run(spec("a", limits=LIMITS))
    assert policy.reported["a"][0] == Footprint(1000)


async def test_a_member_whose_group_is_late_holds_its_prompt_for_itself_after_its_first_turn():
    async with dispatching(SharingEngine(("!look a", "done"), kv_tokens=8_000)) as (dispatcher, policy):
        await dispatcher.run(spec("a", limits=LIMITS, group_size=8))
    first, acted, _ = policy.reported["a"]
    assert (first.private_tokens, acted) == (8, Footprint(1000 + TURN))


@pytest.mark.parametrize("cancelled_s", [0.0, 0.5, 1.5, 11.5, 12.5, 20.0])
async def test_however_a_group_ends_its_prompt_is_nobodys_afterwards(cancelled_s: float):
    """Cancelled while environments are prepared, at the first turn, at the tool, at the last one; or not."""
    engine = SharingEngine(("!look a", "done"), kv_tokens=8_000)
    tools = FakeTools(prompt=PROMPT, prepare_s=0.25)
    async with dispatching(engine, tools=tools) as (dispatcher, policy):
        with anyio.move_on_after(cancelled_s):
            await run_group(dispatcher, 3)
        await anyio.sleep(1)
        assert policy.reserved() == [0]
        await dispatcher.run(spec("after", limits=LIMITS))
        assert policy.reported["after"][0] == Footprint(1000)


async def test_a_group_that_fails_leaves_its_prompt_to_nobody():
    engine = SharingEngine(("done",), kv_tokens=8_000, fail_on_turn=0)
    async with dispatching(engine) as (dispatcher, policy):
        await run_group(dispatcher, 3)
        await dispatcher.run(spec("after", limits=LIMITS))
        assert policy.reported["after"][0] == Footprint(1000)


async def test_a_program_that_is_scored_has_nothing_in_common_any_more():
    engine = SharingEngine(("done",), kv_tokens=8_000)
    async with dispatching(engine, tools=SlowToScore(prompt=PROMPT)) as (dispatcher, policy):
        async with anyio.create_task_group() as group:
            group.start_soon(dispatcher.run, spec("a", limits=LIMITS))
            await anyio.sleep(50)
            group.start_soon(dispatcher.run, spec("b", limits=LIMITS))
        assert policy.reported["b"] == [Footprint(1000)]


async def test_a_context_that_was_rewritten_has_only_its_new_beginning_in_common():
    engine = SharingEngine(("!look a", "done"), kv_tokens=8_000)
    async with (
        dispatching(engine, renderer=Rewriting()) as (dispatcher, policy),
        anyio.create_task_group() as group,
    ):
        group.start_soon(dispatcher.run, spec("early", limits=LIMITS))
        await anyio.sleep(0.5)
        group.start_soon(dispatcher.run, spec("late", limits=LIMITS))
    assert policy.reported["early"][2] == Footprint(1000 + TURN)
    (common,) = policy.reported["late"][2].shared
    assert common.tokens == 992
    assert common.key != policy.reported["late"][0].shared[0].key


@pytest.mark.parametrize(
    ("second", "common"),
    [
        (SharingEngine(kv_tokens=8_000, block_tokens=24), [960]),
        (SharingEngine(kv_tokens=8_000, shares_prefixes=False), []),
    ],
)
async def test_in_common_is_what_every_engine_holds_once(second: SharingEngine, common: list[int]):
    first = SharingEngine(kv_tokens=8_000)
    async with dispatching(first, second) as (dispatcher, policy):
        await run_group(dispatcher, 2)
    for name in ("p0", "p1"):
        assert [segment.tokens for segment in policy.reported[name][0].shared] == common
