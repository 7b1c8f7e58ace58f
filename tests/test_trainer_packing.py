"""Sequences that share a forward pass, against each one alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from sostenuto.trainer.algorithms import GRPO
from sostenuto.trainer.model import load_policy
from sostenuto.trainer.optimizer import Optimizer
from sostenuto.trainer.samples import Sample
from sostenuto.types import Version
from trainer_world import learner, random_samples, write_any

_transformers = cast("Any", transformers)
_SIZES: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64,
    "initializer_range": 0.3, "tie_word_embeddings": True,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_WINDOW: dict[str, Any] = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}
PACKED: dict[str, PreTrainedConfig] = {
    "llama": _transformers.LlamaConfig(**_SIZES),
    "qwen2": _transformers.Qwen2Config(**_SIZES),
    "qwen2-window": _transformers.Qwen2Config(**_SIZES, **_WINDOW),
    "qwen3": _transformers.Qwen3Config(**_SIZES),
    "qwen3-moe": _transformers.Qwen3MoeConfig(**_SIZES, **_EXPERTS),
    "gpt2": _transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=64),
}
# A bias by distance in one row; logits that are capped after the output layer, and attention within.
PADDED: dict[str, PreTrainedConfig] = {
    "bloom": _transformers.BloomConfig(vocab_size=20, hidden_size=16, n_layer=2, n_head=2),
    "gemma2": _transformers.Gemma2Config(**_SIZES, query_pre_attn_scalar=4),
}


@pytest.fixture(params=[*PACKED, *PADDED])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    return write_any(tmp_path, {**PACKED, **PADDED}[kind], texts=20)


def stale(count: int) -> list[Sample]:
    """Of other weights, so that the ratio is not one; of several lengths, some of them equal."""
    return [
        replace(sample, version=Version(0, -1), logprobs=sample.logprobs * np.float32(1.1))
        for sample in random_samples(count, seed=3)
    ]


class Still(Optimizer):
    """Keeps the gradient and does not move."""

    def step(self) -> tuple[float, bool]:
        return 0.0, False


def gradient(folder: Path, samples: list[Sample], budget: int) -> tuple[float, dict[str, torch.Tensor]]:
    subject = learner(folder, microbatch_tokens=budget)
    subject.optimizer = Still(subject.policy.module, subject.settings)
    report = subject.learn(samples, GRPO())
    assert report.micro_batches == (1 if budget > 1 else len(samples))
    return report.loss, {
        name: p.grad for name, p in subject.policy.module.named_parameters() if p.grad is not None
    }


def test_a_model_is_packed_unless_its_sequences_would_see_each_other(kind: str, folder: Path):
    assert load_policy(folder, "float32").packs == (kind in PACKED)
    assert load_policy(folder, "bfloat16").packs == (kind in PACKED)


def test_loss_log_probabilities_and_gradient_are_those_of_one_sequence_at_a_time(kind: str, folder: Path):
    samples = stale(9)
    if kind in PADDED:  # those of much shorter sequences go elsewhere
        samples = [sample for sample in samples if len(sample) >= 7]
    subject = learner(folder)
    together = subject.logprobs(samples, 0.8)
    alone = [subject.logprobs([sample], 0.8)[0] for sample in samples]
    for sample, found, expected in zip(samples, together, alone, strict=True):
        np.testing.assert_allclose(found[sample.mask], expected[sample.mask], rtol=1e-5, atol=1e-5)
    loss, whole = gradient(folder, samples, 4096)
    summed, parts = gradient(folder, samples, 1)
    assert loss == pytest.approx(summed, rel=1e-5, abs=1e-6)
    assert whole.keys() == parts.keys()
    scale = max(float(value.abs().max()) for value in parts.values())
    for name, value in whole.items():
        assert torch.allclose(value, parts[name], rtol=1e-5, atol=1e-5 * scale), name


@pytest.mark.parametrize("kind", PACKED)
def test_a_packed_pass_runs_every_token_once_and_nothing_else(folder: Path):
    samples, subject = stale(5), learner(folder)
    shapes: list[tuple[int, ...]] = []
    subject.policy.module.base_model.register_forward_hook(
        lambda _module, _args, output: shapes.append(tuple(output.last_hidden_state.shape[:2]))
    )
    subject.logprobs(samples, 1.0)
    assert shapes == [(1, sum(len(sample) - 1 for sample in samples))]


def test_a_checkpoint_says_nothing_of_how_its_model_was_run_here(folder: Path, tmp_path: Path):
    load_policy(folder, "float32").save(tmp_path / "saved")
    assert "sostenuto" not in (tmp_path / "saved" / "config.json").read_text()
