"""Whole jobs by other methods than GRPO, with a tiny real model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fakes_training import Parity, ParityByTurn, numbers
from real_jobs import build_weights
from scripted import TINY, children, write_tokenizer_folder
from sostenuto.errors import ConfigError
from sostenuto.runtime.config import RuntimeConfig
from sostenuto.runtime.jobs.events import StepTrained
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.algorithms import GRPO, PPO, Algorithm, DecoupledPPO, Reinforce
from sostenuto.trainer.parts import KL, CriticModel, TurnReturn
from sostenuto.types import Limits, Purpose


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer_folder(tmp_path_factory.mktemp("model"), TINY)
    return build_weights(folder)


def a_job(model: Path, name: str, algorithm: Algorithm) -> RLJob:
    return RLJob(
        name=name, env=Parity, model=model, tasks=numbers(64), steps=2, groups_per_step=2, save_every=1000,
        algorithm=algorithm, limits=Limits(turns=2, turn_tokens=6),
    )  # fmt: skip


async def test_a_run_has_jobs_by_several_methods_one_after_the_other(tmp_path: Path, model: Path):
    before = children()
    methods = {
        "alone": Reinforce(kl=KL(coefficient=0.1, estimator="exact", top_k=8)),
        "decoupled": DecoupledPPO(
            group_size=2, zero_spread="keep", minibatches=2,
            kl=KL(coefficient=0.1, estimator="k3", place="reward"),
        ),
    }  # fmt: skip
    reports: dict[str, list[StepTrained]] = {}
    async with Runtime(RuntimeConfig(directory=tmp_path)) as runtime:
        for name, algorithm in methods.items():
            handle = await runtime.submit(a_job(model, name, algorithm))
            reports[name] = [event async for event in handle.events() if isinstance(event, StepTrained)]
            assert (await handle.result()).ledger.closes
    assert all(step.report.refused == "" for told in reports.values() for step in told)
    # The first step still has the weights of the reference.
    distances = [step.report.kl for step in reports["alone"]]
    assert distances[0] == pytest.approx(0.0, abs=1e-6)
    assert distances[1] is not None
    assert distances[1] > 0
    assert [(step.groups, step.report.samples) for step in reports["alone"]] == [(2, 2), (2, 2)]
    assert [(step.report.kl, step.report.step) for step in reports["decoupled"]] == [(None, 2), (None, 4)]
    assert children() == before


def counts_in(checkpoint: Path | None) -> tuple[int, dict[str, int]]:
    """Optimizer steps of the policy, and what the critic has counted."""
    assert checkpoint is not None
    assert (checkpoint / "critic.safetensors").is_file()
    state = json.loads((checkpoint / "trainer.json").read_text())
    return state["schedule_steps"], state["critic"]


async def test_jobs_of_single_trajectories_with_either_kind_of_critic(tmp_path: Path, model: Path):
    before = children()
    kl = KL(coefficient=0.1, estimator="k3", place="reward")
    methods = {"head": PPO(), "model": PPO(critic=CriticModel(warmup_steps=1), minibatches=2, kl=kl)}
    checkpoints: dict[str, Path | None] = {}
    async with Runtime(RuntimeConfig(directory=tmp_path)) as runtime:
        for name, algorithm in methods.items():
            handle = await runtime.submit(a_job(model, name, algorithm))
            steps = [event async for event in handle.events() if isinstance(event, StepTrained)]
            result = await handle.result()
            assert result.ledger.closes
            checkpoints[name] = result.checkpoint
            reports = [step.report for step in steps]
            assert [(report.refused, step.groups) for report, step in zip(reports, steps, strict=True)] == [
                ("", 2),
                ("", 2),
            ]
            assert all(report.value_loss is not None for report in reports)
    # Both of the first batch's steps were the critic's alone.
    assert counts_in(checkpoints["head"]) == (2, {"batches": 2, "schedule_steps": 2})
    assert counts_in(checkpoints["model"]) == (2, {"batches": 2, "schedule_steps": 4})
    assert children() == before


async def test_what_turns_earned_is_in_the_records_and_is_learnt_from(tmp_path: Path, model: Path):
    algorithm = GRPO(group_size=2, zero_spread="keep", advantage=TurnReturn(gamma=0.9))
    job = replace(a_job(model, "turns", algorithm), env=ParityByTurn)
    async with Runtime(RuntimeConfig(directory=tmp_path)) as runtime:
        handle = await runtime.submit(job)
        steps = [event async for event in handle.events() if isinstance(event, StepTrained)]
        assert (await handle.result()).ledger.closes
    assert [step.report.refused for step in steps] == ["", ""]
    with read_journal(tmp_path / "journal.db") as reader:
        records = [record for record in reader.trajectories(purpose=Purpose.TRAIN) if record.outcome is None]
    assert records
    for record in records:
        assert len(record.turn_rewards) == record.metrics["turns"]
        assert sum(record.turn_rewards) == record.reward
        assert record.turn_rewards[:-1] == tuple(float(turn) for turn in range(len(record.turn_rewards) - 1))


async def test_a_critic_with_another_tokenizer_ends_a_job_before_anything_is_learnt(
    tmp_path: Path, model: Path
):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {f"{text}~": n for text, n in tokenizer["model"]["vocab"].items()}
    tokenizer["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    job = replace(a_job(model, "unlike", PPO(critic=CriticModel())), critic=other)
    async with Runtime(RuntimeConfig(directory=tmp_path / "run")) as runtime:
        handle = await runtime.submit(job)
        told = [event async for event in handle.events() if isinstance(event, StepTrained)]
        with pytest.raises(
            ConfigError, match=rf"critic: the tokenizers of {other} .* and of the policy {model} "
        ):
            await handle.result()
    assert told == []


def test_a_critic_folder_is_for_a_critic_that_is_a_model(model: Path):
    with pytest.raises(ConfigError, match=r'give algorithm\.critic = { kind = "model" }'):
        RLJob(env=Parity, model=model, tasks=numbers(4), steps=1, algorithm=PPO(), critic=model)


def test_a_reference_that_nothing_is_compared_with_is_refused(model: Path):
    with pytest.raises(ConfigError, match=r"give algorithm\.kl"):
        RLJob(env=Parity, model=model, tasks=numbers(4), steps=1, reference=model)


def test_a_reference_that_is_no_folder_is_refused(model: Path, tmp_path: Path):
    kl = GRPO(kl=KL(coefficient=0.1))
    job = RLJob(env=Parity, model=model, tasks=numbers(4), steps=1, algorithm=kl, reference=tmp_path / "no")
    with pytest.raises(ConfigError, match=r"reference: .* is not a folder"):
        job.reference_folder()
