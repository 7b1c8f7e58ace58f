"""Rollouts for a trainer of the user's own, with real processes; the examples are what runs."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fakes_training import Parity, numbers
from real_jobs import build_weights
from scripted import TINY, children, write_tokenizer_folder
from sostenuto.errors import ConfigError
from sostenuto.runtime.config import RuntimeConfig, ToolServerSettings
from sostenuto.runtime.given_weights import GivenWeights
from sostenuto.runtime.jobs.job import RolloutJob
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.tensors import load_tensors, save_tensors
from sostenuto.types import Limits, Version

EXAMPLES = Path(__file__).parents[1] / "examples"
RUN = """
import sys, anyio, json, pathlib
sys.path.insert(0, {examples!r})
import {name} as example
rewards = anyio.run(lambda: example.train(pathlib.Path({directory!r}), steps=8))
print(json.dumps(rewards))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer_folder(tmp_path_factory.mktemp("model"), TINY)
    return build_weights(folder)


def rewards_of(name: str, directory: Path) -> list[float]:
    """What the example has printed last, in a process of its own."""
    code = RUN.format(examples=str(EXAMPLES), name=name, directory=str(directory))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_books(directory: Path, *, trained: int) -> None:
    with read_journal(directory / "journal.db") as reader:
        ledger = reader.ledger().statistics()
    assert ledger.closes
    assert (ledger.running, ledger.sealed) == (0, 0)
    assert ledger.outcomes["trained"] == trained


@pytest.mark.timeout(600)
def test_a_bare_torch_loop_learns(tmp_path: Path):
    rewards = rewards_of("own_trainer", tmp_path)
    assert max(rewards[-2:]) > rewards[0] + 0.3
    assert_books(tmp_path, trained=8 * 4 * 8)


@pytest.mark.timeout(600)
def test_trls_trainer_learns(tmp_path: Path):
    pytest.importorskip("trl")
    rewards = rewards_of("trl_trainer", tmp_path)
    assert max(rewards[-2:]) > rewards[0] + 0.3
    assert_books(tmp_path, trained=8 * 4 * 8)


async def test_weights_are_published_from_tensors_and_from_a_folder_through_the_gate(
    tmp_path: Path, model: Path
):
    before = children()
    config = RuntimeConfig(directory=tmp_path, tool_server=ToolServerSettings(unsafe=True))
    job = RolloutJob(
        env=Parity, model=model, tasks=numbers(16), group_size=2, groups_per_step=1, max_staleness=0,
        limits=Limits(turns=2, turn_tokens=6),
    )  # fmt: skip
    async with Runtime(config) as runtime:
        await _refuses_what_it_cannot_do(runtime, job)
        stream = runtime.rollouts(job)
        first = await anext(stream)
        with pytest.raises(ConfigError, match="are open, and `publish` is theirs"):
            await anext(runtime.rollouts(replace(job, name="second")))
        weights = load_tensors(model / "model.safetensors")
        with pytest.raises(ConfigError, match="has values that are not finite"):
            await runtime.publish({name: tensor * float("nan") for name, tensor in weights.items()})
        assert runtime.ledger.outcomes == {}
        assert (await runtime.publish(weights)).version == Version(0, 2)
        second = await anext(stream)
        assert {v.version for member in second.members for v in member.version_spans} == {Version(0, 2)}
        assert first.id != second.id
        assert (await runtime.publish(str(model))).version == stream.version == Version(0, 3)
        assert runtime.ledger.outcomes["trained"] == 4
        await stream.aclose()
        with pytest.raises(ConfigError, match="the rollouts are closed"):
            await runtime.publish(model)
        again = runtime.rollouts(replace(job, name="second"))
        assert (await anext(again)).id.startswith("second-")
    assert children() == before
    assert_books(tmp_path, trained=4)


async def _refuses_what_it_cannot_do(runtime: Runtime, job: RolloutJob) -> None:
    with pytest.raises(ConfigError, match=r"there are no rollouts; take groups from runtime\.rollouts"):
        await runtime.publish(job.model)
    with pytest.raises(ConfigError, match=r"no field 'group_sise'; did you mean 'group_size'"):
        runtime.rollouts(Parity, model=job.model, tasks=job.tasks, group_sise=3)
    with pytest.raises(ConfigError, match="tasks is missing"):
        runtime.rollouts(Parity, model=job.model)
    with pytest.raises(ConfigError, match="not both"):
        runtime.rollouts(job, model=job.model, tasks=job.tasks)
    with pytest.raises(ConfigError, match="nothing was taken yet"):
        await runtime.rollouts(job).publish(str(job.model))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("less", "more", "message"),
    [
        (NORM, {NORM: 3.0}, "'model.norm.weight' is float; give torch tensors"),
        (NORM, {}, "'model.norm.weight' is missing, 1 in all"),
        (NORM, {"model.nrm.weight": torch.ones(3)}, "no tensor 'model.nrm.weight'; did you mean"),
        (NORM, {NORM: torch.ones(3)}, r"has shape \[3\], the model's has"),
    ],
)
def test_what_cannot_be_the_models_weights_is_refused(
    model: Path, tmp_path: Path, less: str, more: dict[str, object], message: str
):
    given = GivenWeights(model, tmp_path, "float32")
    weights = load_tensors(model / "model.safetensors")
    del weights[less]
    with pytest.raises(ConfigError, match=message):
        given.write({**weights, **more}, Version(0, 1))
    with pytest.raises(ConfigError, match="got dict; give a folder, or tensors by name"):
        given.write({}, Version(0, 1))
    given.close()


def test_tensors_travel_in_the_engines_dtype_and_a_refused_folder_leaves_no_file(model: Path, tmp_path: Path):
    given = GivenWeights(model, tmp_path / "published", "bfloat16")
    weights = load_tensors(model / "model.safetensors")
    manifest = given.write(weights, Version(0, 1))
    assert {entry.dtype for entry in manifest.tensors} == {"bfloat16"}
    other = tmp_path / "other"
    other.mkdir()
    save_tensors({"model.norm.weight": cast("Any", torch).ones(2)}, other / "model.safetensors")
    with pytest.raises(ConfigError, match="has shape"):
        given.write(other, Version(0, 2))
    assert list((tmp_path / "published").iterdir()) == []
    first = Path(given.write(model, Version(0, 3)).path)
    second = Path(given.write(model, Version(0, 4)).path)
    assert (first.exists(), second.exists()) == (False, True)
    given.close()
    assert not second.exists()
    assert not Path(manifest.path).exists()
