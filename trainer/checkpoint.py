"""Checkpoints: a Hugging Face folder that anything can load, plus what a bit-exact resume needs.

    config.json, model.safetensors      as transformers writes them
    tokenizer and template files        copied from the folder the model came from
    trainer.safetensors, trainer.json   moments, master weights, random state; step, version, schedule
    adapter/                            with LoRA: the small matrices, in PEFT's format
    critic.safetensors                  where there is one: its weights, moments and master weights
    draft/                              where a draft model learns along: its folder, without its moments
    checksums.json                      of every file

A folder appears under its name complete, or not at all, and is read only when it is as it was written.
What a job has to remember beside its weights (`notes`) lies in it too.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from sostenuto.errors import ConfigError, TrainerError
from sostenuto.trainer.checksums import SUMS, seal
from sostenuto.trainer.critic import Critic
from sostenuto.trainer.drafter import Drafter
from sostenuto.trainer.learner import Learner
from sostenuto.trainer.lora import FOLDER
from sostenuto.trainer.model import load_policy
from sostenuto.trainer.retention import JOB_NOTES, check_checkpoint, checkpoint_path, replacing, retain
from sostenuto.trainer.settings import Schedule
from sostenuto.trainer.tensors import load_tensors, save_tensors
from sostenuto.types import Version

_STATE, _TENSORS = "trainer.json", "trainer.safetensors"
_CRITIC = "critic.safetensors"
_DRAFT = "draft"
_RANDOM = "random_state"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".index.json")


def save_checkpoint(
    learner: Learner,
    root: Path,
    version: Version,
    *,
    source: Path,
    drafter: Drafter | None = None,
    notes: Mapping[str, bytes] | None = None,
) -> Path:
    """Write `root`/version-E.N and remove old ones.  TrainerError names the path on a full disk.

    `notes`: files that are to be in it, by name.
    """
    path = checkpoint_path(root, version)
    # Gathered by all ranks, written by one.
    weights, tensors = learner.policy.state(), _tensors(learner)
    adapter, critic = learner.policy.adapter, learner.critic
    small = {} if adapter is None else adapter.tensors()
    judged = {} if critic is None else critic.tensors()
    if learner.ranks.index:
        return path
    try:
        with replacing(path) as part:
            _copy_companions(source, part)
            learner.policy.save(part, weights)
            if adapter is not None:
                adapter.save(part / FOLDER, small)
            save_tensors(tensors, part / _TENSORS)
            (part / _STATE).write_text(json.dumps(_state(learner, version), indent=1))
            if critic is not None:
                save_tensors(judged, part / _CRITIC)
            if drafter is not None:
                (part / _DRAFT).mkdir()
                _copy_companions(drafter.source, part / _DRAFT)
                drafter.model.save(part / _DRAFT)
            for name, content in (notes or {}).items():
                (part / name).write_bytes(content)
            seal(part)
    except (OSError, SafetensorError) as error:
        needed = sum(t.nbytes for t in tensors.values()) + weight_bytes(learner)
        raise TrainerError(
            f"checkpoint {path}, about {needed} bytes needed: {error}; free some of the disk, "
            "those before it are as they were"
        ) from error
    retain(root, learner.settings.keep_checkpoints)
    return path


def restore_checkpoint(learner: Learner, path: Path, *, drafter: Drafter | None = None) -> Version:
    """Put `learner`, which holds a model of the same shape, where the saved one was.

    A draft model gets the saved weights, if some were; it changes nothing of what is learnt.
    """
    if not (path / _STATE).is_file():
        raise ConfigError(f"checkpoint {path}: no {_STATE}; name a folder that `save` has written")
    check_checkpoint(path)
    state = cast("dict[str, Any]", json.loads((path / _STATE).read_text()))
    _load_weights(learner, path, state)
    if drafter is not None and (path / _DRAFT).is_dir():
        drafter.restore(path / _DRAFT, learner.settings.dtype)
    tensors = load_tensors(path / _TENSORS)
    torch.set_rng_state(tensors.pop(_RANDOM))
    learner.optimizer.load(tensors, Schedule.model_validate(state["schedule"]), state["schedule_steps"])
    if learner.critic is not None:
        _restore_critic(learner.critic, path, state.get("critic"))
    learner.step, learner.seed = state["step"], state["seed"]
    learner.version = learner.newest = Version.parse(state["version"])
    return learner.version


def weight_bytes(learner: Learner) -> int:
    return sum(parameter.nbytes for parameter in learner.policy.module.parameters())


def _state(learner: Learner, version: Version) -> dict[str, Any]:
    return {
        "version": str(version),
        "step": learner.step,
        "seed": learner.seed,
        "schedule": learner.optimizer.schedule.model_dump(mode="json"),
        "schedule_steps": learner.optimizer.steps,
        "base": None if learner.policy.adapter is None else learner.policy.adapter.base,
        **({"critic": learner.critic.counts()} if learner.critic else {}),
    }


def _tensors(learner: Learner) -> dict[str, Tensor]:
    return {**learner.optimizer.tensors(), _RANDOM: torch.get_rng_state()}


def _restore_critic(critic: Critic, path: Path, counts: dict[str, int] | None) -> None:
    if counts is None or not (path / _CRITIC).is_file():
        raise ConfigError(
            f"checkpoint {path}: it has no critic; go on from one of a method with a critic, or without one"
        )
    try:
        critic.load(load_tensors(path / _CRITIC), counts)
    except RuntimeError as error:
        raise ConfigError(f"checkpoint {path}: a critic of another shape: {error}") from error


def _load_weights(learner: Learner, path: Path, state: dict[str, Any]) -> None:
    adapter = learner.policy.adapter
    if adapter is not None:
        if state.get("base") != adapter.base:
            raise ConfigError(
                f"checkpoint {path}: it was saved beside other frozen weights; open the trainer with the "
                "folder that its run began with"
            )
        adapter.load(path / FOLDER)
        return
    # Through transformers, which may keep weights in memory otherwise than on disk.
    saved = load_policy(path, learner.settings.dtype)
    try:
        learner.policy.load(saved.module.state_dict())
    except RuntimeError as error:
        raise ConfigError(f"checkpoint {path}: weights of another model: {error}") from error


def _copy_companions(source: Path, target: Path) -> None:
    """Tokenizer, chat template and whatever else stands next to the weights, but no weights and no state."""
    for path in source.iterdir():
        ours = path.name in {_STATE, _TENSORS, SUMS, JOB_NOTES, "config.json", "generation_config.json"}
        if path.is_file() and not ours and not path.name.endswith(_WEIGHTS):
            shutil.copy2(path, target / path.name)
