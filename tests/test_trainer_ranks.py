"""Several processes that train one model, against one."""

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sostenuto.errors import ConfigError, RecordError, TrainerError
from sostenuto.trainer.algorithms import GRPO, PPO
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.parts import Critic, CriticHead, CriticModel
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.trainer.ranks import Ranks
from sostenuto.trainer.reports import StepReport
from sostenuto.trainer.samples import Sample
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.types import Version
from trainer_world import V0, random_samples, write_model

# Ranks wait for each other busily, which takes its time where others want the processors.
pytestmark = pytest.mark.timeout(900)
SETTINGS = {
    "schedule": {"learning_rate": 1e-3}, "weight_decay": 0.1, "clip_norm": 0.5, "microbatch_tokens": 40,
}  # fmt: skip
STEPS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), layers=3)


@asynccontextmanager
async def trainer(
    folder: Path, processes: int, directory: Path, critic: Critic | None = None, **settings: object
) -> AsyncGenerator[TrainerClient]:
    chosen = LearnerSettings.model_validate(
        {**SETTINGS, "publication": {"directory": str(directory)}, **settings}
    )
    async with TrainerClient(processes=processes) as client:
        await client.open(folder, chosen, seed=0, version=V0, critic=critic)
        yield client


def batch(step: int) -> list[Sample]:
    """Of other weights, so that the ratio counts; every third one is too small for two ranks."""
    count = 1 if step % 3 == 2 else 9
    return [replace(sample, version=Version(0, -1)) for sample in random_samples(count, seed=step)]


def tensors(manifest: Manifest) -> dict[str, np.ndarray]:
    content = Path(manifest.path).read_bytes()
    return {
        entry.name: np.frombuffer(content, np.float32, entry.nbytes // 4, entry.offset)
        for entry in manifest.tensors
    }


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 5))
def test_each_sequence_is_of_one_rank_and_no_rank_has_more_than_one_too_many(lengths: list[int], count: int):
    shares = Ranks(0, count).shares(lengths)
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    tokens = [sum(lengths[index] for index in share) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


async def test_two_processes_learn_what_one_learns_and_each_goes_on_from_the_others_checkpoint(
    tmp_path: Path, folder: Path
):
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(trainer(folder, 1, tmp_path))
        two = await stack.enter_async_context(trainer(folder, 2, tmp_path))
        for step in range(STEPS):
            expected, found = await one.learn(batch(step), GRPO()), await two.learn(batch(step), GRPO())
            assert found.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-7)
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
            assert found.entropy == pytest.approx(expected.entropy, rel=1e-5)
            assert (found.step, found.masked_tokens, found.refused) == (step + 1, expected.masked_tokens, "")
        for mine, theirs in zip(await two.logprobs(batch(0)), await one.logprobs(batch(0)), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        weights = tensors(await two.publish(Version(0, 1)))
        single = tensors(await one.publish(Version(0, 1)))
        assert weights.keys() == single.keys()
        for name, value in weights.items():
            np.testing.assert_allclose(value, single[name], rtol=1e-3, atol=1e-4, err_msg=name)
        path = await two.save(tmp_path / "of-two", Version(0, 1))
        assert "FSDP" not in (path / "config.json").read_text()
        await one.restore(path)
        again = await one.save(tmp_path / "of-one", Version(0, 1))
        expected, found = await one.learn(batch(0), GRPO()), await two.learn(batch(0), GRPO())
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        await two.restore(again)
        back = await two.learn(batch(0), GRPO())
        assert back.loss == pytest.approx(expected.loss, rel=1e-5)
        assert back.step == STEPS + 1


async def test_what_one_refuses_all_refuse_and_go_on(tmp_path: Path, folder: Path):
    async with trainer(folder, 2, tmp_path, dtype="bfloat16", activation_checkpointing="always") as client:
        with pytest.raises(RecordError):
            await client.learn(random_samples(3, texts=200), GRPO())
        wild = [replace(sample, advantages=np.full(len(sample), 3e38, np.float32)) for sample in batch(0)]
        assert (await client.learn(wild, GRPO())).refused
        report = await client.learn(batch(0), GRPO())
        assert (report.step, report.refused) == (1, "")


LORA = {"rank": 4, "alpha": 8}


async def test_lora_of_two_processes_is_that_of_one_in_either_ones_checkpoint(tmp_path: Path, folder: Path):
    pytest.importorskip("peft", reason="the peft package is not installed: sostenuto[lora]")
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(trainer(folder, 1, tmp_path, lora=LORA))
        two = await stack.enter_async_context(trainer(folder, 2, tmp_path, lora=LORA))
        for step in range(STEPS):
            expected, found = await one.learn(batch(step), GRPO()), await two.learn(batch(step), GRPO())
            assert found.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-7)
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        weights = tensors(await two.publish(Version(0, 1)))
        for name, value in tensors(await one.publish(Version(0, 1))).items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
        await one.restore(await two.save(tmp_path / "of-two", Version(0, 1)))
        expected, found = await one.learn(batch(0), GRPO()), await two.learn(batch(0), GRPO())
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        await two.restore(await one.save(tmp_path / "of-one", Version(0, 2)))
        expected, found = await one.learn(batch(1), GRPO()), await two.learn(batch(1), GRPO())
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)


@pytest.mark.parametrize("critic", [CriticHead(coefficient=0.1, warmup_steps=1), CriticModel(warmup_steps=1)])
async def test_a_critic_of_two_processes_is_that_of_one_in_either_ones_checkpoint(
    tmp_path: Path, folder: Path, critic: Critic
):
    method = PPO(critic=critic, minibatches=2)

    async def learn(client: TrainerClient, step: int) -> tuple[StepReport, np.ndarray]:
        samples = batch(step)
        values = await client.values(samples)
        told = [
            replace(
                sample,
                extras={
                    "value": known,
                    "return": np.where(sample.mask, known + 0.5, np.nan).astype(np.float32),
                },
            )
            for sample, known in zip(samples, values, strict=True)
        ]
        return await client.learn(told, method), np.concatenate(values)

    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(trainer(folder, 1, tmp_path, critic))
        two = await stack.enter_async_context(trainer(folder, 2, tmp_path, critic))

        async def agree(step: int) -> None:
            (expected, wanted), (found, values) = await learn(one, step), await learn(two, step)
            np.testing.assert_allclose(values, wanted, rtol=1e-4, atol=1e-5)
            assert found.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
            assert found.value_loss == pytest.approx(expected.value_loss, rel=1e-5)
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3, abs=1e-6)

        for step in range(5):
            await agree(step)
        await one.restore(await two.save(tmp_path / "of-two", Version(0, 1)))
        await agree(5)
        await two.restore(await one.save(tmp_path / "of-one", Version(0, 2)))
        await agree(6)


async def gone(processes: list[psutil.Process]) -> None:
    with anyio.fail_after(300):
        for one in processes:
            while one.is_running() and one.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
                await anyio.sleep(0.05)


@pytest.mark.parametrize("victim", ["first", "other"])
async def test_when_one_is_killed_all_end_and_the_next_call_says_so(
    tmp_path: Path, folder: Path, victim: str
):
    async with trainer(folder, 2, tmp_path) as client:
        first = psutil.Process(client.pid)
        (other,) = first.children()
        os.kill(first.pid if victim == "first" else other.pid, signal.SIGKILL)
        await gone([first, other])
        with pytest.raises(TrainerError, match="trainer process"):
            await client.learn(batch(0), GRPO())


def test_no_processes_are_no_trainer():
    with pytest.raises(ConfigError, match="processes must be at least 1, not 0"):
        TrainerClient(processes=0)
