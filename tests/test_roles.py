"""Several roles in the episodes of an agent: trained or not, the policy's or a model's of their own."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from typing import cast as cast_to

import numpy as np
import pytest

from fakes_agents import debates, questions
from fakes_training import Parity, numbers
from real_jobs import train
from scripted import TINY, children, write_tokenizer_folder
from sostenuto.errors import ConfigError
from sostenuto.records import Producer, Trajectory, validate
from sostenuto.runtime.config import EngineEntry
from sostenuto.runtime.job_file import load_train_file
from sostenuto.runtime.jobs.job import EvalJob, RLJob
from sostenuto.runtime.jobs.roles import Role
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.roles_opened import open_roles
from sostenuto.trainer.algorithms import GRPO
from sostenuto.trainer.build import build
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.samples import Sample, trajectory_samples
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.types import Limits


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders: dict[str, Path] = {}
    for seed, name in enumerate(("policy", "rival"), 1):
        folders[name] = write_tokenizer_folder(tmp_path_factory.mktemp(name), TINY)
        build(folders[name], seed)
    return folders


def cast(rival: Path) -> tuple[Role, ...]:
    return (
        Role(name="critic", trained=False, temperature=0.5),
        Role(name="editor"),
        Role(name="rival", trained=False, model=rival),
    )


def a_job(models: dict[str, Path], roles: tuple[Role, ...]) -> RLJob:
    return RLJob(
        env=debates, model=models["policy"], tasks=questions(8), steps=1, groups_per_step=2,
        seed=1, roles=roles,
        algorithm=GRPO(group_size=2, zero_spread="keep"), limits=Limits(turns=8, turn_tokens=5),
    )  # fmt: skip


async def logprobs(folder: Path, samples: list[Sample], temperature: float) -> list[np.ndarray]:
    async with TrainerClient() as trainer:
        await trainer.open(folder, LearnerSettings(), seed=1)
        return [np.asarray(found) for found in await trainer.logprobs(samples, temperature)]


def as_sample(record: Trajectory, role: str) -> Sample:
    """The one sequence of a role, as if what was said in it were trained."""
    (sequence,) = [s for s, said in zip(record.sequences, record.roles, strict=True) if said == role]
    policy = [np.full(len(span), span.producer is Producer.POLICY) for span in sequence]
    ids = np.concatenate([span.token_ids for span in sequence])
    told = np.concatenate([span.logprobs for span in sequence])
    return Sample(ids, np.concatenate(policy), told, np.zeros(len(ids), np.float32))


async def test_each_role_has_its_conversations_and_only_those_that_are_trained_have_tokens_to_train(
    tmp_path: Path, models: dict[str, Path]
):
    before = children()
    steps, records = await train(tmp_path, a_job(models, cast(models["rival"])))
    records = [record for record in records if record.reward is not None]
    assert children() == before
    assert len(records) >= 4
    for record in records:
        validate(record)
        assert sorted(record.roles) == ["", "critic", "editor", "rival"]
        trained = {
            role: sum(int(span.mask.sum()) for span in sequence)
            for role, sequence in zip(record.roles, record.sequences, strict=True)
        }
        assert trained["critic"] == trained["rival"] == 0
        assert min(trained[""], trained["editor"]) > 0
        assert record.metrics["turns"] == 5
        assert [record.metrics[f"turns_{role}"] for role in ("critic", "editor", "rival")] == [1, 1, 1]
        # One member, one vote, whatever it consists of.
        samples = trajectory_samples(record, 1.0)
        assert len(samples) == 2
        assert sum(sample.masked_tokens for sample in samples) == trained[""] + trained["editor"]
    assert [step.report.samples for step in steps] == [2 * 2 * 2]
    assert steps[0].report.max_abs_dlogp is not None
    assert steps[0].report.max_abs_dlogp < 1e-4
    # Who spoke is who was asked for, each at its own temperature.
    first = records[:4]
    for role, model, temperature in (("rival", "rival", 1.0), ("editor", "policy", 1.0)):
        samples = [as_sample(record, role) for record in first]
        for sample, found in zip(samples, await logprobs(models[model], samples, temperature), strict=True):
            np.testing.assert_allclose(sample.logprobs[sample.mask], found[sample.mask], atol=1e-4)
    others = [as_sample(record, "rival") for record in first]
    wrong = await logprobs(models["policy"], others, 1.0)
    assert any(
        np.abs(sample.logprobs[sample.mask] - found[sample.mask]).max() > 0.1
        for sample, found in zip(others, wrong, strict=True)
    )


async def test_a_model_of_another_tokenizer_or_chat_format_cannot_speak(
    tmp_path: Path, models: dict[str, Path]
):
    for number, change in enumerate(("tokenizer.json", "chat_template.jinja")):
        stranger = tmp_path / str(number)
        shutil.copytree(models["rival"], stranger)
        if change == "tokenizer.json":
            tokenizer = json.loads((stranger / change).read_text())
            vocabulary = tokenizer["model"]["vocab"]
            one, other = list(vocabulary)[300:302]
            vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
            (stranger / change).write_text(json.dumps(tokenizer))
        else:
            (stranger / change).write_text("{{ messages[0].content }}")
        what = "tokenizer.json" if number == 0 else "chat template"
        policy, nobody = ModelFolder.open(models["policy"]), cast_to("Any", None)
        opening = open_roles(cast(stranger), nobody, nobody, job="job", policy=policy)
        with pytest.raises(ConfigError, match=f"roles: rival: the {what} of .* call that model itself"):
            await opening.__aenter__()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Role(name="default"), "'default' cannot be a name"),
        (lambda: Role(name="a b"), "'a b' cannot be a name"),
        (lambda: Role(name="a", model="."), "model and temperature are of a role that is not trained"),
        (lambda: Role(name="a", temperature=1.0), "give trained = false"),
        (lambda: Role(name="a", trained=False, temperature=-1.0), "temperature is -1"),
        (
            lambda: Role(name="a", trained=False, engine=EngineEntry(threads=2)),
            "engine is given without a model",
        ),
        (lambda: a_job({"policy": Path()}, (Role(name="a"), Role(name="a"))), "the name 'a' is there twice"),
        (
            lambda: replace(a_job({"policy": Path()}, (Role(name="a"),)), env=Parity, tasks=numbers(2)),
            "turns are driven has one speaker; give an agent",
        ),
        (
            lambda: EvalJob(env=Parity, model=".", tasks=numbers(1), roles=(Role(name="a"),)),
            "turns are driven has one speaker",
        ),
    ],
)  # fmt: skip
def test_roles_that_cannot_be_meant_are_refused(make: Callable[[], object], said: str):
    with pytest.raises(ConfigError, match=said):
        make()


async def test_a_job_file_has_them(tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_text(
        f"""
        environment = "fakes_agents:debates"
        model = "{tmp_path}"
        steps = 1
        [tasks]
        factory = "fakes_agents:questions"
        arguments = {{ count = 3 }}
        [[roles]]
        name = "editor"
        [[roles]]
        name = "rival"
        trained = false
        model = "{tmp_path}"
        engine = {{ kind = "vllm", url = "http://gpu-2:8000" }}
        """
    )
    found = (await load_train_file(path).job()).roles
    vllm = EngineEntry(kind="vllm", url="http://gpu-2:8000")
    assert found == (
        Role(name="editor"), Role(name="rival", trained=False, model=tmp_path, engine=vllm),
    )  # fmt: skip
