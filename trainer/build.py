"""Gives a model folder its first weights: a random start, by seed, for the architecture in its config.

    python -m sostenuto.trainer.build --folder DIR --seed N

Every matrix is drawn from N(0, 1/fan_in).  What writes into the residual stream starts far smaller,
0.05 / sqrt(2 layers) of that, so that each layer begins near the identity; small models then learn to
copy sooner.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from sostenuto.errors import ConfigError

RESIDUAL_SCALE = 0.05
WRITES_TO_RESIDUAL = ("o_proj.weight", "down_proj.weight")


def build(folder: Path, seed: int) -> int:
    """Write `model.safetensors` beside the `config.json` in `folder` and return the number of parameters.

    Equal seeds and configurations give equal weights.  Raises ConfigError when the folder has no usable
    configuration, or has weights already.
    """
    weights = folder / "model.safetensors"
    if weights.exists():
        raise ConfigError(f"folder: {weights} exists; name another folder, or remove the file")
    model = model_from_config(folder)
    draw_weights(model, seed)
    tensors = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    _save(tensors, weights)
    return sum(tensor.numel() for tensor in tensors.values())


def model_from_config(folder: Path) -> nn.Module:
    """The causal LM that `config.json` describes, with weights that mean nothing yet."""
    # transformers' own types are partial; this function is the one place that sees them.
    import transformers

    library = cast("Any", transformers)
    try:
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True)
        model = library.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as exc:
        raise ConfigError(f"folder: {folder} has no config.json of a causal LM: {exc}") from exc
    return cast("nn.Module", model)


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int) -> None:
    """Draw every parameter anew: matrices (rows, fan_in) as the module says, norms one, biases zero."""
    generator = torch.Generator().manual_seed(seed)
    layers = _count_layers(model)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        scale = RESIDUAL_SCALE / math.sqrt(2 * layers) if name.endswith(WRITES_TO_RESIDUAL) else 1.0
        parameter.normal_(0.0, scale / math.sqrt(parameter.shape[-1]), generator=generator)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    # safetensors' own types are partial, as transformers' are.
    import safetensors.torch

    cast("Any", safetensors.torch).save_file(tensors, path, metadata={"format": "pt"})


def _count_layers(model: nn.Module) -> int:
    return max(1, sum(name.endswith("down_proj.weight") for name, _ in model.named_parameters()))


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the first weights of a model folder.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    try:
        parameters = build(arguments.folder, arguments.seed)
    except ConfigError as exc:
        sys.stderr.write(f"{exc}\n")
        return 2
    sys.stdout.write(f"{parameters} parameters\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
