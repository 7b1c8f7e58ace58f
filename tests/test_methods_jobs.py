"""Whole jobs by other methods than GRPO, with a tiny real model."""

import subprocess
import sys
from pathlib import Path

import pytest

from fakes_training import Parity, numbers
from scripted import TINY, children, write_tokenizer_folder
from sostenuto.errors import ConfigError
from sostenuto.runtime.config import RuntimeConfig
from sostenuto.runtime.jobs.events import StepTrained
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.algorithms import GRPO, Algorithm, DecoupledPPO, Reinforce
from sostenuto.trainer.parts import KL
from sostenuto.types import Limits


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer_folder(tmp_path_factory.mktemp("model"), TINY)
    command = [sys.executable, "-m", "sostenuto.trainer.build", "--folder", str(folder), "--seed", "1"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


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


def test_a_reference_that_nothing_is_compared_with_is_refused(model: Path):
    with pytest.raises(ConfigError, match=r"give algorithm\.kl"):
        RLJob(env=Parity, model=model, tasks=numbers(4), steps=1, reference=model)


def test_a_reference_that_is_no_folder_is_refused(model: Path, tmp_path: Path):
    kl = GRPO(kl=KL(coefficient=0.1))
    job = RLJob(env=Parity, model=model, tasks=numbers(4), steps=1, algorithm=kl, reference=tmp_path / "no")
    with pytest.raises(ConfigError, match=r"reference: .* is not a folder"):
        job.reference_folder()
