"""Learning small matrices beside frozen weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from engine_models import Desk, make_core, make_folder, prompt
from sostenuto.errors import ConfigError
from sostenuto.runtime.engines.wire import CommitRequest
from sostenuto.trainer.algorithms import GRPO, SFT
from sostenuto.trainer.checkpoint import restore_checkpoint, save_checkpoint
from sostenuto.trainer.learner import Learner
from sostenuto.trainer.model import load_policy, open_policy
from sostenuto.trainer.publication.shared_memory import SharedMemorySender
from sostenuto.trainer.publication.snapshot import unique_tensors
from sostenuto.trainer.samples import demonstration
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.types import Version
from trainer_world import V0, learner, random_samples, write_model

pytest.importorskip("peft", reason="the peft package is not installed: sostenuto[lora]")
SETTINGS: dict[str, Any] = {"lora": {"rank": 2, "alpha": 8.0}, "schedule": {"learning_rate": 1e-2}}
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def weights(subject: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in subject.policy.state().items()}


def go_on(subject: Learner, steps: int) -> None:
    for step in range(steps):
        samples = random_samples(5, seed=step)
        report = subject.learn(samples, GRPO()) if step % 2 else subject.fit(samples, SFT())
        assert not report.refused


@DTYPES
def test_the_first_version_is_the_base_model_and_only_adapted_layers_move(folder: Path, dtype: str):
    base = load_policy(folder, dtype).state()
    subject = learner(folder, dtype=dtype, **SETTINGS)
    first = weights(subject)
    assert first.keys() == base.keys()
    assert all(torch.equal(first[name], value) for name, value in base.items())
    go_on(subject, 3)
    moved = {name for name, value in weights(subject).items() if not torch.equal(value, base[name])}
    assert moved == {name for name in base if name.endswith("_proj.weight")}


def test_a_step_is_that_of_plain_lora_in_float64(folder: Path):
    """Gradients of A and B by the chain rule, from the gradient of the merged weight."""
    sample = [demonstration([1, 2, 3, 4, 5], [False, False, True, True, True])]
    subject = learner(folder, lora={"rank": 2, "alpha": 6.0, "targets": ["q_proj"]})
    module = subject.policy.module.double()
    name = "model.layers.1.self_attn.q_proj"
    layer = module.get_submodule(name)
    up: Tensor = layer.get_parameter("lora_B.default.weight")
    down: Tensor = layer.get_parameter("lora_A.default.weight")
    with torch.no_grad():
        up.normal_(generator=torch.Generator().manual_seed(5))
    merged = {key: value.clone() for key, value in subject.policy.state().items()}
    whole = learner(folder)
    whole.policy.module.double().load_state_dict(merged)
    (mine,), (theirs,) = subject.logprobs(sample, 1.0), whole.logprobs(sample, 1.0)
    assert mine[2:] == pytest.approx(theirs[2:], abs=1e-6)
    for one in (subject, whole):
        one.optimizer.step = lambda: (0.0, False)  # keep the gradient
        one.fit(sample, SFT())
    of_weight = whole.policy.module.get_parameter(f"{name}.weight").grad
    assert of_weight is not None
    assert up.grad is not None
    assert down.grad is not None
    assert torch.allclose(up.grad, 3.0 * of_weight @ down.T, rtol=1e-9, atol=1e-12)
    assert torch.allclose(down.grad, 3.0 * up.T @ of_weight, rtol=1e-9, atol=1e-12)


@DTYPES
def test_an_engine_computes_with_what_was_learnt(tmp_path: Path, dtype: str):
    """Published merged, under the names of the model; the embedded engine here runs in float32."""
    folder = make_folder(tmp_path / "model")
    settings = LearnerSettings.model_validate({"dtype": dtype, **SETTINGS})
    subject = Learner(open_policy(folder, settings, seed=0), settings, seed=0, version=V0)
    desk, context = Desk(make_core(folder)), prompt(12)
    before = desk.turn("before", context)
    target = context + [(token + 1) % 60 for token in before.token_ids]
    mask = [False] * len(context) + [True] * len(before.token_ids)
    for _ in range(4):
        subject.fit([demonstration(target, mask)], SFT())
    sender = SharedMemorySender(tmp_path, shared_memory=tmp_path)
    whole = {name: tensor.float() for name, tensor in unique_tensors(subject.policy.state())}
    manifest = sender.publish(Version(0, 1), whole.items())
    desk.core.weights.stage(manifest)
    desk.core.commit(CommitRequest(version=manifest.version))
    after = desk.turn("after", context)
    sampled = demonstration(context + after.token_ids, mask[: len(context) + len(after.token_ids)])
    (own,) = subject.logprobs([sampled], 1.0)
    exact = 1e-4 if dtype == "float32" else 0.1
    assert after.logprobs == pytest.approx(own[len(context) :].tolist(), abs=exact)
    (base,) = learner(folder).logprobs([sampled], 1.0)
    assert abs(base[len(context) :] - own[len(context) :]).max() > 3 * exact
    sender.close()


@DTYPES
def test_a_resumed_run_is_the_same_to_the_last_bit(tmp_path: Path, folder: Path, dtype: str):
    straight = learner(folder, seed=3, dtype=dtype, **SETTINGS)
    go_on(straight, 3)
    path = save_checkpoint(straight, tmp_path, Version(0, 3), source=folder)
    straight.name(Version(0, 3))
    loaded = load_policy(path, dtype).state()
    assert all(torch.equal(loaded[name], value) for name, value in weights(straight).items())
    resumed = learner(folder, seed=9, dtype=dtype, **SETTINGS)
    restore_checkpoint(resumed, path)
    go_on(straight, 2)
    go_on(resumed, 2)
    found = weights(resumed)
    assert all(torch.equal(found[name], value) for name, value in weights(straight).items())


def test_a_checkpoint_is_refused_beside_other_frozen_weights_or_matrices(tmp_path: Path, folder: Path):
    subject = learner(folder, **SETTINGS)
    go_on(subject, 1)
    path = save_checkpoint(subject, tmp_path, Version(0, 1), source=folder)
    with pytest.raises(ConfigError, match="other frozen weights; open the trainer with the folder"):
        restore_checkpoint(learner(path, **SETTINGS), path)
    with pytest.raises(ConfigError, match="lora of other layers or rank"):
        restore_checkpoint(learner(folder, lora={"rank": 3}), path)
    with pytest.raises(ConfigError, match="which the model does not have"):
        restore_checkpoint(learner(folder), path)


def test_layers_that_the_model_does_not_have_are_refused_with_those_it_has(folder: Path):
    with pytest.raises(
        ConfigError, match="has no c_attn; possible are down_proj, gate_proj, k_proj"
    ) as error:
        learner(folder, lora={"targets": ["q_proj", "c_attn"]})
    assert "lm_head" not in str(error.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_routers_are_no_targets(tmp_path: Path, dtype: str):
    folder = make_folder(tmp_path, "qwen3_moe")
    with pytest.raises(ConfigError, match="possible are k_proj, o_proj, q_proj, v_proj"):
        learner(folder, dtype=dtype, lora={"targets": ["gate"]})


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"lora": {"rank": 0}}, "rank"),
        ({"lora": {"dropout": 0.1}}, "dropout"),
        ({"lora": {"targets": []}}, "targets"),
        ({"lora": {}, "quantization": "int8"}, "leave lora or quantization out"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, object], field: str):
    with pytest.raises(ValidationError, match=field):
        LearnerSettings.model_validate(settings)
