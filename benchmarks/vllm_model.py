"""A random Llama of a size at which one CPU core shows prefill and decode apart."""

import json
from pathlib import Path
from typing import Any, cast

CONTEXT_TOKENS = 4096
VOCABULARY = 4096
_SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT_TOKENS,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def make_model(folder: Path, *, seed: int = 0, tied: bool = True) -> Path:
    """Save it in float32 with a tokenizer of numbers; nothing happens when it is there.

    `tied`: its output layer is its embedding.
    """
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    cast("Any", torch).manual_seed(seed)
    module = cast("Any", LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=tied)))
    module.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "0", "eos_token": "1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
