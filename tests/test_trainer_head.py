"""Log-probabilities and entropies in chunks, and layers that are computed again, against doing it at once."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine_models import make_folder
from sostenuto.errors import ConfigError
from sostenuto.trainer import head as head_module
from sostenuto.trainer.algorithms import GRPO, SFT
from sostenuto.trainer.batching import collate
from sostenuto.trainer.head import Head, scores
from sostenuto.trainer.learner import Learner
from sostenuto.trainer.logprobs import beside, one_pass, token_logprobs, token_scores
from sostenuto.trainer.model import load_policy
from sostenuto.trainer.optimizer import Optimizer
from sostenuto.trainer.samples import Sample
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.trainer.tensors import backpropagate
from trainer_world import V0, learner, random_samples, write_model

POSITIONS, VOCABULARY, ROWS, WIDTH = 7, 11, 13, 5
_torch = cast("Any", torch)


@pytest.fixture(params=[1, 3, 100], ids=lambda rows: f"{rows} positions a chunk")
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 4 * VOCABULARY * request.param)
    return request.param


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(3)
    shapes = ((POSITIONS, WIDTH), (ROWS, WIDTH), (ROWS,))
    features, weight, bias = (torch.randn(shape, generator=noise, dtype=dtype) for shape in shapes)
    targets = torch.randint(0, VOCABULARY, (POSITIONS,), generator=noise)
    return features.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def at_once(features: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, temperature: float):
    """Log-probabilities and entropies from all logits, by the definition."""
    logits = (features @ weight.T + bias)[:, :VOCABULARY] / temperature
    every = logits.log_softmax(-1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_and_entropies_are_those_of_all_logits_at_once(temperature: float):
    features, weight, bias, targets = drawn()
    expected = at_once(features, weight, bias, targets, temperature)
    head = Head(weight, bias, VOCABULARY)
    found = scores(features, head, targets, temperature, entropy=True)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
    without = scores(features, head, targets, temperature, entropy=False)
    assert torch.equal(without.logprobs, found.logprobs)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_of_features_weight_and_bias_are_those_of_finite_differences(entropy: bool):
    *parts, targets = drawn()

    def found(features: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        given = scores(features, Head(weight, bias, VOCABULARY), targets, 0.8, entropy=entropy)
        return tuple(given) if entropy else (given.logprobs,)

    assert _torch.autograd.gradcheck(found, tuple(parts))


@pytest.mark.usefixtures("chunk")
def test_a_frozen_output_layer_gets_no_gradient_and_features_still_do():
    features, weight, _, targets = drawn()
    weight.requires_grad_(False)
    backpropagate(
        scores(features, Head(weight, None, VOCABULARY), targets, 1.0, entropy=False).logprobs.sum()
    )
    assert weight.grad is None
    assert features.grad is not None
    assert float(features.grad.abs().sum()) > 0


class Widest(TorchDispatchMode):
    """The most rows of a tensor that is as wide as the vocabulary and no view of `weight`."""

    rows = 0

    def __init__(self, weight: Tensor) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._ours = weight.untyped_storage().data_ptr()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.ndim >= 2 and found.shape[-1] == VOCABULARY:
            ours = found.untyped_storage().data_ptr() == self._ours
            self.rows = self.rows if ours else max(self.rows, found.shape[0])
        return found


def test_logits_never_exist_for_more_than_a_chunk(chunk: int):
    features, weight, bias, targets = drawn()
    with Widest(weight) as seen:
        found = scores(features, Head(weight, bias, VOCABULARY), targets, 0.8, entropy=True)
        backpropagate(found.logprobs.sum() + found.entropy.sum())
    assert seen.rows == min(chunk, POSITIONS)


def test_half_precision_keeps_sums_in_float32():
    features, weight, bias, targets = drawn(torch.bfloat16)
    found = scores(features, Head(weight, bias, VOCABULARY), targets, 1.0, entropy=True)
    assert (found.logprobs.dtype, found.entropy.dtype) == (torch.float32, torch.float32)
    whole = (features.detach().double(), weight.detach().double(), bias.detach().double())
    expected = at_once(*whole, targets, 1.0)
    assert torch.allclose(found.logprobs.double(), expected[0], atol=0.05)
    backpropagate(found.logprobs.sum())
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def test_a_loss_over_the_vocabulary_gets_every_logit_of_masked_tokens_with_gradients(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    policy = load_policy(folder, "float32")
    samples = random_samples(4)
    batch = collate(samples, [0, 1, 2, 3], [1.0] * 4, [False] * 4)
    given = torch.rand(len(batch.targets), 20).softmax(-1)

    def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
        return -(wanted * logits.log_softmax(-1)).sum(-1)

    def gradient() -> tuple[Tensor, Tensor]:
        policy.module.zero_grad()
        loss = beside(policy, batch, given, divergence)
        backpropagate(loss.sum())
        return loss.detach(), cast("Tensor", policy.module.get_input_embeddings().weight.grad).clone()

    whole = gradient()
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 4 * 20 * 3)
    for mine, theirs in zip(gradient(), whole, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


def counted(part: nn.Module) -> list[None]:
    """Gets longer with each forward pass of `part`."""
    runs: list[None] = []
    part.register_forward_hook(lambda _part, _given, _found: runs.append(None))
    return runs


def test_one_loss_runs_the_model_once_however_often_it_asks(folder: Path):
    policy, samples = load_policy(folder, "float32"), random_samples(3)
    batch = collate(samples, [0, 1, 2], [1.0] * 3, [False] * 3)
    runs = counted(policy.module.base_model)
    with one_pass():
        first = token_logprobs(policy, batch)
        assert torch.allclose(token_scores(policy, batch).logprobs, first)
        with torch.no_grad():
            token_logprobs(policy, batch)
    assert len(runs) == 1
    token_logprobs(policy, batch)
    assert len(runs) == 2


class Still(Optimizer):
    """Keeps the gradient and does not move."""

    def step(self) -> tuple[float, bool]:
        return 0.0, False


def gradients(subject: Learner, samples: list[Sample]) -> dict[str, Tensor]:
    subject.optimizer = Still(subject.policy.module, subject.settings)
    subject.fit(samples, SFT())
    parameters = subject.policy.module.named_parameters()
    return {name: p.grad for name, p in parameters if p.grad is not None}


def passes_of_a_layer(subject: Learner) -> list[None]:
    return counted(cast("Any", subject.policy.module).model.layers[0].input_layernorm)


def test_layers_that_are_computed_again_give_the_same_gradient(folder: Path):
    samples = random_samples(6)
    kept = gradients(learner(folder, activation_checkpointing="never"), samples)
    subject = learner(folder, activation_checkpointing="always")
    runs = passes_of_a_layer(subject)
    again = gradients(subject, samples)
    assert len(runs) == 2
    assert kept.keys() == again.keys()
    assert all(torch.equal(again[name], value) for name, value in kept.items())


@pytest.mark.parametrize(("budget", "runs"), [(4096, 1), (1, 2 * 3)])
def test_by_itself_only_a_pass_above_the_budget_is_computed_again(folder: Path, budget: int, runs: int):
    subject = learner(folder, microbatch_tokens=budget)
    seen = passes_of_a_layer(subject)
    gradients(subject, random_samples(3))
    assert len(seen) == runs
    subject.logprobs(random_samples(3), 1.0)
    assert len(seen) == runs + (1 if budget > 1 else 3)


def test_replayed_experts_are_replayed_again_where_layers_are_computed_again(tmp_path: Path):
    folder = make_folder(tmp_path, "qwen3_moe", seed=3, vocab_size=0x80)
    noise = np.random.default_rng(1)

    def found(kept: str) -> dict[str, Tensor]:
        settings = LearnerSettings.model_validate({"routing_replay": True, "activation_checkpointing": kept})
        subject = Learner(load_policy(folder, "float32"), settings, seed=0, version=V0)
        subject.optimizer = Still(subject.policy.module, settings)
        subject.learn(samples, GRPO())
        parameters = subject.policy.module.named_parameters()
        return {name: p.grad for name, p in parameters if p.grad is not None}

    samples = [
        Sample(
            noise.integers(0, 60, 12).astype(np.int32), np.arange(12) > 4, np.full(12, -1.0, np.float32),
            np.ones(12, np.float32), V0, f"p{n}",
            experts=np.array([[noise.permutation(8)[:2] for _ in range(2)] for _ in range(12)], np.int16),
        )
        for n in range(3)
    ]  # fmt: skip
    kept, again = found("never"), found("always")
    assert kept.keys() == again.keys()
    assert all(torch.equal(again[name], value) for name, value in kept.items())


def test_a_model_whose_layers_cannot_be_computed_again_is_refused_when_that_is_asked_for(folder: Path):
    plain = replace(load_policy(folder, "float32"), recomputation=None)
    plain.recompute(100)
    with pytest.raises(ConfigError, match="activation_checkpointing: transformers marks no layers of Llama"):
        plain.recompute(0)
