"""Whether an engine that others have started serves the job's model."""

import json
from pathlib import Path
from typing import Any

from sostenuto.errors import EngineError

_SHAPE = (
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "num_experts", "tie_word_embeddings",
)  # fmt: skip
"""What has to be equal for weights of one to fit into the other, as far as `config.json` tells it."""


def check_same_model(served: str, model: Path, where: str) -> None:
    """EngineError when the model that is served, as the engine names it, is another one than in `model`.

    Engines keep what they have of tensors that new weights do not bring, and say so in their logs alone.
    A name that is no folder here says nothing.
    """
    ours, theirs = _config(model), _config(Path(served))
    if ours is None or theirs is None:
        return
    for name in _SHAPE:
        if ours.get(name) != theirs.get(name):
            raise EngineError(
                f"{where}: it serves {served}, whose {name} is {theirs.get(name)}, and that of {model} is "
                f"{ours.get(name)}; start it with the job's model"
            )


def _config(folder: Path) -> dict[str, Any] | None:
    """The language model's part of its configuration."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return config | (config.get("text_config") or {})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
