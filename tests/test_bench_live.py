"""Live comparisons: plans through the real dispatcher, on a fake engine in virtual time and on a real one."""

from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner

from engine_models import make_folder
from fakes import FakeEngine
from sostenuto.errors import ConfigError
from sostenuto.runtime.bench.comparison import ENDLESS_POOL, compare
from sostenuto.runtime.bench.live.cells import LiveCell, LiveSweep
from sostenuto.runtime.bench.live.run import replay
from sostenuto.runtime.bench.live.workload import live_workload
from sostenuto.runtime.bench.summary import Measured
from sostenuto.runtime.cli import app
from sostenuto.runtime.config import EngineSettings
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn, Workload
from sostenuto.runtime.simulation.results import RunResult
from sostenuto.scheduler.kv import Segment
from sostenuto.scheduler.policies import make_policy
from sostenuto.types import EngineId, GroupId, ProgramId

TURNS = (PlannedTurn(5, "read", 2.0, 7), PlannedTurn(3, "test", 30.0, 0), PlannedTurn(4))


def plans(count: int, *, turns: tuple[PlannedTurn, ...] = TURNS, arrival_s: float = 0.0) -> tuple[Plan, ...]:
    return tuple(
        Plan(
            id=ProgramId(f"p{index}"),
            group=GroupId("g"),
            group_size=count,
            shared=(Segment("all", 6),),
            prompt_tokens=10,
            turns=turns,
            arrival_s=index * arrival_s,
            prepare_s=1.0,
        )
        for index in range(count)
    )


async def replayed(
    workload: Workload, policy: str = "sostenuto", *, kv_tokens: int = 4000, time_scale: float = 1.0
) -> tuple[RunResult, FakeEngine]:
    engine = FakeEngine(("x" * 64,), kv_tokens=kv_tokens)
    run = await replay(make_policy(policy), workload, {EngineId("e0"): engine}, seed=1, time_scale=time_scale)
    return run, engine


@pytest.mark.looptime
@pytest.mark.parametrize("policy", ["sostenuto", "request-sticky", "thunderagent"])
async def test_a_program_takes_the_turns_tokens_and_tools_of_its_plan(policy: str):
    run, engine = await replayed(Workload("w", plans(1), concurrency=1), policy)
    (program,) = run.programs
    assert (program.failed, program.turns, program.generated_tokens) == ("", 3, 12)
    assert [len(request.token_ids) for request in engine.requests] == [16, 28, 31]
    assert [request.max_new_tokens for request in engine.requests] == [5, 3, 4]
    assert program.tool_s == 32
    assert program.prepare_s == 1
    assert program.completion_s == 1 + 3 + 32
    assert (program.prefilled_tokens, program.recomputed_tokens) == (16 + 7, 0)
    assert {stretch.what for stretch in program.stretches} >= {"preparing", "reasoning", "acting"}


@pytest.mark.looptime
async def test_equal_plans_are_sent_equal_prefixes_and_prompts_of_their_own():
    _, engine = await replayed(Workload("w", plans(2), concurrency=2))
    first, second = (request.token_ids for request in engine.requests[:2])
    assert first[:6] == second[:6]
    assert first[6:] != second[6:]


@pytest.mark.looptime
async def test_the_same_seed_sends_the_same_tokens():
    _, one = await replayed(Workload("w", plans(3), concurrency=2))
    _, other = await replayed(Workload("w", plans(3), concurrency=2))
    assert [request.token_ids for request in one.requests] == [r.token_ids for r in other.requests]


@pytest.mark.looptime
async def test_a_closed_workload_keeps_so_many_programs_in_the_system():
    run, _ = await replayed(Workload("w", plans(4), concurrency=2))
    assert sorted(program.submitted_s for program in run.programs) == [0, 0, 36, 36]
    assert run.makespan_s == 72


@pytest.mark.looptime
async def test_an_open_workload_comes_when_it_says_and_tools_take_their_time_by_scale():
    run, _ = await replayed(Workload("w", plans(3, arrival_s=100.0)), time_scale=0.5)
    assert [program.submitted_s for program in run.programs] == [0, 50, 100]
    assert {program.completion_s for program in run.programs} == {0.5 + 3 + 16}


