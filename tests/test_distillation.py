"""Jobs that learn from teachers: in the trainer, in an engine, several; and those that are refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel

from fakes_training import Number, Parity, numbers
from real_jobs import train
from scripted import TINY, children, write_tokenizer_folder
from sostenuto.errors import ConfigError
from sostenuto.runtime.config import EngineEntry, RuntimeConfig, ToolServerSettings
from sostenuto.runtime.job_file import load_train_file
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.phases import Phase
from sostenuto.runtime.jobs.teacher import Teacher, assigned
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.algorithms import GRPO, OPD, Algorithm, Reinforce
from sostenuto.trainer.build import build
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.parts import Teaching
from sostenuto.trainer.samples import trajectory_samples
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.types import Limits

LIMITS = Limits(turns=2, turn_tokens=6)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tokenizer, three random models."""
    folders: dict[str, Path] = {}
    for seed, name in enumerate(("student", "even", "odd"), 1):
        folders[name] = write_tokenizer_folder(tmp_path_factory.mktemp(name), TINY)
        build(folders[name], seed)
    return folders


def a_job(models: dict[str, Path], algorithm: Algorithm, *teachers: Teacher, **changes: object) -> RLJob:
    job = RLJob(
        name="taught", env=Parity, model=models["student"], tasks=numbers(16), steps=2, groups_per_step=4,
        algorithm=algorithm, limits=LIMITS, teachers=teachers, seed=1,
    )  # fmt: skip
    return replace(job, **changes) if changes else job


async def test_two_teachers_one_an_engine_and_one_in_the_trainer_each_for_its_own_tasks(
    tmp_path: Path, models: dict[str, Path]
):
    """What the engine has said is what the same model says in the trainer, token by token."""
    before = children()
    even = Teacher(
        name="even", model=models["even"], tasks={"number": list(range(0, 16, 2))}, place="engine",
    )  # fmt: skip
    job = a_job(models, OPD(), even, Teacher(name="odd", model=models["odd"]))
    steps, records = await train(tmp_path, job)
    assert children() == before
    assert [step.report.samples for step in steps] == [4, 4]
    # Random models are far from each other.
    assert all(step.report.teacher_kl is not None and step.report.teacher_kl > 0.01 for step in steps)
    assert all(step.report.grad_norm > 0 for step in steps)
    assert {record.teacher for record in records} == {"even", "odd"}
    by_engine = [record for record in records if record.teacher == "even"]
    assert all(len(record.taught) == len(record.sequences) for record in by_engine)
    assert not any(record.taught for record in records if record.teacher == "odd")
    async with TrainerClient() as trainer:
        await trainer.open(models["even"], LearnerSettings(), seed=1)
        samples = [sample for record in by_engine for sample in trajectory_samples(record, 0.0)]
        wanted = await trainer.logprobs(samples)
    for sample, logprobs in zip(samples, wanted, strict=True):
        assert sample.extras["teacher"] == pytest.approx(logprobs, abs=1e-4, nan_ok=True)
        assert np.isfinite(sample.extras["teacher"]).tolist() == sample.mask.tolist()


async def test_whole_distributions_of_an_engine_over_its_likeliest_tokens_beside_rewards(
    tmp_path: Path, models: dict[str, Path]
):
    teaching = Teaching(signal="distribution", top_k=4, coefficient=0.5)
    algorithm = GRPO(group_size=2, zero_spread="keep", teaching=teaching)
    teacher = Teacher(model=models["even"], place="engine")
    steps, records = await train(tmp_path, a_job(models, algorithm, teacher, steps=1))
    (step,) = steps
    assert step.report.samples == 8
    assert step.report.teacher_kl is not None
    assert step.report.teacher_kl > 0.01
    for taught in (taught for record in records for taught in record.taught if taught):
        assert taught.top_ids is not None
        assert taught.top_ids.shape == (len(taught.logprobs), 4)


