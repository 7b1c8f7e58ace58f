"""The few functions of torch and transformers whose types are incomplete, given one each."""

from mmap import mmap
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_torch = cast("Any", torch)
_transformers = cast("Any", transformers)


def as_tensor(array: NDArray[Any], device: torch.device | None = None) -> Tensor:
    """Over the array's own memory, unless another device is asked for."""
    return _torch.from_numpy(array).to(device)


def as_array(tensor: Tensor) -> NDArray[Any]:
    return cast("Any", tensor).cpu().numpy()


def as_list(tensor: Tensor) -> list[Any]:
    return cast("Any", tensor).tolist()


def quieten() -> None:
    """Progress bars and advice of the library do not belong into an engine's log."""
    _transformers.utils.logging.set_verbosity_error()
    _transformers.utils.logging.disable_progress_bar()


def read_config(folder: Path) -> PreTrainedConfig:
    return cast("Any", AutoConfig).from_pretrained(folder, local_files_only=True)


def context_tokens(config: PreTrainedConfig) -> int | None:
    """Positions that the model was made for, when it says so."""
    return getattr(cast("Any", config).get_text_config(), "max_position_embeddings", None)


def read_weights(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, attention: str
) -> tuple[PreTrainedModel, list[str], list[str]]:
    """The model, the parameters that the files lack, and those that have another shape there."""
    module, report = cast("Any", AutoModelForCausalLM).from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation=attention, use_safetensors=True,
        local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True,
    )  # fmt: skip
    other = [
        f"{name} is {tuple(there)}, not {tuple(asked)}" for name, there, asked in report["mismatched_keys"]
    ]
    return module, sorted(report["missing_keys"]), sorted(other)


def output_rows(module: PreTrainedModel) -> int:
    return int(cast("Any", module).get_output_embeddings().weight.shape[0])


def use_attention(module: PreTrainedModel, name: str) -> None:
    cast("Any", module).set_attn_implementation(name)


def move(module: PreTrainedModel, device: torch.device) -> None:
    cast("Any", module).to(device)


def from_buffer(buffer: mmap, dtype: torch.dtype) -> Tensor:
    """Over the buffer's own memory, which lives as long as the tensor."""
    return _torch.frombuffer(buffer, dtype=dtype)


def as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Over the memory of a tensor in one piece on the CPU."""
    return _bytes(tensor.detach().view(-1))


def copy(target: Tensor, source: Tensor) -> None:
    """Copy elements without the interpreter's lock, and on a CPU without torch's own threads.

    Those would spin against the engine's.
    """
    if target.device.type == source.device.type == "cpu":
        np.copyto(_bytes(target), _bytes(source))
    else:
        target.copy_(source, non_blocking=True)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    return cast("Any", tensor.view(torch.uint8)).numpy()
