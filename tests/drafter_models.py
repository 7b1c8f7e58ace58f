"""Drafters to test with: a draft model near a target, a model with a multi-token-prediction head."""

import json
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PreTrainedModel

from engine_models import VOCABULARY_SIZE, Desk, load, prompt, save_tokenizer
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.lower import LowerTier
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.embedded.speculation.draft import DraftModel
from sostenuto.runtime.engines.embedded.speculation.lengths import StepCost
from sostenuto.runtime.engines.embedded.speculation.mtp import MultiToken, load_head
from sostenuto.runtime.engines.embedded.speculation.speculator import Speculator
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import Version
from speculation_models import guesses, guessing_desk
from test_engine_core import assert_exact

_FILES: Any = safetensors.torch
FREE = StepCost((1,), (0.0,))
_MTP_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "vocab_size": VOCABULARY_SIZE, "max_position_embeddings": 512,
    "initializer_range": 0.2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MTP_CONFIGS: dict[str, Any] = {
    "glm4_moe": lambda: cast("Any", Glm4MoeConfig)(num_key_value_heads=2, head_dim=8, **_MTP_SIZES),
}  # fmt: skip


def make_like(place: Path, folder: Path) -> Path:
    """A model whose distribution is near that of the one in `folder`, and not the same."""
    model = load(folder).module
    cast("Any", torch).manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    cast("Any", model).save_pretrained(place)
    save_tokenizer(place)
    return place


def make_mtp_folder(folder: Path, kind: str, *, simple: bool = False) -> Path:
    """A model of two layers with a head, in the layout of published checkpoints: the head is layer 2.

    `simple`: layers add nothing, so the next token depends on the last one alone.
    """
    cast("Any", torch).manual_seed(7)
    module = cast("Any", AutoModelForCausalLM).from_config(MTP_CONFIGS[kind]())
    module.save_pretrained(folder)
    save_tokenizer(folder)
    weights = _FILES.load_file(folder / "model.safetensors")
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"model.layers.2.{name}.weight"] = torch.ones(32)
    for name in weights if simple else ():
        if "o_proj" in name or "down_proj" in name:
            weights[name].zero_()
    weights["model.layers.2.eh_proj.weight"] = torch.randn(32, 64) * 0.2
    weights["model.layers.2.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.2.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    _FILES.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def mtp_desk(folder: Path, *, most: int = 3, lower_tokens: int = 0, **options: int) -> Desk:
    model, head = load_head(load(folder), folder)
    speculator = Speculator(MultiToken(head, step_s=FREE), most=most, step_s=lambda _: 1.0)
    sizes = {"kv_tokens": 4096, "concurrency": 16, **options}
    lower = LowerTier(model.shape, lower_tokens, folder) if lower_tokens else None
    return Desk(Core(model, version=Version(0, 0), threads=1, lower=lower, speculator=speculator, **sizes))


def draft_desk(folder: Path, drafter: Path, *, most: int = 4, budget: int = 1 << 16, **options: int) -> Desk:
    source = DraftModel(load(drafter), budget_tokens=budget, step_s=FREE)
    return guessing_desk(folder, source, most=most, **options)


def share(desk: Desk) -> float:
    drafted, accepted = guesses(desk)
    return accepted / drafted


def assert_same_as_plain(plain: Desk, desk: Desk, module: PreTrainedModel) -> None:
    """Requests, greedy and sampled, over two turns give the same tokens and exact log-probabilities."""
    contexts = {str(i): prompt(15 + 9 * i, seed=i) for i in range(5)}
    for turn in range(2):
        for i, (program, context) in enumerate(contexts.items()):
            sampling = {"seed": turn, "temperature": 1.0 if i % 2 else 0.0}
            for each in (plain, desk):
                each.submit(
                    f"{program}-{turn}", context, program_id=program, max_new_tokens=25, sampling=sampling
                )
        plain.run()
        desk.run()
        for program, context in contexts.items():
            reply, expected = desk.reply(f"{program}-{turn}"), plain.reply(f"{program}-{turn}")
            assert reply.token_ids == expected.token_ids
            assert reply.cached_tokens == expected.cached_tokens
            assert_exact(module, context, reply.token_ids, reply.logprobs)
            contexts[program] = [*context, *reply.token_ids, *prompt(4, seed=turn)]
    assert desk.core.load().used_kv_tokens == plain.core.load().used_kv_tokens
    drafted, accepted = guesses(desk)
    assert 0 < accepted < drafted


def of_drafter(manifest: Manifest, selector: str) -> Manifest:
    tensors = tuple(entry.model_copy(update={"name": f"draft.{entry.name}"}) for entry in manifest.tensors)
    return manifest.model_copy(update={"tensors": tensors, "selector": selector})


def engine_settings(folder: Path, **options: object) -> EmbeddedSettings:
    return EmbeddedSettings(folder, folder / "e.sock", kv_tokens=512, concurrency=4, **cast("Any", options))
