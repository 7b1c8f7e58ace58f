"""Whole jobs with a tiny real model: engine, trainer, tool server, each a process; and what ends them."""

import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import psutil
import pytest
from anyio.abc import Process

from fakes_training import Parity, numbers
from real_jobs import build_weights
from sandboxes import nothing_left
from scripted import TINY, children, write_tokenizer_folder
from sostenuto.errors import TrainerError
from sostenuto.records import Producer, validate
from sostenuto.runtime.config import EngineSettings, RuntimeConfig, TrainerProcessSettings
from sostenuto.runtime.jobs.evaluate import NothingScored
from sostenuto.runtime.jobs.events import JobEvent, JobStarted, StepTrained
from sostenuto.runtime.jobs.job import EvalJob, RLJob
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.runtime import JobHandle, Runtime
from sostenuto.trainer.algorithms import GRPO
from sostenuto.types import Limits, Purpose, Version

CLI = [sys.executable, "-c", "from sostenuto.runtime.cli import main; main()"]
ALGORITHM = GRPO(group_size=2, zero_spread="keep")
LIMITS = Limits(turns=2, turn_tokens=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, and 40 rows of the output layer that no token has."""
    folder = write_tokenizer_folder(tmp_path_factory.mktemp("model"), TINY)
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] += 40
    (folder / "config.json").write_text(json.dumps(config))
    return build_weights(folder)


def a_job(model: Path, name: str, *, steps: int, max_staleness: int) -> RLJob:
    return RLJob(
        name=name, env=Parity, model=model, tasks=numbers(64), eval_tasks=numbers(2), steps=steps,
        groups_per_step=2, max_staleness=max_staleness, algorithm=ALGORITHM, limits=LIMITS, save_every=1000,
    )  # fmt: skip


async def followed(handle: JobHandle, until: Callable[[JobEvent], bool]) -> list[JobEvent]:
    """What the job said up to the event that was waited for, or to its end."""
    told: list[JobEvent] = []
    async for event in handle.events():
        told.append(event)
        if until(event):
            return told
    return told


async def test_a_job_learns_publishes_and_accounts_for_everything(tmp_path: Path, model: Path):
    before = children()
    config = RuntimeConfig(directory=tmp_path, trainer=TrainerProcessSettings(restarts=0))
    async with Runtime(config) as runtime:
        handle = await runtime.submit(a_job(model, "async", steps=2, max_staleness=1))
        await followed(handle, lambda event: isinstance(event, JobStarted))
        trainer = pid_of("sostenuto.trainer.process")
        told = await followed(handle, lambda _: False)
        result = await handle.result()
        steps = [event for event in told if isinstance(event, StepTrained)]
        assert [step.version for step in steps] == [Version(0, 1), Version(0, 2)]
        assert all(step.staleness_max <= 1 for step in steps)
        assert all(
            step.report.max_abs_dlogp is not None and step.report.max_abs_dlogp < 1e-4 for step in steps[:1]
        )
        assert (result.steps, result.version, len(result.evaluations)) == (2, Version(0, 2), 4)
        assert result.checkpoint is not None
        assert (result.checkpoint / "model.safetensors").is_file()
        assert result.time.learn_s > 0
        assert result.ledger.closes
        assert (result.ledger.running, result.ledger.sealed) == (0, 0)
        assert result.ledger.outcomes["trained"] == 8
        assert result.ledger.outcomes["evaluated"] == 8
        await _a_synchronous_job_whose_trainer_is_killed(runtime, model)
    assert children() == before
    assert published([trainer]) == []
    _assert_events(tmp_path / "events.jsonl")
    _assert_records(tmp_path / "journal.db", ModelFolder.open(model).tokenizer_size)


async def _a_synchronous_job_whose_trainer_is_killed(runtime: Runtime, model: Path) -> None:
    handle = await runtime.submit(a_job(model, "sync", steps=500, max_staleness=0))
    told = await followed(handle, lambda event: isinstance(event, StepTrained) and event.step == 2)
    assert all(event.staleness_max == 0 for event in told if isinstance(event, StepTrained))
    os.kill(pid_of("sostenuto.trainer.process"), signal.SIGKILL)
    with pytest.raises(TrainerError, match="exit code -9"):
        await handle.result()
    ledger = runtime.ledger
    assert ledger.closes
    assert (ledger.running, ledger.sealed) == (0, 0)
    assert set(ledger.outcomes) <= {"trained", "evaluated", "dropped(job_over)", "cancelled(job_failed)"}


def pid_of(module: str) -> int:
    (process,) = [p for p in psutil.Process().children(recursive=True) if module in p.cmdline()]
    return process.pid


def command_of(process: psutil.Process) -> list[str]:
    """Nothing of one that has ended meanwhile."""
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _assert_events(path: Path) -> None:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    ends = [e["event"] for e in events if e["event"].startswith("Job")]
    assert ends == ["JobStarted", "JobResult", "JobStarted", "JobFailed"]
    assert "exit code -9" in events[-1]["message"]
    assert all(event["at"] for event in events)


def _assert_records(journal: Path, tokenizer_size: int) -> None:
    with read_journal(journal) as reader:
        assert reader.ledger().statistics().closes
        trained = list(reader.trajectories(purpose=Purpose.TRAIN))
    assert len(trained) >= 8
    for trajectory in trained:
        validate(trajectory)
        for span in trajectory.spans():
            if span.producer is Producer.POLICY:
                assert span.token_ids.max() < tokenizer_size


JOB_FILE = """
directory = "{run}"
environment = "fakes_training:Parity"
model = "{model}"
steps = 500
groups_per_step = 2
tasks = {{ factory = "fakes_training:numbers", arguments = {{ count = 64 }} }}
limits = {{ turns = 2, turn_tokens = 6 }}
algorithm = {{ group_size = 2, zero_spread = "keep" }}
"""


@asynccontextmanager
async def training(run: Path, model: Path) -> AsyncGenerator[tuple[Process, list[psutil.Process]]]:
    """`sostenuto train` in the middle of its steps, and all processes below it."""
    file = run.with_suffix(".toml")
    file.write_text(JOB_FILE.format(run=run, model=model))
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    async with await anyio.open_process(
        [*CLI, "train", str(file)], env={**os.environ, "PYTHONPATH": path}, stdin=None
    ) as process:
        try:
            with anyio.fail_after(120):
                while not has_trained(run / "events.jsonl"):
                    assert process.returncode is None
                    await anyio.sleep(0.05)
            yield process, psutil.Process(process.pid).children(recursive=True)
        finally:
            if process.returncode is None:
                process.kill()


def has_trained(events: Path) -> bool:
    return events.is_file() and b"StepTrained" in events.read_bytes()


def published(pids: list[int]) -> list[str]:
    """Weights in shared memory of these trainers."""
    return [p.name for p in Path("/dev/shm").glob("sostenuto-weights-*") if int(p.name.split("-")[2]) in pids]


async def all_ended(processes: list[psutil.Process]) -> bool:
    with anyio.move_on_after(20):
        while any(process.is_running() for process in processes):  # noqa: ASYNC110
            await anyio.sleep(0.05)
    return not any(process.is_running() for process in processes)


async def test_ctrl_c_ends_a_job_with_its_books_closed_and_nothing_left(tmp_path: Path, model: Path):
    run = tmp_path / "run"
    async with training(run, model) as (process, below):
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
        assert await all_ended(below)
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").iterdir())
    assert not list((run / "sandboxes").iterdir())
    with read_journal(run / "journal.db") as reader:
        ledger = reader.ledger().statistics()
    assert ledger.closes
    assert (ledger.running, ledger.sealed) == (0, 0)
    assert set(ledger.outcomes) <= {"trained", "dropped(job_over)", "cancelled(user)"}


async def test_ctrl_c_ends_the_quickstart_while_it_warms_up(tmp_path: Path):
    run = tmp_path / "run"
    async with await anyio.open_process([*CLI, "quickstart", "--directory", str(run)], stdin=None) as process:
        below = psutil.Process(process.pid).children
        with anyio.fail_after(120):
            while not any("sostenuto.trainer.process" in command_of(p) for p in below()):  # noqa: ASYNC110
                await anyio.sleep(0.05)
        started = below(recursive=True)
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
        assert await all_ended(started)
    with read_journal(run / "journal.db") as reader:
        assert reader.ledger().statistics().submitted == 0
    assert not list((run / "sandboxes").iterdir())


async def test_a_runtime_that_is_killed_takes_everything_with_it_and_the_next_one_settles(
    tmp_path: Path, model: Path
):
    run = tmp_path / "run"
    async with training(run, model) as (process, below):
        process.kill()
        assert await all_ended(below)
        assert await nothing_left(run / "sandboxes")
    assert published([gone.pid for gone in below]) == []
    status = (await anyio.run_process([*CLI, "status", str(run)])).stdout.decode()
    assert "no runtime holds it" in status
    assert "the sums close" in status
    (engine,) = (run / "logs").glob("engine-*")
    assert (engine / "engine.sock.log").is_file()
    with read_journal(run / "journal.db") as reader:
        highest = reader.highest_version()
    assert highest is not None
    config = RuntimeConfig(directory=run, engine=EngineSettings(restarts=0))
    async with Runtime(config) as runtime:
        assert (runtime.ledger.running, runtime.ledger.sealed) == (0, 0)
        assert not list((run / "sandboxes").iterdir())
        await _an_evaluation_whose_engine_is_killed(runtime, model, highest)
    with read_journal(run / "journal.db") as reader:
        assert reader.facts()["epoch"] == "1"
        assert reader.ledger().statistics().closes


async def _an_evaluation_whose_engine_is_killed(runtime: Runtime, model: Path, highest: Version) -> None:
    tasks = numbers(300)
    handle = await runtime.submit(EvalJob(env=Parity, model=model, tasks=tasks, limits=LIMITS))
    (started,) = await followed(handle, lambda event: isinstance(event, JobStarted))
    assert isinstance(started, JobStarted)
    assert started.version == Version(1, highest.number + 1)
    os.kill(pid_of("sostenuto.runtime.engines.embedded"), signal.SIGKILL)
    with pytest.raises(NothingScored, match=r"its process ended with status -9"):
        await handle.result()
    assert runtime.ledger.running == 0
