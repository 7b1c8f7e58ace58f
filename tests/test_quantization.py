"""Weights in fewer bits: the formats by the numbers; engine and trainer that compute with equal values."""

from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from engine_models import Desk, load, make_folder, prompt, publish
from sostenuto.runtime.engines.client import launch_embedded
from sostenuto.runtime.engines.embedded import model as embedded_model
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.embedded.tensors import as_list
from sostenuto.runtime.engines.wire import CommitRequest, GenerateReply
from sostenuto.trainer.algorithms import GRPO
from sostenuto.trainer.learner import Learner
from sostenuto.trainer.model import load_policy
from sostenuto.trainer.quantization import Format, dequantize, fake_quantize, quantize, quantized_weights
from sostenuto.trainer.samples import Sample
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.trainer.tensors import backpropagate
from sostenuto.types import EngineId, Version

FORMATS: tuple[Format, ...] = get_args(Format)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
V0 = Version(0, 0)


def matrix(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- the formats ----


def test_int8_has_one_scale_for_each_output_channel():
    codes, scales = quantize(
        torch.tensor([[2.54, -1.27, 0.01], [0.0, 0.0, 0.0], [-12.7, 0.05, 0.15]]), "int8"
    ).tensors
    assert as_list(codes) == [[127, -64, 0], [0, 0, 0], [-127, 0, 2]]
    np.testing.assert_allclose(scales[:, 0], [0.02, 1.0, 0.1], rtol=1e-6)


def test_fp8_has_one_scale_for_each_block_of_128_by_128():
    weight = matrix(130, 300)
    weight[129, 299] = 1000.0
    codes, scales = quantize(weight, "fp8").tensors
    assert codes.dtype == torch.float8_e4m3fn
    assert scales.shape == (2, 3)
    for r, c in np.ndindex(2, 3):
        block = weight[128 * r : 128 * r + 128, 128 * c : 128 * c + 128]
        assert float(scales[r, c]) == float(block.abs().max() / 448)
        ours = codes[128 * r : 128 * r + 128, 128 * c : 128 * c + 128].float()
        assert torch.equal(ours, (block / scales[r, c]).to(torch.float8_e4m3fn).float())
    # Three bits of mantissa: half a step of 1/8 around a normal number.
    small = weight[:128, :256]
    assert (
        float(
            ((dequantize(quantize(weight, "fp8"), torch.float32)[:128, :256] - small) / small).abs().median()
        )
        < 0.04
    )


def test_nvfp4_has_a_scale_for_each_16_inputs_and_one_for_the_matrix():
    weight = matrix(5, 48, seed=1)
    codes, scales, whole = quantize(weight, "nvfp4").tensors
    assert (codes.shape, scales.shape, whole.shape) == ((5, 24), (5, 3), (1, 1))
    assert (codes.dtype, scales.dtype) == (torch.uint8, torch.float8_e4m3fn)
    assert float(whole) == pytest.approx(float(weight.abs().max()) / (448 * 6), rel=1e-6)
    assert float(scales.float().max()) == 448
    for row, block in np.ndindex(5, 3):
        values = weight[row, 16 * block : 16 * block + 16].double().numpy()
        step = float(scales[row, block].float()) * float(whole)
        grid = np.array([*E2M1, *(-x for x in E2M1)]) * step
        expected = grid[np.abs(values[:, None] - grid[None, :]).argmin(1)]
        found = dequantize(quantize(weight, "nvfp4"), torch.float64)[row, 16 * block : 16 * block + 16]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_value_between_two_4_bit_numbers_goes_to_the_nearer_and_a_tie_to_the_even_one():
    ties = [(low + high) / 2 for low, high in pairwise(E2M1)]
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    row = torch.tensor([[6.0, *ties, *(-tie for tie in ties), 1.3]])
    # The largest is 6: both scales are exact, and codes are the values themselves.
    found = dequantize(quantize(row * 448, "nvfp4"), torch.float32)[0] / 448
    assert as_list(found) == [6.0, *even, *(-value for value in even), 1.5]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (128, 128), (200, 130), (3, 40, 33)])
