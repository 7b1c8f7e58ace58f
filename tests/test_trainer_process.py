"""The trainer as the runtime meets it: a process of its own."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import psutil
import pytest

from sostenuto.errors import ConfigError, RecordError, TrainerError
from sostenuto.trainer.algorithms import GRPO, SFT
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.publication.shared_memory import SHARED_MEMORY
from sostenuto.trainer.samples import demonstration
from sostenuto.trainer.settings import LearnerSettings, Schedule
from sostenuto.types import Version
from trainer_world import V0, learner, random_samples, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def published_by(pid: int) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"sostenuto-weights-{pid}-*"))


async def test_a_whole_round_gives_what_the_learner_in_this_process_gives(tmp_path: Path, folder: Path):
    samples = random_samples(6)
    here = learner(folder, seed=1)
    async with TrainerClient() as trainer:
        facts = await trainer.open(folder, LearnerSettings(), seed=1, version=V0)
        assert (facts.version, facts.dtype, facts.vocabulary_size, facts.tokenizer_size) == (
            V0,
            "float32",
            24,
            20,
        )
        assert facts.parameters == here.policy.parameters
        assert facts.weight_bytes == 4 * facts.parameters

        for found, expected in zip(await trainer.logprobs(samples), here.logprobs(samples, 1.0), strict=True):
            assert np.array_equal(found, expected, equal_nan=True)
        assert await trainer.exact(samples) == here.exact(samples)
        fitted, learned = await trainer.fit(samples), here.fit(samples, SFT())
        assert (fitted.loss, fitted.grad_norm) == (learned.loss, learned.grad_norm)

        manifest = await trainer.publish(Version(0, 1))
        assert manifest.version == "0.1"
        assert "lm_head.weight" not in {entry.name for entry in manifest.tensors}
        assert published_by(trainer.pid) == [Path(manifest.path)]
        path = await trainer.save(tmp_path, Version(0, 1))
        report = await trainer.learn(samples, GRPO())
        assert (report.step, report.refused) == (2, "")
        assert (await trainer.restore(path)).version == Version(0, 1)
        again = await trainer.learn(samples, GRPO())
        assert (again.step, again.loss, again.grad_norm) == (2, report.loss, report.grad_norm)
        reset = await trainer.reset_optimizer(Schedule(learning_rate=1e-5))
        assert (reset.step, reset.version) == (2, None)
        assert (await trainer.fit(samples)).learning_rate == 1e-5
    assert not psutil.pid_exists(trainer.pid)
    assert published_by(trainer.pid) == []
    with pytest.raises(TrainerError, match="it was closed"):
        await trainer.exact(samples)


async def test_the_event_loop_is_free_and_a_cancelled_call_leaves_the_next_one_its_own_answer(folder: Path):
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await anyio.sleep(0.005)
            ticks += 1

    async with TrainerClient() as trainer, anyio.create_task_group() as group:
        group.start_soon(tick)
        await trainer.open(folder, LearnerSettings(), seed=0)
        assert ticks > 20
        with anyio.move_on_after(0.001) as scope:
            await trainer.logprobs(random_samples(400))
        assert scope.cancelled_caught
        (found,) = await trainer.logprobs(random_samples(1))
        assert len(found) == len(random_samples(1)[0])
        group.cancel_scope.cancel()


async def test_errors_come_back_as_what_they_are_and_the_process_goes_on(tmp_path: Path, folder: Path):
    async with TrainerClient() as trainer:
        with pytest.raises(TrainerError, match="call open first"):
            await trainer.fit(random_samples(1))
        with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
            await trainer.open(tmp_path, LearnerSettings(), seed=0)
        await trainer.open(folder, LearnerSettings(), seed=0, version=V0)
        with pytest.raises(RecordError, match="no behaviour log-probability"):
            await trainer.learn([demonstration([1, 2], [False, True])], GRPO())
        with pytest.raises(RecordError, match="newest version"):
            await trainer.learn([replace(random_samples(1)[0], version=Version(0, 4))], GRPO())
        with pytest.raises(ConfigError, match=r"no trainer\.json"):
            await trainer.restore(folder)
        await trainer.publish(Version(0, 1))
        with pytest.raises(ConfigError, match="used already"):
            await trainer.publish(Version(0, 0))
        assert (await trainer.fit(random_samples(2))).step == 1


async def test_an_unexpected_error_ends_the_process_and_is_told(folder: Path):
    async with TrainerClient() as trainer:
        await trainer.open(folder, LearnerSettings(), seed=0)
        with pytest.raises(TrainerError, match=r"(?s)exit code 1; its last words:.*ValidationError"):
            await trainer.logprobs(random_samples(1), temperature="hot")  # pyright: ignore[reportArgumentType]


async def test_a_killed_trainer_is_an_error_and_the_next_one_removes_its_files(folder: Path):
    async with TrainerClient() as killed:
        await killed.open(folder, LearnerSettings(), seed=0)
        await killed.publish(Version(0, 1))
        async with anyio.create_task_group() as group:
            group.start_soon(_kill_soon, killed.pid)
            with pytest.raises(TrainerError, match="exit code -9"):
                await _fit_for_ever(killed)
        with pytest.raises(TrainerError, match="exit code -9"):
            await killed.exact(random_samples(1))
    assert not psutil.pid_exists(killed.pid)
    assert len(published_by(killed.pid)) == 1
    async with TrainerClient() as trainer:
        await trainer.open(folder, LearnerSettings(), seed=0)
        assert published_by(killed.pid) == []


async def _kill_soon(pid: int) -> None:
    await anyio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)


async def _fit_for_ever(trainer: TrainerClient) -> None:
    while True:
        await trainer.fit(random_samples(50))


PARENT = """
import sys, anyio
from pathlib import Path
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.types import Version
sys.path.insert(0, sys.argv[2])
from trainer_world import random_samples

async def main():
    async with TrainerClient() as trainer:
        await trainer.open(sys.argv[1], LearnerSettings(), seed=0)
        await trainer.publish(Version(0, 1))
        print(trainer.pid, flush=True)
        samples = random_samples(5000)
        while True:
            await trainer.fit(samples)

anyio.run(main)
"""


def test_kill_9_of_the_parent_leaves_no_trainer_and_no_file(folder: Path):
    """Also in the middle of a step, when the process reads nothing."""
    here = str(Path(__file__).parent)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder), here], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    trainer = psutil.Process(int(parent.stdout.readline()))
    assert published_by(trainer.pid)
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    trainer.wait(timeout=20)
    parent.stdout.close()
    assert published_by(trainer.pid) == []


def test_the_client_and_the_buffer_load_no_torch():
    modules = [
        "client",
        "buffer",
        "pacing",
        "credit",
        "settings",
        "samples",
        "advantages",
        "reports",
        "retention",
    ]
    program = "import sys\n" + "".join(f"import sostenuto.trainer.{name}\n" for name in modules)
    program += "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
