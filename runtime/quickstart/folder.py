"""The quickstart's model folder, in Hugging Face form, without its weights.

`python -m sostenuto.trainer.build` adds those in a process of its own: torch is never loaded here.
"""

import json
from pathlib import Path

from pydantic import JsonValue
from tokenizers import Tokenizer

from sostenuto.runtime.quickstart.recipe import ModelShape
from sostenuto.runtime.quickstart.tokenizer import CHAT_TEMPLATE, END


def write_folder(folder: Path, tokenizer: Tokenizer, shape: ModelShape) -> None:
    """Write tokenizer, chat template and configuration into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    end_id = tokenizer.token_to_id(END)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config(shape))
    _write(folder / "config.json", _model_config(shape, tokenizer.get_vocab_size(), end_id))
    _write(folder / "generation_config.json", {"eos_token_id": end_id, "pad_token_id": end_id})


def _tokenizer_config(shape: ModelShape) -> dict[str, JsonValue]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.context_tokens,
    }


def _model_config(shape: ModelShape, vocabulary: int, end_id: int | None) -> dict[str, JsonValue]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "max_position_embeddings": shape.context_tokens,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end_id,
        "pad_token_id": end_id,
        "dtype": "float32",
    }


def _write(path: Path, content: dict[str, JsonValue]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
