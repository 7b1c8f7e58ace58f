"""A scripted agent through the real path: sandbox, tool server, worker, dispatcher, scheduler, ledger."""

import os
import random
import signal
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import anyio
import psutil
import pytest

from sandboxes import nothing_left
from scripted import Stage, calls, says, specs_of, staged, turns_of, write_tokenizer_folder
from sostenuto.envs.storeroom.demonstrations import demonstrate_in_full
from sostenuto.envs.storeroom.environment import Storeroom
from sostenuto.envs.storeroom.world import StoreroomTask, training_tasks
from sostenuto.errors import Blame
from sostenuto.records import Trajectory, validate
from sostenuto.runtime.journal import read_journal
from sostenuto.types import Message, StopReason

TASKS = list(islice(training_tasks(1), 6))
NAMES = [f"p{index}" for index in range(len(TASKS))]
WORLD = dict(zip(NAMES, TASKS, strict=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("model"))


def right(program: str) -> Sequence[Message]:
    """Find, read, calculate, answer."""
    return turns_of(demonstrate_in_full(WORLD[program]))


def of_all_kinds(program: str) -> Sequence[Message]:
    match program:
        case "p1":
            return [says("The total is 1.")]
        case "p2":
            return [calls(("fnd", "{}")), calls(("find", '{"word":1}')), *right(program)]
        case "p3":
            return [calls(("read", '{"file":"../../etc/passwd"}')), says("I do not know.")]
        case "p4":
            both = ("find", f'{{"word":"{WORLD[program].word}"}}'), ("calc", '{"expr":"1+2"}')
            return [calls(*both), *right(program)[1:]]
        case _:
            return right(program)


async def test_scripted_agents_are_scored_recorded_and_leave_nothing(tmp_path: Path, model: Path):
    async with staged(tmp_path / "run", model, of_all_kinds) as stage:
        done = await stage.play(specs_of(Storeroom, WORLD))
        rewards = {name: trajectory.reward for name, trajectory in done.items()}
        assert rewards == {"p0": 1.0, "p1": 0.0, "p2": 1.0, "p3": 0.0, "p4": 1.0, "p5": 1.0}
        for name, trajectory in done.items():
            validate(trajectory)
            assert trajectory.stop_reason is StopReason.ANSWERED
            (sequence,) = trajectory.sequences
            assert [i for span in sequence for i in span.token_ids] == stage.engine.contexts[name]
        assert done["p0"].usage.cached_tokens > 0
        assert done["p4"].metrics["tool_calls"] == 4
        assert stage.ledger.statistics().sealed == len(TASKS)
        await stage.assert_nothing_is_held()
    with read_journal(tmp_path / "run" / "journal.db") as reader:
        assert reader.ledger().statistics() == stage.ledger.statistics()
        assert {t.program_id: t.reward for t in reader.trajectories()} == rewards


async def test_programs_cancelled_at_any_moment_leave_nothing(tmp_path: Path, model: Path):
    drawn = random.Random(7)
    async with staged(tmp_path / "run", model, _by_round, engine={"decode_s": 0.005}) as stage:
        for number in range(8):
            world = {f"{number}:{name}": task for name, task in WORLD.items()}
            with anyio.move_on_after(drawn.uniform(0.01, 0.4)):
                await stage.play(specs_of(Storeroom, world))
            await stage.assert_nothing_is_held()
        statistics = stage.ledger.statistics()
        assert statistics.submitted == 8 * len(TASKS)
        assert set(statistics.outcomes) <= {"cancelled(user)"}
        assert statistics.outcomes["cancelled(user)"] > 0
        await _works_as_before(stage)


def _by_round(program: str) -> Sequence[Message]:
    return right(program.rpartition(":")[2])


async def _works_as_before(stage: Stage) -> None:
    done = await stage.play(specs_of(Storeroom, {"last:p0": TASKS[0]}))
    assert done["last:p0"].reward == 1.0
    await stage.assert_nothing_is_held()


async def test_a_tool_server_that_is_killed_fails_its_programs_by_name_and_leaves_nothing(
    tmp_path: Path, model: Path
):
    async with staged(tmp_path / "run", model, right, engine={"decode_s": 0.2}) as stage:
        workers = psutil.Process(stage.server_pid).children(recursive=True)
        done = await _played_while_this_is_killed(stage, stage.server_pid, WORLD)
        later = await stage.play(specs_of(Storeroom, {"later": TASKS[0]}))
        for trajectory in (*done.values(), *later.values()):
            assert trajectory.outcome is not None
            assert trajectory.outcome.blame is Blame.INFRASTRUCTURE
            assert "the tool server ended (SIGKILL); see " in trajectory.outcome.reason
        assert stage.ledger.statistics().running == 0
        assert stage.engine.held == {}
        assert await nothing_left(stage.run.path / "sandboxes")
        assert not any(worker.is_running() for worker in workers)
    async with staged(tmp_path / "run", model, right) as stage:
        assert stage.sandboxes == []
        assert "reclaimed" in (stage.run.logs / "tool_server.log").read_text()


async def test_a_worker_that_is_killed_fails_its_programs_and_the_next_ones_get_another(
    tmp_path: Path, model: Path
):
    async with staged(tmp_path / "run", model, right, engine={"decode_s": 0.2}) as stage:
        await stage.play(specs_of(Storeroom, {"p0": TASKS[0]}))
        (worker,) = [
            p for p in psutil.Process(stage.server_pid).children() if "sostenuto.envs.worker" in p.cmdline()
        ]
        done = await _played_while_this_is_killed(stage, worker.pid, {"p1": TASKS[1], "p2": TASKS[2]})
        for trajectory in done.values():
            assert trajectory.outcome is not None
            assert trajectory.outcome.blame is Blame.INFRASTRUCTURE
            assert "the worker ended: " in trajectory.outcome.reason
        await stage.assert_nothing_is_held()
        again = await stage.play(specs_of(Storeroom, {"p3": TASKS[3]}))
        assert again["p3"].reward == 1.0


async def _played_while_this_is_killed(
    stage: Stage, pid: int, world: dict[str, StoreroomTask]
) -> dict[str, Trajectory]:
    done: dict[str, Trajectory] = {}
    async with anyio.create_task_group() as group:
        group.start_soon(_kill_while_they_act, stage, pid)
        done |= await stage.play(specs_of(Storeroom, world))
    return done


async def _kill_while_they_act(stage: Stage, pid: int) -> None:
    while not any(turn for program, turn in stage.engine.turns.items() if program != "p0"):  # noqa: ASYNC110
        await anyio.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
