"""Tiny random models with a tiny tokenizer, and the plain transformers pass they are compared with."""

import string
import zlib
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from sostenuto.runtime.engines.embedded import attention
from sostenuto.runtime.engines.embedded import model as embedded_model
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.grammar.guide import Guide
from sostenuto.runtime.engines.embedded.lower import LowerTier
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.speculation.speculator import Speculator
from sostenuto.runtime.engines.embedded.tensors import use_attention
from sostenuto.runtime.engines.wire import GenerateReply, GenerateRequest
from sostenuto.trainer.publication.manifest import Manifest, TensorEntry
from sostenuto.types import Version

# Threads of torch that wait for each other starve on a machine that runs other tests.
torch.set_num_threads(1)

CHARACTERS = string.ascii_letters + string.digits + " .,"
TOKENIZER_SIZE = len(CHARACTERS)
VOCABULARY_SIZE = 80
CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY_SIZE, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "initializer_range": 0.2, "head_dim": 8,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip


def make_folder(folder: Path, kind: str = "llama", *, seed: int = 0, **sizes: int) -> Path:
    """Save a model of `kind` with random weights; the vocabulary is padded beyond the tokenizer."""
    cast("Any", torch).manual_seed(seed)
    fields: dict[str, Any] = {**_SIZES, **(_EXPERTS if kind.endswith("moe") else {}), **sizes}
    module = cast("Any", AutoModelForCausalLM).from_config(CONFIGS[kind](**fields))
    module.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """One token for each of `CHARACTERS`."""
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(CHARACTERS)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def load(folder: Path) -> embedded_model.Model:
    return embedded_model.load(folder, dtype="float32", device="cpu")


def make_core(
    folder: Path,
    *,
    kv_tokens: int = 4096,
    concurrency: int = 16,
    lower_tokens: int = 0,
    lower_folder: Path | None = None,
    speculator: Speculator | None = None,
) -> Core:
    model = load(folder)
    return Core(
        model,
        version=Version(0, 0),
        kv_tokens=kv_tokens,
        concurrency=concurrency,
        threads=1,
        lower=LowerTier(model.shape, lower_tokens, lower_folder or folder) if lower_tokens else None,
        speculator=speculator,
    )


def reference_logits(module: PreTrainedModel, token_ids: list[int], start: int) -> torch.Tensor:
    """That predict token_ids[start:] and one more, from one eager pass without the padded vocabulary.

    Float32, (len(token_ids) - start + 1, tokenizer's size).
    """
    use_attention(module, "eager")
    with torch.no_grad():
        logits = cast("Any", module)(input_ids=torch.tensor([token_ids])).logits
    use_attention(module, attention.NAME)
    return logits[0, start - 1 :, :TOKENIZER_SIZE].float()


def reference_logprobs(
    module: PreTrainedModel, token_ids: list[int], start: int, temperature: float = 1.0
) -> list[float]:
    """Of token_ids[start:]."""
    logprobs = (reference_logits(module, token_ids, start) / temperature).log_softmax(-1)
    return [float(logprobs[i, token]) for i, token in enumerate(token_ids[start:])]


class Desk:
    """Submits to a Core and keeps the answers by request id."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.answers: dict[str, GenerateReply | Refusal] = {}
        self.order: list[str] = []
        """Of the answers, each as often as it came."""

    def submit(self, name: str, token_ids: list[int], **options: object) -> None:
        self.submit_guided(name, token_ids, None, **options)

    def submit_guided(self, name: str, token_ids: list[int], guide: Guide | None, **options: object) -> None:
        fields = {
            "program_id": name,
            "max_new_tokens": 8,
            **options,
            "request_id": name,
            "token_ids": token_ids,
        }
        request = GenerateRequest.model_validate(fields)

        def answer(reply: GenerateReply | Refusal) -> None:
            self.answers[name] = reply
            self.order.append(name)

        self.core.submit(request, answer, guide)

    def run(self, steps: int = 2000) -> None:
        """Step until nothing is left; fails when that does not come."""
        for _ in range(steps):
            if not self.core.busy:
                return
            self.core.step()
        raise AssertionError(f"still busy after {steps} steps: {self.core.load()}")

    def reply(self, name: str) -> GenerateReply:
        answer = self.answers[name]
        assert isinstance(answer, GenerateReply), answer
        return answer

    def turn(self, name: str, token_ids: list[int], **options: object) -> GenerateReply:
        self.submit(name, token_ids, **options)
        self.run()
        return self.reply(name)


def publish(folder: Path, module: PreTrainedModel, version: str) -> Manifest:
    """Write the module's weights as a publication of `version`."""
    entries: list[TensorEntry] = []
    content = bytearray()
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        content += b"\0" * (-len(content) % 64)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(
            TensorEntry(
                name=name, dtype=dtype, shape=tuple(tensor.shape), offset=len(content), nbytes=len(data),
                checksum=zlib.crc32(data),
            )
        )  # fmt: skip
        content += data
    path = folder / f"weights-{version}"
    path.write_bytes(content)
    return Manifest(version=version, path=str(path), nbytes=len(content), tensors=tuple(entries))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, TOKENIZER_SIZE, length).tolist()
