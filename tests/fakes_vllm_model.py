"""What the fake vLLM computes: a distribution over tokens that follows from the weights' bytes and the
last token, and a prefix cache of whole blocks.
"""

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.numpy
from benchmarks.vllm_weights import safetensors_parts
from numpy.typing import NDArray

VOCABULARY, END = 64, 1

Floats = NDArray[np.float64]


def weights_of(folder: Path) -> int:
    """A number for all of its weights' bytes; OSError when there are none."""
    header, data = safetensors_parts(folder)
    names = sorted(name for name in header if name != "__metadata__")
    parts = [data[slice(*header[name]["data_offsets"])] for name in names]
    return zlib.crc32(b"".join(parts))


def vocabulary_of(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["vocab_size"]


def logprobs_after(weights: int, token: int, temperature: float = 1.0, size: int = VOCABULARY) -> Floats:
    """Of every token that may follow `token`."""
    logits = np.random.default_rng([weights, token]).normal(size=size) * 2 / (temperature or 1.0)
    return logits - np.log(np.exp(logits).sum())


def reference(folder: Path, token_ids: list[int], start: int) -> list[float]:
    """The log-probabilities of token_ids[start:] under the weights in `folder`."""
    weights = weights_of(folder)
    return [
        float(logprobs_after(weights, token_ids[at - 1])[token_ids[at]])
        for at in range(start, len(token_ids))
    ]


def make_fake_folder(folder: Path, seed: int) -> Path:
    """A model folder whose two tensors are random numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    dice = np.random.default_rng(seed)
    tensors = {
        name: dice.normal(size=(4, 3)).astype(np.float32) for name in ("embed.weight", "lm_head.weight")
    }
    cast("Any", safetensors.numpy).save_file(tensors, folder / "model.safetensors")
    config = {"architectures": ["Fake"], "vocab_size": VOCABULARY, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@dataclass(slots=True)
class FakeCache:
    """Whole blocks of contexts, by salt."""

    block: int = 16
    held: set[tuple[str, tuple[int, ...]]] = field(default_factory=set[tuple[str, tuple[int, ...]]])

    def found(self, salt: str, token_ids: list[int]) -> int:
        """Tokens whose KV is there; the last one is always computed."""
        ends = range(self.block, len(token_ids), self.block)
        return max((end for end in ends if (salt, tuple(token_ids[:end])) in self.held), default=0)

    def keep(self, salt: str, token_ids: list[int]) -> None:
        self.held.update(
            (salt, tuple(token_ids[:end])) for end in range(self.block, len(token_ids) + 1, self.block)
        )
