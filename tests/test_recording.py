"""Runs that leave a trace, and programs that are replayed from it."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fakes import FakeEngine, FakeRenderer, FakeTools, spec
from sostenuto.errors import ConfigError
from sostenuto.runtime.config import RuntimeConfig, load_toml
from sostenuto.runtime.dispatcher import open_dispatcher
from sostenuto.runtime.journal import Journal
from sostenuto.runtime.ledger import Ledger
from sostenuto.runtime.rollouts import Rollouts
from sostenuto.runtime.simulation.traces.files import read_trace
from sostenuto.runtime.simulation.traces.recorder import TraceRecorder
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId, Purpose


async def recorded(trace: TraceRecorder, names: str, *, fail_on_turn: int = -1) -> Ledger:
    engine = FakeEngine(("!look a", "done"), fail_on_turn=fail_on_turn)
    ledger = Ledger()
    with closing(sqlite3.connect(":memory:")) as connection:
        engines = {EngineId("e0"): engine}
        async with open_dispatcher(SchedulerSettings(), engines, FakeTools(), FakeRenderer()) as dispatcher:
            rollouts = Rollouts(dispatcher, ledger, Journal(connection), trace=trace)
            for name in names:
                await rollouts.run(spec(name, purpose=Purpose.EVALUATE))
    return ledger


@pytest.mark.looptime
async def test_each_finished_program_adds_a_line_with_its_turns(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    await recorded(TraceRecorder(path), "ab")
    await recorded(TraceRecorder(path), "c")
    programs = read_trace(path).programs
    assert [plan.id for plan in programs] == ["a", "b", "c"]
    for plan in programs:
        assert plan.shared_tokens + plan.prompt_tokens == len("hello")
        assert [turn.output_tokens for turn in plan.turns] == [len("!look a") + 1, len("done") + 1]
        assert (plan.turns[0].tool_s, plan.turns[0].result_tokens) == (10, len("[a]"))


@pytest.mark.looptime
async def test_a_program_that_fails_half_way_is_recorded_as_far_as_it_came(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    await recorded(TraceRecorder(path), "a", fail_on_turn=1)
    (plan,) = read_trace(path).programs
    assert len(plan.turns) == 1


@pytest.mark.looptime
async def test_a_trace_that_cannot_be_written_is_named_and_the_books_are_right(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    trace = TraceRecorder(path)
    path.unlink()
    path.mkdir()
    ledger = Ledger()
    engines = {EngineId("e0"): FakeEngine()}
    with closing(sqlite3.connect(":memory:")) as connection:
        async with open_dispatcher(SchedulerSettings(), engines, FakeTools(), FakeRenderer()) as dispatcher:
            rollouts = Rollouts(dispatcher, ledger, Journal(connection), trace=trace)
            with pytest.raises(ConfigError, match=r"trace: .*trace\.jsonl: Is a directory"):
                await rollouts.run(spec("a", purpose=Purpose.EVALUATE))
    assert ledger.statistics().outcomes == {"evaluated": 1}


def test_trace_and_scheduler_are_set_from_a_file(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text('trace = "here.jsonl"\n[scheduler]\nqueue_limit = 4\npatience_s = 30\n')
    config = load_toml(file, RuntimeConfig)
    assert config.trace == Path("here.jsonl")
    assert (config.scheduler.queue_limit, config.scheduler.patience_s) == (4, 30)
