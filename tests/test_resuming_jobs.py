"""Jobs that are cut off and taken up again, with real processes: nothing is learnt from twice or lost."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from benchmarks.outside import command_of
from benchmarks.recovery_audit import audit, events

from fakes_training import Parity, numbers
from real_jobs import build_weights
from scripted import TINY, write_tokenizer_folder
from sostenuto.errors import ConfigError
from sostenuto.runtime.config import RuntimeConfig, TrainerProcessSettings
from sostenuto.runtime.jobs.events import JobEvent, Resumed, StepTrained
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.algorithms import GRPO
from sostenuto.trainer.client import TrainerLost
from sostenuto.trainer.retention import checkpoints
from sostenuto.types import Limits, Version

CLI = [sys.executable, "-c", "from sostenuto.runtime.cli import main; main()"]
STEPS = 8
JOB_FILE = """
directory = "{run}"
environment = "fakes_training:Parity"
model = "{model}"
steps = {steps}
save_every = 2
groups_per_step = 2
tasks = {{ factory = "fakes_training:numbers", arguments = {{ count = 64 }} }}
eval_tasks = {{ factory = "fakes_training:numbers", arguments = {{ count = 2 }} }}
limits = {{ turns = 2, turn_tokens = 6 }}
algorithm = {{ group_size = 2, zero_spread = "keep" }}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer_folder(tmp_path_factory.mktemp("model"), TINY)
    return build_weights(folder)


def after_step(step: int) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda told: any(e["event"] == "StepTrained" and e["step"] >= step for e in told)


async def killed(arguments: list[str], run: Path, when: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Start the command, and kill its whole tree as soon as what it has told meanwhile is enough."""
    seen = len(events(run))
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    async with await anyio.open_process([*CLI, *arguments], env=environment, stdin=None) as process:
        tree = psutil.Process(process.pid)
        with anyio.fail_after(120):
            while not when(events(run)[seen:]):
                assert process.returncode is None
                await anyio.sleep(0.02)
        for each in [tree, *tree.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


async def finished(arguments: list[str]) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    await anyio.run_process([*CLI, *arguments], env={**os.environ, "PYTHONPATH": path}, stderr=None)


async def test_a_job_that_is_killed_and_moved_learns_from_each_task_once(tmp_path: Path, model: Path):
    run, file = tmp_path / "run", tmp_path / "job.toml"
    file.write_text(JOB_FILE.format(run=run, model=model, steps=STEPS))
    await killed(["train", str(file)], run, after_step(3))
    file.unlink()
    moved = tmp_path / "elsewhere"
    run.rename(moved)
    await finished(["resume", str(moved)])
    _assert_told(events(moved))
    _assert_books(moved, epoch="1")


async def test_a_job_survives_its_trainer_until_that_has_died_too_often(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    # All records are long ones.
    monkeypatch.setattr("sostenuto.runtime.journal.BULK_BYTES", 1)
    job = RLJob(
        env=Parity, model=model, tasks=numbers(64), steps=6, groups_per_step=2, save_every=2,
        algorithm=GRPO(group_size=2, zero_spread="keep"), limits=Limits(turns=2, turn_tokens=6),
    )  # fmt: skip
    config = RuntimeConfig(directory=tmp_path, trainer=TrainerProcessSettings(restarts=1))
    async with Runtime(config) as runtime:
        handle, kills, told = await runtime.submit(job), 0, list[JobEvent]()
        async for event in handle.events():
            told.append(event)
            if isinstance(event, StepTrained) and event.step >= 3 + kills and kills < 2:
                kills += 1
                os.kill(_pid_of("sostenuto.trainer.process"), signal.SIGKILL)
        with pytest.raises(TrainerLost, match=r"exit code -9(?s:.*)started again 1 times, and is given up"):
            await handle.result()
        assert (runtime.ledger.running, runtime.ledger.sealed) == (0, 0)
    (resumed,) = [event for event in told if isinstance(event, Resumed)]
    assert (resumed.job, resumed.step, resumed.version.epoch) == ("job.1", 2, 1)
    assert resumed.kept + resumed.dropped >= 1
    async with Runtime(config) as runtime:
        with pytest.raises(ConfigError, match=r"has had no job 'other'"):
            await runtime.resume(replace(job, name="other"))
        with pytest.raises(ConfigError, match=r"seed was 0, the job has 4; give the same"):
            await runtime.resume(replace(job, seed=4))
        result = await (await runtime.resume(job)).result()
    assert (result.job, result.steps, len(result.rewards)) == ("job.2", 6, 6)
    assert result.version.epoch == 2
    _assert_books(tmp_path, steps=6)


def _pid_of(module: str) -> int:
    (process,) = [p for p in psutil.Process().children(recursive=True) if module in command_of(p)]
    return process.pid


def _assert_told(told: list[dict[str, Any]]) -> None:
    resumed = [event for event in told if event["event"] == "Resumed"]
    steps = [event for event in told if event["event"] == "StepTrained"]
    result = told[-1]
    assert [event["job"] for event in resumed] == ["job.1"]
    assert resumed[0]["step"] >= 2
    versions = [Version.parse(event["version"]) for event in (*resumed, *steps, result)]
    assert Version.parse(steps[-1]["version"]) == Version.parse(result["version"]) == max(versions)
    numbers = [Version.parse(event["version"]).number for event in steps]
    assert numbers == sorted(set(numbers))
    assert result["event"] == "JobResult"
    assert (result["steps"], len(result["rewards"])) == (STEPS, STEPS)
    assert [(e["step"], e["temperature"]) for e in result["evaluations"]] == [
        (0, 1.0), (0, 0.0), (STEPS, 1.0), (STEPS, 0.0),
    ]  # fmt: skip


def _assert_books(run: Path, *, steps: int = STEPS, epoch: str = "2") -> None:
    assert audit(run, "job", steps=steps, groups_per_step=2).faults() == {}
    with read_journal(run / "journal.db") as reader:
        assert reader.facts()["epoch"] == epoch
    assert len(checkpoints(run / "checkpoints" / "job")) == 3
