"""The tokens of a program's turns as they come through the scheduler, on virtual time."""

from collections.abc import Callable
from dataclasses import dataclass

import anyio
import anyio.lowlevel
import pytest

from fakes import FakeEngine, FakeRenderer, FakeTools, spec
from sostenuto.errors import EngineError
from sostenuto.records import Producer, Trajectory
from sostenuto.runtime.dispatcher import open_dispatcher
from sostenuto.runtime.engines.wire import GenerateReply, GenerateRequest, Spans, WireSpan
from sostenuto.runtime.turn_stream import TurnStream
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId, Limits, StopReason

pytestmark = pytest.mark.looptime

E0, E1 = EngineId("e0"), EngineId("e1")
SCRIPT = ("!look a", "!look b", "done")
WHOLE = b"hello!look a\0[a]!look b\0[b]done\0"


@dataclass
class Speaker(FakeEngine):
    """Says a token in 0.1 s, and its reply 0.1 s later; a context that ends in a turn goes on with it."""

    script: tuple[str, ...] = SCRIPT

    async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
        self._check_alive()
        self.requests.append(request)
        context = bytes(request.token_ids)
        turn = context.count(0)
        line = self.script[turn].encode() + b"\0"
        said = max(end for end in range(len(line)) if context.endswith(line[:end]))
        told: list[WireSpan] = []
        self.decoding += 1
        try:
            for token in line[said:][: request.max_new_tokens]:
                await self._passes()
                told.append(WireSpan(token_ids=[token], logprobs=[-token / 8], version=self.version))
                if spans is not None:
                    spans(told[-1])
            await self._passes()
        finally:
            self.decoding -= 1
        return self._whole(self.reply(request, turn), said, told)

    async def _passes(self) -> None:
        await anyio.sleep(0.1)
        self._check_alive()

    def _whole(self, reply: GenerateReply, said: int, told: list[WireSpan]) -> GenerateReply:
        versions = [{"version": span.version, "start": at, "end": at + 1} for at, span in enumerate(told)]
        changes = {
            "token_ids": [token for span in told for token in span.token_ids],
            "logprobs": [value for span in told for value in span.logprobs],
            "versions": versions,
        }
        return GenerateReply.model_validate(reply.model_dump() | changes)


class Audience:
    """What was told, by turn."""

    def __init__(self) -> None:
        self.turns: dict[int, list[WireSpan]] = {}

    def __call__(self, turn: int, span: WireSpan) -> None:
        self.turns.setdefault(turn, []).append(span)

    def text(self) -> list[bytes]:
        return [bytes(token for span in self.turns[turn] for token in span.token_ids) for turn in self.turns]

    def tokens(self) -> list[tuple[int, float, str]]:
        return [
            (token, logprob, span.version)
            for spans in self.turns.values()
            for span in spans
            for token, logprob in zip(span.token_ids, span.logprobs, strict=True)
        ]


def recorded(trajectory: Trajectory) -> list[tuple[int, float, str]]:
    """What the policy said, token by token."""
    return [
        (int(token), float(logprob), str(version.version))
        for span in trajectory.spans()
        if span.producer is Producer.POLICY
        for version in span.versions
        for token, logprob in zip(
            span.token_ids[version.start : version.end],
            span.logprobs[version.start : version.end],
            strict=True,
        )
    ]


def text_of(trajectory: Trajectory) -> bytes:
    return bytes(id_ for span in trajectory.spans() for id_ in span.token_ids.tolist())


def speakers(**changes: object) -> dict[EngineId, Speaker]:
    """Two, with these changes."""
    engines = {E0: Speaker(), E1: Speaker()}
    for engine in engines.values():
        vars(engine).update(changes)
    return engines


async def heard(
    engines: dict[EngineId, Speaker],
    *events: tuple[float, Callable[[], object]],
    limits: Limits | None = None,
) -> tuple[Audience, Trajectory]:
    """A program that is listened to while things happen, each so many seconds after the one before."""
    audience, done, tools = Audience(), list[Trajectory](), FakeTools()
    async with open_dispatcher(SchedulerSettings(), engines, tools, FakeRenderer()) as dispatcher:

        async def run() -> None:
            done.append(await dispatcher.run(spec("a", limits=limits), audience))

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            for after_s, happens in events:
                await anyio.sleep(after_s)
                happens()
        assert dispatcher.scheduler.snapshot().phases == {}
    assert all((engine.held, engine.decoding) == ({}, 0) for engine in engines.values() if not engine.is_dead)
    assert tools.live == set()
    return audience, done[0]


async def test_every_turn_is_told_as_it_comes_and_is_what_the_record_has():
    audience, trajectory = await heard(speakers())
    assert text_of(trajectory) == WHOLE
    assert audience.text() == [b"!look a\0", b"!look b\0", b"done\0"]
    assert audience.tokens() == recorded(trajectory)
    assert [len(spans) for spans in audience.turns.values()] == [8, 8, 5]


async def test_an_engine_that_tells_nothing_before_the_end_of_a_turn_is_heard_then():
    audience = Audience()
    engines = {E0: FakeEngine(SCRIPT)}
    async with open_dispatcher(SchedulerSettings(), engines, FakeTools(), FakeRenderer()) as dispatcher:
        trajectory = await dispatcher.run(spec("a"), audience)
    assert [len(spans) for spans in audience.turns.values()] == [1, 1, 1]
    assert audience.tokens() == recorded(trajectory)


