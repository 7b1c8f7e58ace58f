"""Turns a GGUF file into a folder in Hugging Face form: weights unpacked, tokenizer and chat template kept.

    python -m sostenuto.trainer.gguf --file MODEL.gguf --folder DIR

Packed (quantized) weights are unpacked in float32 and saved as bfloat16, which holds far more than the few
bits they came from.  The tokenizer and the chat template are those that the file carries.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from sostenuto.errors import ConfigError

_REMEDY = "give a GGUF file of a causal language model that the installed transformers knows"


def convert(file: Path, folder: Path) -> int:
    """Write config, weights, tokenizer and chat template into `folder`; return the number of parameters.

    ConfigError when the file is not understood, or lacks weights or a chat template.
    """
    if not file.is_file():
        raise ConfigError(f"file: {file} does not exist")
    if find_spec("gguf") is None:
        raise ConfigError("reading GGUF files needs the package gguf; pip install 'sostenuto[examples]'")
    # transformers' own types are partial; this module and trainer/model.py are what sees them.
    import transformers

    library: Any = transformers
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    try:
        config = library.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer = library.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (OSError, ValueError, KeyError) as exc:
        raise ConfigError(f"file: {file} is not understood: {exc}; {_REMEDY}") from exc
    if not tokenizer.chat_template:
        raise ConfigError(f"file: {file} carries no chat template; use the model's folder instead")
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(model, file)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _fill(model: nn.Module, file: Path) -> None:
    """Load the file's tensors, unpacked; all that is missing is what is tied to one that is there."""
    from transformers import modeling_gguf_pytorch_utils as library

    found = cast("Any", library).load_gguf_checkpoint(
        str(file), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
    )
    tensors = cast("dict[str, torch.Tensor]", found["tensors"])
    parameters = dict(model.named_parameters())
    unknown, missing = sorted(tensors.keys() - model.state_dict().keys()), sorted(parameters.keys() - tensors)
    if unknown or missing:
        raise ConfigError(
            f"file: {file} does not fit its own configuration: {missing=}, {unknown=}; {_REMEDY}"
        )
    try:
        model.load_state_dict(tensors, strict=False)
    except RuntimeError as exc:
        raise ConfigError(f"file: {file}: tensors do not fit: {exc}; {_REMEDY}") from exc


def main() -> int:
    parser = argparse.ArgumentParser(description="Turn a GGUF file into a folder in Hugging Face form.")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        parameters = convert(arguments.file, arguments.folder)
    except ConfigError as exc:
        sys.stderr.write(f"{exc}\n")
        return 2
    sys.stdout.write(f"{parameters} parameters\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
