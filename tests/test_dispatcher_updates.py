"""A change of version under programs that run, through the real dispatcher, on virtual time."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby

import anyio
import pytest

from fakes import FakeEngine, FakeRenderer, FakeTools, spec
from sostenuto.errors import VersionRefused
from sostenuto.records import Trajectory
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.engines.wire import (
    CommitReply,
    CommitRequest,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Spans,
    WireSpan,
    WireVersionSpan,
)
from sostenuto.runtime.publishing import UpdatePolicy
from sostenuto.scheduler.requirements import Requirement
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.scheduler.update_terms import UpdateTerms
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import EngineId, Limits, Outcome, OutcomeKind, Version

pytestmark = pytest.mark.looptime

E0, E1 = EngineId("e0"), EngineId("e1")
TOKEN_S = 0.1


@dataclass
class Teller(FakeEngine):
    """Says a token in 0.1 s under the weights that it has then, until it is aborted."""

    script: tuple[str, ...] = ("!look abcdef", "done")
    aborted: set[str] = field(default_factory=set[str])
    commits: list[CommitRequest] = field(default_factory=list[CommitRequest])
    refusals: int = 0
    """So many requests are refused for their version."""
    stage_s: float = 1.0

    async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
        self.requests.append(request)
        if self.refusals:
            self.refusals -= 1
            raise VersionRefused("engine: it is of another version")
        context = bytes(request.token_ids)
        line = self.script[context.count(0)].encode() + b"\0"
        said = max(end for end in range(len(line)) if context.endswith(line[:end]))
        told: list[WireSpan] = []
        finish = FinishReason.STOP
        for token in line[said:][: request.max_new_tokens]:
            await anyio.sleep(TOKEN_S)
            if request.request_id in self.aborted:
                finish = FinishReason.ABORT
                break
            told.append(WireSpan(token_ids=[token], logprobs=[-token / 8], version=self.version))
            if spans is not None:
                spans(told[-1])
        versions = [WireVersionSpan(version=s.version, start=i, end=i + 1) for i, s in enumerate(told)]
        return GenerateReply(
            token_ids=[token for span in told for token in span.token_ids],
            logprobs=[value for span in told for value in span.logprobs],
            versions=versions,
            finish_reason=finish,
            cached_tokens=0,
            prefilled_tokens=len(request.token_ids),
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=TOKEN_S * len(told),
        )

    async def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)

    async def prepare_update(self, manifest: Manifest) -> None:
        del manifest
        await anyio.sleep(self.stage_s)

    async def commit_update(self, request: CommitRequest) -> CommitReply:
        self.commits.append(request)
        return await super().commit_update(request)


@asynccontextmanager
async def dispatching(
    terms: UpdateTerms, *engines: Teller, call_s: float = 10.0
) -> AsyncGenerator[Dispatcher]:
    tools = FakeTools(call_s=call_s)
    fleet = {EngineId(f"e{n}"): engine for n, engine in enumerate(engines)}
    async with open_dispatcher(
        SchedulerSettings(), fleet, tools, FakeRenderer(), update=UpdatePolicy(terms)
    ) as dispatcher:
        yield dispatcher
        snapshot = dispatcher.scheduler.snapshot()
        assert snapshot.phases == {}
        assert all(held == (0, 0) for held in snapshot.engines.values())
        assert tools.live == set()


def manifest(number: int) -> Manifest:
    return Manifest(version=f"0.{number}", path="/none", nbytes=0, tensors=())


async def run_and_publish(
    dispatcher: Dispatcher, at_s: float, limits: Limits | None = None
) -> tuple[Trajectory, float]:
    """A program, a publication that begins meanwhile, and when that was over."""
    done: list[Trajectory] = []
    over_s = 0.0
    async with anyio.create_task_group() as group:

        async def run() -> None:
            done.append(await dispatcher.run(spec("a", limits=limits)))

        group.start_soon(run)
        await anyio.sleep(at_s)
        await dispatcher.publish(manifest(1))
        over_s = anyio.current_time()
    return done[0], over_s


def sampled(trajectory: Trajectory) -> bytes:
    return b"".join(bytes(span.token_ids.tolist()) for spans in trajectory.sequences for span in spans)


def stamps(trajectory: Trajectory) -> list[tuple[str, int]]:
    """How many tokens in a row are of which version."""
    versions = [str(span.version) for span in trajectory.version_spans for _ in range(span.end - span.start)]
    return [(version, len(list(tokens))) for version, tokens in groupby(versions)]


async def test_an_interrupted_turn_keeps_its_tokens_and_goes_on_with_what_is_left_of_its_budget():
    engine = Teller(stage_s=0.25)
    limits = Limits(turn_tokens=13, wall_s=1000)
    async with dispatching(UpdateTerms(running="abort"), engine) as dispatcher:
        trajectory, _ = await run_and_publish(dispatcher, at_s=0.2, limits=limits)
    assert sampled(trajectory) == b"hello!look abcdef\0[abcdef]done\0"
    assert trajectory.outcome is None
    first, second, _ = engine.requests
    kept = len(second.token_ids) - len(first.token_ids)
    assert 0 < kept < 13
    assert (first.max_new_tokens, second.max_new_tokens) == (13, 13 - kept)
    assert bytes(second.token_ids) == b"hello" + b"!look abcdef\0"[:kept]
    assert stamps(trajectory) == [("0.0", kept), ("0.1", 18 - kept)]


async def test_the_budget_of_an_interrupted_turn_is_never_exceeded():
    engine = Teller(("a" * 50, "done"), stage_s=0.25)
    async with dispatching(UpdateTerms(running="abort"), engine) as dispatcher:
        trajectory, _ = await run_and_publish(dispatcher, 0.2, Limits(turn_tokens=10, wall_s=1000))
    assert sampled(trajectory) == b"hello" + b"a" * 10


async def test_an_interrupted_turn_is_told_once_token_by_token():
    engine, heard = Teller(stage_s=0.25), bytearray()

    def hear(turn: int, span: WireSpan) -> None:
        del turn
        heard.extend(span.token_ids)

    async with (
        dispatching(UpdateTerms(running="abort"), engine) as dispatcher,
        anyio.create_task_group() as group,
    ):
        group.start_soon(dispatcher.run, spec("a"), hear)
        await anyio.sleep(0.2)
        await dispatcher.publish(manifest(1))
    assert bytes(heard) == b"!look abcdef\0done\0"


async def test_finish_swaps_when_the_last_turn_has_ended_under_the_old_weights():
    engine = Teller(stage_s=0.25)
    async with dispatching(UpdateTerms(running="finish"), engine) as dispatcher:
        trajectory, over_s = await run_and_publish(dispatcher, at_s=0.2)
    assert stamps(trajectory) == [("0.0", 13), ("0.1", 5)]
    assert over_s == pytest.approx(13 * TOKEN_S)


async def test_finish_waits_no_longer_than_it_may():
    engine = Teller(stage_s=0.25)
    terms = UpdateTerms(running="finish", finish_within_s=0.3)
    async with dispatching(terms, engine) as dispatcher:
        trajectory, over_s = await run_and_publish(dispatcher, at_s=0.2)
    assert over_s == pytest.approx(0.75)
    assert stamps(trajectory) == [("0.0", 7), ("0.1", 11)]
    assert engine.commits[0].running == "recompute"


@pytest.mark.parametrize(
    ("terms", "running", "held"),
    [
        (UpdateTerms(), "recompute", "drop"),
        (UpdateTerms(running="continue", acting="keep"), "continue", "keep"),
        (UpdateTerms(running="continue", acting="pin"), "continue", "drop"),
        (UpdateTerms(running="finish", acting="keep"), "continue", "keep"),
    ],
)
async def test_engines_are_told_what_the_terms_say(terms: UpdateTerms, running: str, held: str):
    engine = Teller()
    async with dispatching(terms, engine) as dispatcher:
        await dispatcher.publish(manifest(1))
    assert [(c.running, c.held, c.oldest_kv) for c in engine.commits] == [(running, held, None)]


async def test_an_engine_that_does_not_tell_the_age_of_its_kv_drops_all_before_some_is_too_old():
    engine = Teller()
    terms = UpdateTerms(running="continue", acting="keep", max_kv_age=2)
    async with dispatching(terms, engine) as dispatcher:
        for number in range(1, 8):
            await dispatcher.publish(manifest(number))
    held = [commit.held for commit in engine.commits]
    assert held == ["keep", "keep", "drop", "keep", "keep", "drop", "keep"]
    assert all(commit.oldest_kv is None for commit in engine.commits)


async def test_a_program_too_stale_to_be_trained_is_ended_and_dropped_as_that():
    engine = Teller()
    until = replace(spec("a"), trainable_until=Version(0, 0))
    done: list[Trajectory] = []
    async with dispatching(UpdateTerms(), engine, call_s=1000) as dispatcher:
        async with anyio.create_task_group() as group:

            async def run() -> None:
                done.append(await dispatcher.run(until))

            group.start_soon(run)
            await anyio.sleep(5)
            await dispatcher.publish(manifest(1))
        assert anyio.current_time() == pytest.approx(6)
    assert done[0].outcome == Outcome(OutcomeKind.DROPPED, "stale")
    assert len(engine.requests) == 1


async def test_a_request_that_an_engine_refuses_for_its_version_is_sent_again():
    engine = Teller(refusals=2)
    async with dispatching(UpdateTerms(), engine) as dispatcher:
        trajectory = await dispatcher.run(replace(spec("a"), requires=Requirement.at_least(Version(0, 0))))
    assert trajectory.outcome is None
    assert len(engine.requests) == 4
    assert engine.requests[0].min_version == "0.0"
    assert stamps(trajectory) == [("0.0", 18)]


async def test_an_engine_that_refuses_for_ever_is_no_endless_loop():
    async with dispatching(UpdateTerms(), Teller(refusals=1000)) as dispatcher:
        trajectory = await dispatcher.run(spec("a"))
    assert "it is of another version" in str(trajectory.outcome)


async def test_a_version_that_is_gone_fails_the_program_with_what_is_deployed():
    engine = Teller(version="0.3")
    async with dispatching(UpdateTerms(), engine) as dispatcher:
        trajectory = await dispatcher.run(replace(spec("a"), requires=Requirement.exactly(Version(0, 2))))
    assert trajectory.outcome is not None
    assert trajectory.outcome.kind is OutcomeKind.FAILED
    assert "version 0.2 is served by no engine any more, 0.3 is deployed" in trajectory.outcome.reason
    assert engine.requests == []


async def test_nothing_of_a_version_is_served_before_the_slowest_engine_has_it():
    quick, slow = Teller(stage_s=0.1), Teller(stage_s=30.0)
    async with dispatching(UpdateTerms(), quick, slow) as dispatcher, anyio.create_task_group() as group:
        group.start_soon(dispatcher.publish, manifest(1))
        await anyio.sleep(20)
        trajectory = await dispatcher.run(spec("a"))
        assert stamps(trajectory) == [("0.0", 13), ("0.1", 5)]
    assert anyio.current_time() >= 30.0


async def test_with_a_quorum_a_late_engine_serves_nobody_until_it_has_the_version():
    quick, slow = Teller(stage_s=0.1), Teller(stage_s=100.0)
    terms = UpdateTerms(quorum=1, deadline_s=5)
    async with dispatching(terms, slow, quick) as dispatcher:
        await dispatcher.publish(manifest(1))
        assert anyio.current_time() == pytest.approx(5)
        for name in "abcd":
            await dispatcher.run(spec(name))
        assert slow.requests == []
        await anyio.sleep(100)
        assert dispatcher.serves(E0) == Version(0, 1)