@pytest.mark.parametrize("at_s", [0.05, 0.15, 0.45, 0.75, 0.85])
async def test_a_turn_whose_engine_dies_goes_on_elsewhere_and_no_token_is_told_twice(at_s: float):
    """Before its first token, after some, after all but the last, and after the last."""
    engines = speakers()
    audience, trajectory = await heard(engines, (at_s, engines[E0].dies))
    assert trajectory.outcome is None
    assert text_of(trajectory) == WHOLE
    assert audience.text() == [b"!look a\0", b"!look b\0", b"done\0"]
    assert audience.tokens() == recorded(trajectory)
    assert trajectory.usage.generated_tokens == len(audience.tokens())
    assert trajectory.metrics["turns"] == 3


async def test_what_was_told_is_context_and_counts_as_sampled():
    engines = speakers()
    await heard(engines, (0.45, engines[E0].dies))
    first, again = engines[E0].requests[0], engines[E1].requests[0]
    assert again.token_ids == first.token_ids + list(b"!loo")
    assert again.max_new_tokens == first.max_new_tokens - 4
    assert again.sampling == first.sampling


@pytest.mark.parametrize("at_s", [0.25, 0.45])
async def test_a_turn_that_had_said_all_it_may_is_over_when_its_engine_dies(at_s: float):
    engines = speakers()
    limits = Limits(turn_tokens=4, wall_s=100)
    audience, trajectory = await heard(engines, (at_s, engines[E0].dies), limits=limits)
    assert trajectory.stop_reason is StopReason.TURN_TOKENS
    assert audience.text() == [b"!loo"]
    assert audience.tokens() == recorded(trajectory)
    assert len(engines[E1].requests) == (1 if at_s < 0.4 else 0)


async def test_a_turn_goes_on_from_newer_weights_to_older_ones_in_two_parts_of_the_record():
    """The engine that had the new version first dies before the others have it."""
    engines = speakers()

    def swap() -> None:
        engines[E0].version = "0.1"

    audience, trajectory = await heard(engines, (0.25, swap), (0.2, engines[E0].dies))
    assert trajectory.outcome is None
    assert text_of(trajectory) == WHOLE
    assert audience.tokens() == recorded(trajectory)
    assert [span.version for span in audience.turns[0]] == ["0.0"] * 2 + ["0.1"] * 2 + ["0.0"] * 4


async def test_tokens_of_weights_that_are_older_than_those_served_are_told_to_nobody():
    """The engine has started anew, unasked."""
    engines = speakers(version="0.3")

    def restart() -> None:
        engines[E0].version = "0.2"

    audience, trajectory = await heard(engines, (0.45, restart))
    assert text_of(trajectory) == WHOLE
    assert audience.text() == [b"!look a\0", b"!look b\0", b"done\0"]
    assert {version for _, _, version in audience.tokens()} == {"0.3"}
    assert len(engines[E1].requests) == 3


async def test_a_turn_goes_on_elsewhere_when_its_engine_leaves():
    engines, audience = speakers(), Audience()
    done: list[Trajectory] = []
    async with open_dispatcher(SchedulerSettings(), engines, FakeTools(), FakeRenderer()) as dispatcher:

        async def run() -> None:
            done.append(await dispatcher.run(spec("a"), audience))

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await anyio.sleep(0.25)
            await dispatcher.leave(E0, "asked to", within_s=0.2)
    assert text_of(done[0]) == WHOLE
    assert audience.tokens() == recorded(done[0])
    assert engines[E1].requests[0].token_ids == list(b"hello!loo")


async def test_whoever_stops_listening_ends_the_turn_and_leaves_nothing():
    engines, tools, audience = speakers(), FakeTools(), Audience()
    async with open_dispatcher(SchedulerSettings(), engines, tools, FakeRenderer()) as dispatcher:
        with anyio.move_on_after(0.35):
            await dispatcher.run(spec("a"), audience)
        assert audience.text() == [b"!lo"]
        assert dispatcher.scheduler.snapshot().phases == {}
        assert tools.live == set()
        assert [engine.decoding for engine in engines.values()] == [0, 0]


async def test_a_listener_that_fails_ends_its_program_alone():
    def broken(turn: int, span: WireSpan) -> None:
        raise LookupError(f"nobody listens to turn {turn}, {span.token_ids}")

    engines, tools = speakers(), FakeTools()
    async with open_dispatcher(SchedulerSettings(), engines, tools, FakeRenderer()) as dispatcher:
        with pytest.raises(LookupError, match="turn 0"):
            await dispatcher.run(spec("a"), broken)
        assert dispatcher.scheduler.snapshot().phases == {}
        assert len(dispatcher.fleet) == 2
        assert text_of(await dispatcher.run(spec("b"))) == WHOLE


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"sampling": {"stop_strings": ["x"]}}, r"sampling\.stop_strings"),
        ({"sampling": {"grammar": {"regex": "a+"}}}, r"sampling\.grammar"),
        ({"sampling": {"presence_penalty": 0.5}}, r"sampling\.presence_penalty"),
        ({"sampling": {"frequency_penalty": 0.5}}, r"sampling\.frequency_penalty"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
async def test_a_turn_that_its_tokens_alone_do_not_continue_is_an_error_once_some_were_told(
    asked: dict[str, object], named: str
):
    request = GenerateRequest.model_validate(
        {"request_id": "a", "program_id": "a", "token_ids": [1], "max_new_tokens": 4, **asked}
    )
    tokens = iter([[], [7]])

    async def is_lost(_: EngineId, sent: GenerateRequest, spans: Spans | None = None) -> None:
        assert sent == request
        assert spans is not None
        for token in next(tokens):
            spans(WireSpan(token_ids=[token], logprobs=[-1.0], version="0.0"))
        await anyio.lowlevel.checkpoint()

    stream = TurnStream(Audience(), anyio.current_time)
    assert await stream.sampled(E0, request, is_lost) == []
    with pytest.raises(EngineError, match=f"with {named} it cannot go on elsewhere: send it again"):
        await stream.sampled(E0, request, is_lost)
