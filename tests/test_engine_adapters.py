"""LoRA adapters: exact against merged weights, several in one batch, KV apart, wrong folders refused."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors import torch as _library
from torch import Tensor
from transformers import PreTrainedModel

from engine_models import Desk, load, make_core, make_folder, prompt, publish, reference_logprobs
from sostenuto.runtime.engines.client import launch_embedded
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.model import load as load_quantized
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.wire import (
    AdapterRequest,
    CommitRequest,
    GenerateReply,
    GenerateRequest,
    ScoreReply,
    ScoreRequest,
)
from sostenuto.trainer.quantization import dequantize
from sostenuto.types import EngineId, Version

_safetensors = cast("Any", _library)
TARGETS = ("q_proj", "v_proj", "down_proj")
RANK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("base"), "qwen3", seed=3)


@pytest.fixture
def desk(folder: Path) -> Desk:
    return Desk(make_core(folder))


def paths(module: PreTrainedModel, targets: tuple[str, ...] = TARGETS) -> list[str]:
    return [path for path, _ in cast("Any", module).named_modules() if path.endswith(targets)]


def write_adapter(
    place: Path, module: PreTrainedModel, *, seed: int, targets: tuple[str, ...] = TARGETS, **config: object
) -> Path:
    """As peft saves it: random A and B of every target."""
    noise = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for path in paths(module, targets):
        outputs, inputs = cast("Tensor", module.get_submodule(path).weight).shape
        for half, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            tensors[f"base_model.model.{path}.lora_{half}.weight"] = 0.2 * torch.randn(
                *shape, generator=noise
            )
    place.mkdir(parents=True)
    _safetensors.save_file(tensors, place / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": list(targets),
              "use_rslora": False, "bias": "none", "task_type": "CAUSAL_LM", "lora_dropout": 0.0}  # fmt: skip
    (place / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    return place


@torch.no_grad()
def merged(folder: Path, adapter: Path, scale: float = 2.0) -> PreTrainedModel:
    """The base with scale * B A added to each matrix."""
    module = load(folder).module
    tensors: dict[str, Tensor] = _safetensors.load_file(adapter / "adapter_model.safetensors")
    for name, down in tensors.items():
        if ".lora_A." in name:
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weight = cast("Tensor", module.get_submodule(path).weight)
            weight += scale * (tensors[name.replace("lora_A", "lora_B")] @ down)
    return module


def put(core: Core, name: str, path: Path, version: str | None = None) -> None:
    core.adapters.put(core.adapters.read(AdapterRequest(name=name, path=str(path), version=version)))


def assert_sampled_by(module: PreTrainedModel, context: list[int], reply: GenerateReply) -> None:
    expected = reference_logprobs(module, context + reply.token_ids, len(context))
    np.testing.assert_allclose(reply.logprobs, expected, rtol=1e-5, atol=5e-5)


def test_several_adapters_and_the_base_share_a_batch_and_each_equals_its_merged_weights(
    desk: Desk, folder: Path, tmp_path: Path
):
    base = load(folder).module
    modules = {"": base}
    for seed, name in enumerate(("one", "two")):
        place = write_adapter(tmp_path / name, base, seed=seed)
        put(desk.core, name, place)
        modules[name] = merged(folder, place)
    requests = [(name, prompt(length, seed=length), length)
                for length in (3, 40, 200) for name in ("one", "", "two")]  # fmt: skip
    for i, (name, context, seed) in enumerate(requests):
        desk.submit(str(i), context, max_new_tokens=10, adapter=name or None, sampling={"seed": seed})
        desk.core.step()
    desk.run()
    for i, (name, context, _) in enumerate(requests):
        assert_sampled_by(modules[name], context, desk.reply(str(i)))
    replies = [desk.reply(str(i)).logprobs[0] for i in range(3)]
    assert len({round(logprob, 3) for logprob in replies}) == 3, "the adapters made no difference"


def test_scoring_under_an_adapter_gives_what_sampling_under_it_said(desk: Desk, folder: Path, tmp_path: Path):
    base = load(folder).module
    put(desk.core, "one", write_adapter(tmp_path / "one", base, seed=1), version="0.7")
    put(desk.core, "two", write_adapter(tmp_path / "two", base, seed=2))
    context = prompt(300, seed=4)  # more than one chunk
    scores: dict[str | None, ScoreReply] = {}
    for name in ("one", "two", None):
        reply = desk.turn(str(name), context, max_new_tokens=12, adapter=name)
        scored: list[ScoreReply | Refusal] = []
        request = ScoreRequest(token_ids=context + reply.token_ids, start=len(context), adapter=name)
        desk.core.score(request, scored.append)
        desk.submit("beside", prompt(20), max_new_tokens=4, adapter="two")
        desk.run()
        (score,) = scored
        assert isinstance(score, ScoreReply)
        np.testing.assert_allclose(score.logprobs, reply.logprobs, rtol=1e-5, atol=5e-5)
        assert score.version == reply.versions[0].version
        scores[name] = score
    assert [score.version for score in scores.values()] == ["0.7", "0.0", "0.0"]
    with pytest.raises(Refusal, match=r"adapter: 'three' is not loaded \(loaded: one, two\)"):
        desk.core.score(ScoreRequest(token_ids=context, start=1, adapter="three"), lambda _: None)


def test_kv_of_one_adapter_serves_no_other(desk: Desk, folder: Path, tmp_path: Path):
    base = load(folder).module
    one, two = (write_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate("ab"))
    put(desk.core, "one", one)
    put(desk.core, "two", two)
    context = prompt(60)
    first = desk.turn("x1", context, program_id="p", adapter="one")
    assert desk.turn("x2", context, program_id="q", adapter="two").cached_tokens == 0
    assert desk.turn("x3", context, program_id="r").cached_tokens == 0
    longer = [*context, *first.token_ids, 5]
    again = desk.turn("x4", longer, program_id="p", adapter="one")
    assert again.cached_tokens == len(longer) - 2
    assert_sampled_by(merged(folder, one), longer, again)


def test_a_newer_adapter_of_a_name_serves_new_requests_and_versions_say_so(
    desk: Desk, folder: Path, tmp_path: Path
):
    base = load(folder).module
    old, new = (write_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate("ab"))
    put(desk.core, "policy", old, "0.1")
    context = prompt(50)
    desk.submit("running", context, max_new_tokens=12, adapter="policy")
    for _ in range(4):
        desk.core.step()
    with pytest.raises(Refusal, match=r"0\.2 is wanted, 0\.1 is served"):
        desk.submit("early", context, adapter="policy", min_version="0.2")
    put(desk.core, "policy", new, "0.2")
    later = desk.turn("later", context, adapter="policy", min_version="0.2")
    assert later.cached_tokens == 0
    assert_sampled_by(merged(folder, old), context, desk.reply("running"))
    assert_sampled_by(merged(folder, new), context, later)
    assert [span.version for span in desk.reply("running").versions] == ["0.1"]
    assert [span.version for span in later.versions] == ["0.2"]
    with pytest.raises(Refusal, match=r"policy 0\.1 is not newer than the loaded 0\.2"):
        put(desk.core, "policy", old, "0.1")
    desk.core.adapters.drop("policy")
    desk.core.adapters.drop("policy")
    with pytest.raises(Refusal, match=r"adapter: 'policy' is not loaded \(loaded: none\)"):
        desk.submit("gone", context, adapter="policy")


def test_new_base_weights_keep_the_adapter(desk: Desk, tmp_path: Path):
    new = make_folder(tmp_path / "new", "qwen3", seed=9)
    place = write_adapter(tmp_path / "a", load(new).module, seed=1)
    put(desk.core, "one", place)
    desk.core.weights.stage(publish(tmp_path, load(new).module, "0.1"))
    desk.core.commit(CommitRequest(version="0.1"))
    reply = desk.turn("x", prompt(20), adapter="one")
    assert_sampled_by(merged(new, place), prompt(20), reply)


def test_an_adapter_lies_over_quantized_weights(folder: Path, tmp_path: Path):
    model = load_quantized(folder, dtype="float32", device="cpu", quantization="int8")
    desk = Desk(Core(model, version=Version(0, 0), kv_tokens=512, concurrency=4, threads=1))
    place = write_adapter(tmp_path / "a", load(folder).module, seed=1)
    put(desk.core, "one", place)
    reply = desk.turn("x", prompt(20), adapter="one")
    whole = merged(folder, place)
    with torch.no_grad():
        for name, quantized in model.quantized.items():
            weight = cast("Tensor", whole.get_parameter(name))
            base = cast("Tensor", load(folder).module.get_parameter(name))
            weight += dequantize(quantized, weight.dtype) - base
    assert_sampled_by(whole, prompt(20), reply)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": 4}, 1.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"(q|v|down)_proj": 2}}, 0.5),
        ({"r": 99, "rank_pattern": {"q_proj": RANK, "v_proj": RANK, r"mlp\.down_proj": RANK}}, 2.0),
    ],
)
def test_the_scale_follows_the_configuration(
    desk: Desk, folder: Path, tmp_path: Path, config: dict[str, Any], scale: float
):
    place = write_adapter(tmp_path / "a", load(folder).module, seed=1, **config)
    put(desk.core, "one", place)
    reply = desk.turn("x", prompt(20), adapter="one")
    assert_sampled_by(merged(folder, place, scale), prompt(20), reply)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type: .*LORA"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"r": 8}, r"lora_A has shape \(4, 64\), \(8, 64\) is needed"),
        ({"target_modules": ["q_proj", "gone_proj"]}, "target_modules: .* no layer 'gone_proj'"),
        ({"lora_alpha": None}, "lora_alpha"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    desk: Desk, folder: Path, tmp_path: Path, config: dict[str, Any], named: str
):
    place = write_adapter(tmp_path / "a", load(folder).module, seed=1, **config)
    with pytest.raises(Refusal, match=named) as refused:
        put(desk.core, "one", place)
    assert str(place) in refused.value.message
    assert refused.value.status == 422


def test_folders_that_are_no_adapter_are_refused_by_name(desk: Desk, folder: Path, tmp_path: Path):
    with pytest.raises(Refusal, match=r"adapter_config\.json cannot be read: No such file"):
        put(desk.core, "one", tmp_path / "missing")
    place = write_adapter(tmp_path / "a", load(folder).module, seed=1)
    (place / "adapter_config.json").write_text("{")
    with pytest.raises(Refusal, match="its JSON: Invalid JSON"):
        put(desk.core, "one", place)
    place = write_adapter(tmp_path / "b", load(folder).module, seed=1)
    (place / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(Refusal, match=r"adapter_model\.safetensors is not understood"):
        put(desk.core, "one", place)
    (place / "adapter_model.safetensors").unlink()
    with pytest.raises(Refusal, match=r"no adapter_model\.safetensors"):
        put(desk.core, "one", place)


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        ("base_model.model.model.layers.0.mlp.gone.lora_A.weight", r"mlp.gone' is no linear layer"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "no half of a LoRA layer"),
        ("base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight", r"lora_B has shape None"),
    ],
)
def test_a_tensor_that_fits_nothing_is_named(desk: Desk, tmp_path: Path, tensor: str, named: str):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    _safetensors.save_file({tensor: torch.zeros(4, 32)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(Refusal, match=named):
        put(desk.core, "one", tmp_path)


async def test_adapters_are_loaded_and_unloaded_over_the_socket(folder: Path, tmp_path: Path):
    place = write_adapter(tmp_path / "a", load(folder).module, seed=1)
    settings = EmbeddedSettings(folder, tmp_path / "e.sock", 1024, 2)
    async with launch_embedded(settings, engine_id=EngineId("e0")) as engine:
        told = await engine.load_adapter(AdapterRequest(name="one", path=str(place)))
        assert (told.layers, told.rank) == (6, RANK)
        request = GenerateRequest(
            request_id="a", program_id="a", token_ids=prompt(20), max_new_tokens=8, adapter="one"
        )
        assert_sampled_by(merged(folder, place), prompt(20), await engine.generate(request))
        await engine.unload_adapter("one")


def test_kv_under_one_salt_serves_no_other(desk: Desk):
    context = prompt(60)
    desk.submit("running", context, max_new_tokens=30, salt="a")
    desk.core.step()
    assert desk.turn("x", context, salt="b").cached_tokens == 0
    assert desk.turn("y", [*context, 1], salt="c").cached_tokens == 0
    assert desk.turn("z", [*context, 1], salt="b").cached_tokens == 60
