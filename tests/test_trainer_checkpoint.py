import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sostenuto.errors import ConfigError, TrainerError
from sostenuto.trainer.algorithms import GRPO, SFT
from sostenuto.trainer.checkpoint import restore_checkpoint, save_checkpoint
from sostenuto.trainer.learner import Learner
from sostenuto.trainer.model import load_policy
from sostenuto.trainer.retention import checkpoints, replacing
from sostenuto.types import Version
from trainer_world import V0, learner, random_samples, write_model

SETTINGS: dict[str, Any] = {
    "schedule": {"learning_rate": 1e-2, "shape": "cosine", "total_steps": 9, "warmup_steps": 2},
    "weight_decay": 0.1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def state(subject: Learner) -> dict[str, torch.Tensor]:
    moments = subject.optimizer.tensors()
    return {
        **subject.policy.module.state_dict(),
        **{f"optimizer.{key}": value for key, value in moments.items()},
    }


def go_on(subject: Learner, steps: int) -> None:
    for step in range(steps):
        samples = random_samples(5, seed=step)
        if step % 2:
            subject.learn(samples, GRPO())
        else:
            subject.fit(samples, SFT())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_the_same_to_the_last_bit(tmp_path: Path, folder: Path, dtype: str):
    straight = learner(folder, seed=3, dtype=dtype, **SETTINGS)
    go_on(straight, 3)
    path = save_checkpoint(straight, tmp_path, Version(0, 3), source=folder)
    straight.name(Version(0, 3))
    go_on(straight, 3)

    resumed = Learner(load_policy(path, dtype), straight.settings, seed=0, version=V0)
    assert restore_checkpoint(resumed, path) == resumed.version == resumed.newest == Version(0, 3)
    assert (resumed.step, resumed.seed, resumed.optimizer.steps) == (3, 3, 3)
    go_on(resumed, 3)
    expected = state(straight)
    assert state(resumed).keys() == expected.keys()
    for name, value in state(resumed).items():
        assert torch.equal(value, expected[name]), name


def test_a_checkpoint_is_a_hugging_face_folder_with_tokenizer_and_template(tmp_path: Path, folder: Path):
    subject = learner(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    path = save_checkpoint(subject, tmp_path, Version(1, 2), source=folder)
    assert path.name == "version-1.2"
    names = {file.name for file in path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} < names
    assert (path / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((path / "trainer.json").read_text())["version"] == "1.2"
    again = load_policy(path, "float32").module.state_dict()
    for name, value in subject.policy.module.state_dict().items():
        assert torch.equal(value, again[name]), name


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, folder: Path):
    subject = learner(folder, keep_checkpoints=2)
    for number in (8, 9, 10):
        save_checkpoint(subject, tmp_path, Version(0, number), source=folder)
    assert [version for version, _ in checkpoints(tmp_path)] == [Version(0, 9), Version(0, 10)]


def test_a_save_that_breaks_leaves_the_old_checkpoint_and_no_part(tmp_path: Path):
    target = tmp_path / "version-0.1"
    with replacing(target) as part:
        (part / "x").write_text("old")
    with pytest.raises(FileNotFoundError), replacing(target) as part:
        (part / "missing" / "x").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["version-0.1"]
    assert (target / "x").read_text() == "old"
    with replacing(target) as part:
        (part / "x").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["version-0.1"]
    assert (target / "x").read_text() == "new"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, folder: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainerError, match=r"checkpoint .*file/version-0\.1, about \d+ bytes needed"):
        save_checkpoint(learner(folder), tmp_path / "file", Version(0, 1), source=folder)


def test_a_checkpoint_of_another_model_or_none_is_refused(tmp_path: Path, folder: Path):
    other = learner(write_model(tmp_path / "other", layers=1))
    path = save_checkpoint(other, tmp_path, Version(0, 1), source=tmp_path / "other")
    with pytest.raises(ConfigError, match="weights of another model"):
        restore_checkpoint(learner(folder), path)
    with pytest.raises(ConfigError, match=r"no trainer\.json"):
        restore_checkpoint(other, folder)
