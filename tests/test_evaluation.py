"""What an evaluation says, how sure it is, and that it does not wait behind training."""

import json
import math
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fakes import FakeEngine, FakeRenderer, FakeTools, spec
from sostenuto.errors import ConfigError, ToolServerError
from sostenuto.runtime.dispatcher import open_dispatcher
from sostenuto.runtime.jobs.estimates import confidence, mean_pass_at, pass_at, wilson
from sostenuto.runtime.jobs.evaluate import Evaluation
from sostenuto.runtime.jobs.events import Evaluated, as_json
from sostenuto.runtime.jobs.sampling import Sampling
from sostenuto.runtime.journal import open_journal
from sostenuto.runtime.ledger import Ledger
from sostenuto.runtime.rollouts import Rollouts
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.tools.wire import EnvironmentRef, Reward
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import CallId, EngineId, Episode, Limits, ProgramId, ToolCall, ToolResult, Version
from test_supply import Number

E0 = EngineId("e0")


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_share_of_all_draws_of_k_with_a_success(samples: list[bool], k: int):
    if k > len(samples):
        with pytest.raises(ValueError, match=f"pass@{k}"):
            pass_at(k, len(samples), sum(samples))
        return
    draws = list(combinations(samples, k))
    assert pass_at(k, len(samples), sum(samples)) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_tasks_with_fewer_samples_do_not_speak_of_more():
    tasks = [[True, False], [False, False], [True]]
    assert mean_pass_at(1, tasks) == pytest.approx(0.5)
    assert mean_pass_at(2, tasks) == pytest.approx(0.5)
    assert mean_pass_at(3, tasks) is None