def test_fake_quantization_has_the_bits_of_quantizing_and_back(
    kind: Format, dtype: torch.dtype, shape: tuple[int, ...]
):
    weight = matrix(*shape, seed=len(shape), dtype=dtype)
    stored = quantize(weight, kind)
    values = dequantize(stored, dtype)
    assert (values.shape, values.dtype) == (weight.shape, dtype)
    assert torch.equal(fake_quantize(weight, kind), values)
    again = dequantize(quantize(values.clone(), kind), dtype)
    worst = {"int8": 0.01, "fp8": 0.05, "nvfp4": 0.3}[kind] * float(weight.abs().max())
    assert float((values - weight).abs().max()) <= worst
    assert float((again - values).abs().max()) <= worst


@pytest.mark.parametrize("kind", FORMATS)
def test_zeros_stay_zero_and_numbers_at_the_edge_of_float32_stay_numbers(kind: Format):
    assert not dequantize(quantize(torch.zeros(4, 32), kind), torch.float32).any()
    for size in (1e-45, 1e-38, 1e30):
        values = dequantize(quantize(torch.tensor([[size, -size] * 8, [0.0] * 16]), kind), torch.float32)
        assert torch.isfinite(values).all()
        assert float(values.abs().max()) <= size * 1.01


@pytest.mark.parametrize("kind", FORMATS)
def test_each_expert_is_quantized_alone(kind: Format):
    experts = matrix(3, 20, 40) * torch.tensor([1.0, 100.0, 1e-3])[:, None, None]
    together = dequantize(quantize(experts, kind), torch.float32)
    alone = torch.stack([dequantize(quantize(expert, kind), torch.float32) for expert in experts])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_gradient_passes_straight_through(kind: Format):
    weight, factor = matrix(6, 32).requires_grad_(), matrix(6, 32, seed=2)
    backpropagate((fake_quantize(weight, kind) * factor).sum())
    assert weight.grad is not None
    assert torch.equal(weight.grad, factor)


def test_matrices_of_linears_and_experts_are_quantized_and_nothing_else(tmp_path: Path):
    dense = load(make_folder(tmp_path / "dense", "qwen2")).module
    names = {weight.name.removeprefix("model.layers.") for weight in quantized_weights(dense)}
    linears = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    assert names == {f"{layer}.{linear}.weight" for layer in (0, 1) for linear in linears}
    mixture = load(make_folder(tmp_path / "moe", "qwen3_moe")).module
    names = {weight.name for weight in quantized_weights(mixture)}
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert not any(part in name for name in names for part in ("gate.weight", "embed", "head", "norm"))


# ---- engine and trainer ----


def make_desk(folder: Path, kind: Format | None, *, dtype: str = "float32") -> Desk:
    model = embedded_model.load(folder, dtype=dtype, device="cpu", quantization=kind)
    return Desk(Core(model, version=V0, kv_tokens=2048, concurrency=8, threads=1))


def largest_difference(learner: Learner, context: list[int], reply: GenerateReply) -> float:
    """Over the sampled tokens, of the log-probabilities of engine and trainer."""
    sample = as_sample(context, reply)
    (found,) = learner.logprobs([sample], 1.0)
    return float(np.abs(found - sample.logprobs)[sample.mask].max())


def as_sample(context: list[int], reply: GenerateReply) -> Sample:
    ids = np.array(context + reply.token_ids, dtype=np.int32)
    mask = np.arange(len(ids)) >= len(context)
    logprobs = np.full(len(ids), np.nan, dtype=np.float32)
    logprobs[mask] = reply.logprobs
    return Sample(ids, mask, logprobs, np.where(mask, 1.0, 0.0).astype(np.float32), version=V0)


def make_learner(folder: Path, kind: Format | None) -> Learner:
    settings = LearnerSettings(quantization=kind)
    return Learner(load_policy(folder, "float32", kind), settings, seed=0, version=V0)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_by_shared_rules_the_ratio_is_one_and_otherwise_it_is_not(
    tmp_path: Path, kind: Format, architecture: str
):
    folder = make_folder(tmp_path, architecture, seed=5)
    desk, context = make_desk(folder, kind), prompt(30)
    for name in ("a", "b"):
        desk.submit(name, context, max_new_tokens=20, sampling={"seed": ord(name)})
    desk.run()
    shared, whole = make_learner(folder, kind), make_learner(folder, None)
    assert max(largest_difference(shared, context, desk.reply(name)) for name in "ab") <= 1e-4
    assert max(largest_difference(whole, context, desk.reply(name)) for name in "ab") > 1e-3