@pytest.mark.looptime
async def test_calls_beyond_a_tools_places_wait_and_that_is_told_apart():
    run, _ = await replayed(Workload("w", plans(2), concurrency=2, tool_concurrency={"test": 1}))
    assert sorted(program.tool_queue_s for program in run.programs) == [0, 30]
    assert {program.tool_s for program in run.programs} == {32}


@pytest.mark.looptime
async def test_waiting_for_an_engine_has_a_length_and_a_reason():
    turns = (PlannedTurn(30, "read", 20.0, 5), PlannedTurn(30))
    run, engine = await replayed(Workload("w", plans(3, turns=turns), concurrency=3), kv_tokens=100)
    assert engine.most_held <= 100
    assert max(wait_s for program in run.programs for wait_s in program.admission_waits_s) > 0
    assert sum(program.waits_by_reason_s.get("kv", 0.0) for program in run.programs) > 0
    (busy,) = run.engines
    assert busy.prefilled_tokens == 30 * engine.loads


@pytest.mark.looptime
async def test_a_program_that_fails_is_counted_with_its_reason():
    engine = FakeEngine(("x" * 64,), kv_tokens=4000, fail_on_turn=1)
    policy = make_policy("sostenuto")
    run = await replay(policy, Workload("w", plans(1), concurrency=1), {EngineId("e0"): engine}, seed=1)
    (program,) = run.programs
    assert "generate of turn 1 broke" in program.failed
    assert program.turns == 1


def test_a_program_depends_on_seed_and_number_alone():
    few, many = (live_workload(count, seed=3, concurrency=4).programs for count in (2, 5))
    assert few == many[:2]
    assert many != live_workload(5, seed=4, concurrency=4).programs


def test_on_a_real_engine_every_policy_does_the_same_work(tmp_path: Path):
    turns = (PlannedTurn(5, "read", 0.01, 7), PlannedTurn(4))
    workload = Workload("w", plans(4, turns=turns), concurrency=4)
    sweep = LiveSweep(
        ("sostenuto", "request-sticky"),
        lambda seed: workload,
        (1,),
        EngineSettings(concurrency=4),
        model=make_folder(tmp_path / "model"),
        kv_tokens=64,
        references=False,
    )
    told: list[LiveCell] = []
    measured = run_here(sweep, told)
    assert [cell.policy for cell in told] == ["sostenuto", "request-sticky"]
    for run in (m.run for m in measured):
        assert [program.failed for program in run.programs] == [""] * 4
        assert sum(program.generated_tokens for program in run.programs) == 36
        assert run.engines[0].busy_s > 0
    (place,) = compare([m.summary for m in measured])
    assert [row.label for row in place.rows] == ["sostenuto", "request-sticky"]


def run_here(sweep: LiveSweep, told: list[LiveCell]) -> list[Measured]:
    def say(cell: LiveCell, measured: Measured) -> None:
        assert measured.run.policy == cell.policy
        told.append(cell)

    return anyio.run(sweep.run, say)


def test_the_endless_pool_holds_all_programs_at_once_and_is_a_reference():
    workload = live_workload(12, seed=1, concurrency=6)
    sweep = LiveSweep(("sostenuto",), lambda _: workload, (1,), EngineSettings())
    ours, endless = sweep.cells()
    assert endless.settings["reference"] == ENDLESS_POOL
    assert endless.kv_tokens >= sum(plan.peak_tokens for plan in workload.programs)
    assert ours.kv_tokens < endless.kv_tokens / 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policies", "sostenutto"], "did you mean 'sostenuto'"),
        (["--ratio", "0"], "ratio: 0; give a number above 0"),
        (["--time-scale", "-1"], "time-scale: -1; give a number above 0"),
        (["--kv-tokens", "500"], "needs .* tokens of KV, and an engine has 500"),
        (["--slots", "0"], "engine: concurrency: Input should be greater than 0"),
        (["--programs", "0"], "programs: 0 are too few"),
        (["--model", "no/such/folder"], "model: no/such/folder is not a folder"),
        (["--engines", "0"], "engines: 0 are too few"),
    ],
)
def test_what_cannot_run_is_said_before_anything_runs(options: list[str], message: str, tmp_path: Path):
    done = CliRunner().invoke(app, ["bench", "run", "--out", str(tmp_path / "out"), "--no-html", *options])
    assert isinstance(done.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise done.exception
    assert not (tmp_path / "out").exists()