def test_wilsons_interval_has_the_published_ends():
    """81 of 263 (Newcombe 1998, table I): 0.2553 to 0.3662; and 0 of 20: 0 to 0.1611."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_the_interval_says_what_it_is():
    assert confidence([[1.0], [0.0]]).method == "wilson"
    assert confidence([[1.0, 0.5], [0.0, 0.0]]).method == "student"
    alone = confidence([[1.0, 0.0]])
    assert alone.method == "none"
    assert math.isnan(alone.low)
    spread = confidence([[0.2], [0.4], [0.6]])
    assert (spread.low + spread.high) / 2 == pytest.approx(0.4)
    assert spread.high - 0.4 == pytest.approx(4.303 * 0.2 / math.sqrt(3))


@dataclass
class Lucky(FakeTools):
    """Every second sample succeeds, on every second task."""

    breaks: str = "none"
    began: list[str] = field(default_factory=list[str])

    async def call(
        self, program_id: ProgramId, call_id: CallId, call: ToolCall, *, timeout_s: float, priority: int = 0
    ) -> ToolResult:
        self.began.append(program_id)
        if program_id.endswith(self.breaks):
            raise ToolServerError("the sandbox died")
        return await super().call(program_id, call_id, call, timeout_s=timeout_s, priority=priority)

    async def reward(
        self, program_id: ProgramId, call_id: CallId, episode: Episode, *, timeout_s: float
    ) -> Reward:
        task, _, sample = program_id.partition("-eval1-")[2].partition("-")
        return Reward(value=float(int(task) % 2 == 0 and int(sample or 0) % 2 == 0), metrics={}, elapsed_s=0)


def held_out(tasks: int, sampling: Sampling) -> Evaluation:
    return Evaluation(
        [Number(number=n) for n in range(tasks)],
        EnvironmentRef(name="fake", import_path="fake:Fake"),
        Limits(wall_s=10_000),
        seed=1,
        name="held-out",
        sampling=sampling,
    )


@dataclass
class Place:
    directory: Path
    tools: Lucky = field(default_factory=Lucky)
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    engine: FakeEngine = field(default_factory=lambda: FakeEngine(("!look a", "done"), kv_tokens=4000))
    ledger: Ledger = field(default_factory=Ledger)

    async def evaluate(self, evaluation: Evaluation, temperature: float = 1.0, updates: int = 0) -> Evaluated:
        said: list[Evaluated] = []
        async with (
            open_journal(self.directory / "journal.db") as journal,
            open_dispatcher(self.settings, {E0: self.engine}, self.tools, FakeRenderer()) as dispatcher,
            anyio.create_task_group() as group,
        ):

            async def publish() -> None:
                for number in range(1, updates + 1):
                    await anyio.sleep(5)
                    manifest = Manifest(version=f"0.{number}", path="/none", nbytes=0, tensors=())
                    await dispatcher.publish(manifest)

            group.start_soon(publish)
            rollouts = Rollouts(dispatcher, self.ledger, journal)
            version = dispatcher.version
            told, _ = await evaluation.run(rollouts, temperature=temperature, step=3, version=version)
            said.append(told)
        return said[0]


@pytest.mark.looptime
async def test_several_samples_of_each_task_give_pass_at_k_and_an_interval(tmp_path: Path):
    told = await Place(tmp_path).evaluate(held_out(6, Sampling(samples=4)))
    assert (told.programs, told.tasks, told.failed, told.reward) == (24, 6, 0, 0.25)
    assert told.pass_at == pytest.approx({1: 0.25, 2: 0.5 * 5 / 6, 4: 0.5})
    assert told.interval == "wilson"
    assert (told.low, told.high) == pytest.approx(wilson(1.5, 6))
    assert told.versions == (Version(0, 0),)
    assert told.stops == {"answered": 24}
    line = json.loads(as_json(told, at="now"))
    assert (line["versions"], line["pass_at"]["1"], line["low"]) == (["0.0"], 0.25, told.low)


@pytest.mark.looptime
async def test_greedy_runs_each_task_once(tmp_path: Path):
    told = await Place(tmp_path).evaluate(held_out(3, Sampling(samples=4)), temperature=0.0)
    assert (told.programs, told.tasks) == (3, 3)
    assert set(told.pass_at) == {1}


@pytest.mark.looptime
async def test_a_sample_that_the_infrastructure_failed_is_no_failure_of_the_policy(tmp_path: Path):
    here = Place(tmp_path, tools=Lucky(breaks="-1"))
    told = await here.evaluate(held_out(2, Sampling(samples=2)))
    assert (told.programs, told.failed, told.tasks) == (2, 2, 2)
    assert told.reward == 0.5
    assert told.pass_at == {1: 0.5}


@pytest.mark.looptime
async def test_an_evaluation_beside_publications_says_which_versions_have_sampled(tmp_path: Path):
    told = await Place(tmp_path).evaluate(held_out(4, Sampling()), updates=2)
    assert told.version == Version(0, 0)
    assert told.versions[0] == Version(0, 0)
    assert len(told.versions) > 1


@pytest.mark.looptime
@pytest.mark.parametrize("reserved", [0, 2])
async def test_it_goes_before_training_and_into_the_places_that_are_kept_for_it(
    tmp_path: Path, reserved: int
):
    tools, took_s = Lucky(call_s=100.0), 0.0
    settings = SchedulerSettings(live_programs=4, reserved_programs=reserved)
    async with (
        open_journal(tmp_path / "journal.db") as journal,
        open_dispatcher(
            settings, {E0: FakeEngine(("!look a", "done"), kv_tokens=4000)}, tools, FakeRenderer()
        ) as dispatcher,
        anyio.create_task_group() as group,
    ):
        rollouts = Rollouts(dispatcher, Ledger(), journal)
        for number in range(12):
            group.start_soon(rollouts.run, spec(f"training-eval1-{number}"))
        await anyio.sleep(10)
        began_s = anyio.current_time()
        await held_out(2, Sampling()).run(rollouts, temperature=1.0, step=0, version=dispatcher.version)
        took_s = anyio.current_time() - began_s
        group.cancel_scope.cancel()
    before = tools.began.index("held-out-eval1-00000")
    assert before == 4 - reserved
    # Its own turns and call, and where nothing was kept for it what those that run still take.
    assert took_s < (110 if reserved else 220)


def test_nonsense_is_refused():
    with pytest.raises(ConfigError, match="samples is 0"):
        Sampling(samples=0)
    assert Sampling(samples=6).ks == (1, 2, 4, 6)
    with pytest.raises(ValidationError, match="reserved_programs 4 leaves nothing of live_programs 4"):
        SchedulerSettings(live_programs=4, reserved_programs=4)