@pytest.mark.parametrize("kind", FORMATS)
def test_new_weights_are_quantized_when_they_arrive(tmp_path: Path, kind: Format):
    desk = make_desk(make_folder(tmp_path / "old", "qwen3_moe", seed=1), kind)
    new = make_folder(tmp_path / "new", "qwen3_moe", seed=2)
    for number in (1, 2):  # the second exchange brings the first tensors back into use
        desk.core.weights.stage(publish(tmp_path, load(new).module, f"0.{number}"))
        desk.core.commit(CommitRequest(version=f"0.{number}"))
        reply = desk.turn(f"r{number}", prompt(30), sampling={"seed": number})
        assert largest_difference(make_learner(new, kind), prompt(30), reply) <= 1e-4


def test_an_update_that_is_torn_changes_nothing(tmp_path: Path):
    old = make_folder(tmp_path / "old", seed=1)
    desk = make_desk(old, "int8")
    manifest = publish(tmp_path, load(make_folder(tmp_path / "new", seed=2)).module, "0.1")
    content = bytearray(Path(manifest.path).read_bytes())
    content[-1] ^= 1
    Path(manifest.path).write_bytes(content)
    with pytest.raises(Refusal, match="do not have the checksum"):
        desk.core.weights.stage(manifest)
    lacking = manifest.model_copy(update={"tensors": manifest.tensors[:1] + manifest.tensors[2:]})
    with pytest.raises(Refusal, match=r"q_proj\.weight': is missing"):
        desk.core.weights.stage(lacking)
    reply = desk.turn("a", prompt(30))
    assert largest_difference(make_learner(old, "int8"), prompt(30), reply) <= 1e-4


def test_a_quantized_engine_holds_no_whole_matrix_between_two_steps_and_tells_its_memory(tmp_path: Path):
    folder = make_folder(tmp_path, hidden_size=256, intermediate_size=512)
    whole = make_desk(folder, None).core.capabilities()
    sizes: dict[Format, int] = {}
    for kind in FORMATS:
        desk = make_desk(folder, kind)
        desk.turn("a", prompt(9))
        capabilities = desk.core.capabilities()
        sizes[kind] = capabilities.weight_bytes
        assert capabilities.quantization == kind
    assert whole.quantization is None
    matrices = sum(weight.tensor.nbytes for weight in quantized_weights(load(folder).module))
    rest = whole.weight_bytes - matrices
    shares = {kind: (size - rest) / matrices for kind, size in sizes.items()}
    assert 0.25 < shares["int8"] < 0.26
    assert 0.25 < shares["fp8"] < 0.251
    assert 0.14 < shares["nvfp4"] < 0.142
    model = embedded_model.load(folder, dtype="float32", device="cpu", quantization="fp8")
    assert sum(parameter.nbytes for parameter in model.module.parameters()) == rest


@pytest.mark.parametrize("kind", FORMATS)
def test_a_policy_step_through_quantized_weights_moves_the_whole_ones(tmp_path: Path, kind: Format):
    folder = make_folder(tmp_path, "qwen3", seed=5)
    desk, learner = make_desk(folder, kind), make_learner(folder, kind)
    reply = desk.turn("a", prompt(30), max_new_tokens=20)
    before = {name: p.detach().clone() for name, p in learner.policy.module.named_parameters()}
    report = learner.learn([as_sample(prompt(30), reply)], GRPO())
    assert report.refused == ""
    names = set(learner.policy.module.state_dict())
    assert names >= set(before)
    moved = {name for name, p in learner.policy.module.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(before)
    # What is published is whole: the engine quantizes it again, and both agree again.
    desk.core.weights.stage(publish(tmp_path, learner.policy.module, "0.1"))
    desk.core.commit(CommitRequest(version="0.1"))
    again = desk.turn("b", prompt(31, seed=3))
    assert largest_difference(learner, prompt(31, seed=3), again) <= 1e-4


async def test_an_engine_process_is_started_quantized(tmp_path: Path):
    folder = make_folder(tmp_path / "m", seed=5)
    settings = EmbeddedSettings(folder, tmp_path / "e.sock", 1024, 2, quantization="nvfp4")
    async with launch_embedded(settings, engine_id=EngineId("e0")) as engine:
        assert (await engine.capabilities()).quantization == "nvfp4"
