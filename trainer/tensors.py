"""The few functions of torch and safetensors whose types are incomplete, given one each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
import torch.utils.checkpoint
from numpy.typing import NDArray
from torch import Tensor, nn

_torch = cast("Any", torch)
_files = cast("Any", safetensors.torch)
_recomputation = cast("Any", torch.utils.checkpoint)


def as_tensor(array: NDArray[Any]) -> Tensor:
    """A tensor over a copy of the array's memory, or over the memory itself where it is writable."""
    return _torch.from_numpy(array if array.flags.writeable else array.copy())


def as_array(tensor: Tensor) -> NDArray[Any]:
    return cast("Any", tensor.detach()).numpy()


def as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The tensor's bytes in row order; contiguous CPU tensors are not copied."""
    return cast("Any", tensor.detach().contiguous().cpu().flatten().view(torch.uint8)).numpy()


def backpropagate(loss: Tensor) -> None:
    cast("Any", loss).backward()


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, _source: Tensor) -> Tensor:  # noqa: ANN401
        return values

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: ANN401
        return None, grad_outputs[0]


def straight_through(values: Tensor, source: Tensor) -> Tensor:
    """`values`; their gradient is that of `source`."""
    return cast("Any", _StraightThrough).apply(values, source)


def named_parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module inside, by path."""
    return list(cast("Any", module).named_modules())


def own_parameters(part: nn.Module) -> list[tuple[str, Tensor]]:
    """Those of the module itself, not of the ones inside."""
    return list(cast("Any", part).named_parameters(recurse=False))


def seed_everything(seed: int) -> None:
    _torch.manual_seed(seed)


def split(tensor: Tensor, rows: int | list[int]) -> tuple[Tensor, ...]:
    """Pieces of as many rows, or of as many as each entry says."""
    return cast("Any", tensor).split(rows)


def unflatten(tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """With the first dimension cut into `sizes`."""
    return cast("Any", tensor).unflatten(0, sizes)


def recomputed(function: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> Tensor:
    """function(left, right), computed again in the backward pass instead of kept."""
    return _recomputation.checkpoint(function, left, right, use_reentrant=False)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    _files.save_file(tensors, str(path))


def load_tensors(path: Path) -> dict[str, Tensor]:
    return _files.load_file(str(path))