async def test_a_teacher_with_another_tokenizer_is_refused_before_anything_runs(
    tmp_path: Path, models: dict[str, Path]
):
    stranger = write_tokenizer_folder(tmp_path / "stranger", TINY)
    tokenizer = json.loads((stranger / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (stranger / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = RuntimeConfig(directory=tmp_path / "run", tool_server=ToolServerSettings(unsafe=True))
    async with Runtime(config) as runtime:
        with pytest.raises(ConfigError) as refused:
            await runtime.submit(a_job(models, OPD(), Teacher(name="math", model=stranger)))
    assert str(stranger / "tokenizer.json") in str(refused.value)
    assert str(models["student"] / "tokenizer.json") in str(refused.value)
    assert "teachers: math" in str(refused.value)


async def test_a_teacher_first_and_then_rewards_in_one_job(tmp_path: Path, models: dict[str, Path]):
    """What was sampled before a phase began is learnt by the method of the step that uses it."""
    rewards = Phase(from_step=2, algorithm=GRPO(group_size=4, zero_spread="keep"))
    job = a_job(
        models, OPD(group_size=4), Teacher(model=models["even"]), groups_per_step=2, phases=(rewards,),
    )  # fmt: skip
    steps, records = await train(tmp_path, job)
    taught, rewarded = steps
    assert taught.report.teacher_kl is not None
    assert rewarded.report.teacher_kl is None
    assert [step.report.samples for step in steps] == [8, 8]
    assert all(record.teacher == "teacher" for record in records)


@pytest.mark.parametrize(
    ("phases", "wrong"),
    [
        ((Phase(from_step=1, algorithm=OPD(group_size=4)),), r"begin at steps \[1\] of 2; .* from 2 on"),
        ((Phase(from_step=3, algorithm=OPD(group_size=4)),), r"begin at steps \[3\] of 2"),
        ((Phase(from_step=2, algorithm=OPD()),), "group_size is 1 and algorithm has 4"),
        (
            (Phase(from_step=2, algorithm=GRPO(group_size=4)),),
            "zero_spread is 'skip' and algorithm has 'keep'",
        ),
    ],
)
def test_phases_that_cannot_follow_each_other_are_refused(
    models: dict[str, Path], phases: tuple[Phase, ...], wrong: str
):
    with pytest.raises(ConfigError, match=wrong):
        a_job(models, OPD(group_size=4), Teacher(model="m"), phases=phases)


class Question(BaseModel):
    domain: str
    level: int = 0


def test_a_task_belongs_to_the_first_teacher_that_claims_it():
    teachers = (
        Teacher(name="rest", model="m"),
        Teacher(name="math", model="m", tasks={"domain": "math"}),
        Teacher(name="hard", model="m", tasks={"domain": ["code", "math"], "level": 3}),
        Teacher(name="shell", model="m", environment="Shell"),
    )
    assert assigned(teachers, "Ask", {"domain": "math", "level": 3}).name == "math"
    assert assigned(teachers, "Ask", {"domain": "code", "level": 3}).name == "hard"
    assert assigned(teachers, "Ask", {"domain": "code", "level": 1}).name == "rest"
    assert assigned(teachers, "Shell", {}).name == "shell"
    with pytest.raises(ConfigError, match=r"none of math is for a task of Ask with \{'domain': 'law'\}"):
        assigned(teachers[1:2], "Ask", {"domain": "law"})


@pytest.mark.parametrize(
    ("algorithm", "teachers", "wrong"),
    [
        (OPD(), (), "opd learns from a teacher, and there is none"),
        (GRPO(), (Teacher(model="m"),), "nothing is learnt from them; give algorithm.teaching"),
        (OPD(), (Teacher(model="m"), Teacher(model="n")), "the name 'teacher' is there twice"),
        (OPD(), (Teacher(model="m", tasks={"numbr": 1}),), "no task has a field 'numbr'; .*number"),
        (OPD(), (Teacher(model="m", tasks={"number": 1}),), "none of teacher is for a task of Parity"),
        (
            OPD(teaching=Teaching(signal="distribution")),
            (Teacher(model="m", place="engine"),),
            "an engine gives no whole distributions; give algorithm.teaching.top_k",
        ),
        (
            OPD(temperature=0.8),
            (Teacher(model="m", place="engine", engine=EngineEntry(kind="vllm", url="http://far:1")),),
            "vllm scores at temperature 1 alone",
        ),
    ],
)
def test_what_no_teacher_can_do_is_refused_at_once(
    models: dict[str, Path], algorithm: Algorithm, teachers: tuple[Teacher, ...], wrong: str
):
    with pytest.raises(ConfigError, match=wrong):
        a_job(models, algorithm, *teachers)


def test_an_engine_is_of_a_teacher_that_is_one():
    with pytest.raises(ConfigError, match="give place = 'engine'"):
        Teacher(model="m", engine=EngineEntry(kind="sglang", url="http://far:1"))


async def test_a_file_names_teachers(tmp_path: Path, models: dict[str, Path]):
    file = tmp_path / "job.toml"
    file.write_text(f"""
        environment = "fakes_training:Parity"
        model = "{models["student"]}"
        steps = 3
        tasks = {{ factory = "fakes_training:numbers", arguments = {{ count = 4 }} }}
        algorithm = {{ method = "opd", teaching = {{ bound = 5 }} }}

        [[phases]]
        from_step = 3
        algorithm = {{ method = "reinforce" }}

        [[teachers]]
        name = "even"
        model = "{models["even"]}"
        tasks = {{ number = [0, 2] }}

        [[teachers]]
        name = "rest"
        model = "{models["odd"]}"
        place = "engine"
        engine = {{ kind = "sglang", url = "http://gpu-2:30000" }}
    """)
    job = await load_train_file(file).job()
    assert [teacher.name for teacher in job.teachers] == ["even", "rest"]
    assert job.teachers[1].engine.url == "http://gpu-2:30000"
    assert job.algorithm.teaching == Teaching(bound=5)
    assert [type(job.algorithm_at(step)) for step in (1, 2, 3)] == [OPD, OPD, Reinforce]
    assert assigned(job.teachers, "Parity", Number(number=2).model_dump()).name == "even"
