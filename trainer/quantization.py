"""Weights in fewer bits, by one set of rules for the engine that generates and the trainer that learns.

- `fake_quantize(w)` has exactly the bits of `dequantize(quantize(w))`, so at equal weights both sides compute
  with equal values; its gradient is that of `w` itself (straight through).
- Scales are found in float32 from the weight as it was published, whatever the model computes in.
- What is quantized: matrices of linear layers and of experts.  Embeddings, the output layer, norms, biases,
  routers, activations and KV are not.

Formats:
- int8: one scale for each output channel, symmetric, codes -127 .. 127.
- fp8: float8 e4m3 (largest 448), one float32 scale for each block of 128 x 128.
- nvfp4: 4-bit e2m1 (0, .5, 1, 1.5, 2, 3, 4, 6 with a sign), one e4m3 scale for each 16 inputs of a row, one
  float32 scale for each matrix; two codes a byte.

Suffixes: R = rows (outputs), C = columns (inputs) of a matrix; ... = experts, each a matrix of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sostenuto.trainer.tensors import named_parts, own_parameters, straight_through

Format = Literal["int8", "fp8", "nvfp4"]

FP8_BLOCK = 128
FP4_BLOCK = 16
_FP8_MAX = 448.0
_FP4_MAX = 6.0
_FP8 = torch.float8_e4m3fn
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ROUTERS = ("gate", "router")


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """One weight (..., R, C) in few bits.  `tensors` are its codes and scales, as the format has them."""

    format: Format
    shape: tuple[int, ...]
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@torch.no_grad()
def quantize(weight: Tensor, kind: Format) -> Quantized:
    """The codes and scales of a weight (..., R, C)."""
    tensors = _QUANTIZERS[kind](weight.detach().float())
    return Quantized(kind, tuple(weight.shape), tensors)


@torch.no_grad()
def dequantize(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """The values that the codes stand for, (..., R, C); products in float32, rounded to `dtype` once."""
    values = _DEQUANTIZERS[quantized.format](*quantized.tensors)
    rows, columns = quantized.shape[-2:]
    return values[..., :rows, :columns].to(dtype)


def fake_quantize(weight: Tensor, kind: Format) -> Tensor:
    """The values that `weight` has after quantization, in its dtype; the gradient passes straight through."""
    return straight_through(dequantize(quantize(weight, kind), weight.dtype), weight)


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A parameter that is quantized, in the module that computes with it."""

    name: str
    """In the model's state dict."""
    part: nn.Module
    attribute: str

    @property
    def tensor(self) -> Tensor:
        return cast("Tensor", getattr(self.part, self.attribute))


def quantized_weights(module: nn.Module) -> list[Weight]:
    """The parameters of `module` that are quantized; the same for the engine and the trainer."""
    head = cast("Any", module).get_output_embeddings()
    return [
        Weight(f"{path}.{name}", part, name)
        for path, part in named_parts(module)
        if part is not head and not _is_router(path)
        for name, tensor in own_parameters(part)
        if (isinstance(part, nn.Linear) and tensor.ndim == 2) or tensor.ndim == 3
    ]


def compute_with(weight: Weight, value: Callable[[], Tensor]) -> None:
    """From now on the part computes with `value()`, found anew for each of its forward passes.

    Also where a backward pass computes a forward pass again.  The parameter itself stays as it is.
    """

    def put(part: nn.Module, _inputs: object) -> None:
        # An attribute of the instance comes before its parameter of the same name.
        vars(part)[weight.attribute] = value()

    def remove(part: nn.Module, _inputs: object, _output: object) -> None:
        vars(part).pop(weight.attribute, None)

    weight.part.register_forward_pre_hook(put)
    weight.part.register_forward_hook(remove, always_call=True)


def _is_router(path: str) -> bool:
    last = path.rpartition(".")[2]
    return last in _ROUTERS or last.endswith("_gate")


def _scales(largest: Tensor, top: float) -> Tensor:
    """Such that `largest` has the code `top`; one where everything is zero."""
    scales = largest / top
    return torch.where(scales > 0, scales, 1.0)


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (..., R, C) int8 and scales (..., R, 1) float32."""
    scales = _scales(weight.abs().amax(-1, keepdim=True), 127.0)
    return (weight / scales).round().clamp(-127, 127).to(torch.int8), scales


def _from_int8(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * scales


def _to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (..., R, C) e4m3 and scales (..., ceil(R / 128), ceil(C / 128)) float32."""
    rows, columns = weight.shape[-2:]
    padded = pad(weight, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    high, wide = padded.shape[-2] // FP8_BLOCK, padded.shape[-1] // FP8_BLOCK
    blocks = padded.reshape(*weight.shape[:-2], high, FP8_BLOCK, wide, FP8_BLOCK)
    scales = _scales(blocks.abs().amax((-3, -1)), _FP8_MAX)
    codes = (weight / _over_blocks(scales, rows, columns)).clamp(-_FP8_MAX, _FP8_MAX)
    return codes.to(_FP8), scales


def _from_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * _over_blocks(scales, codes.shape[-2], codes.shape[-1])


def _over_blocks(scales: Tensor, rows: int, columns: int) -> Tensor:
    """The scale of each element."""
    wide = scales.repeat_interleave(FP8_BLOCK, -2).repeat_interleave(FP8_BLOCK, -1)
    return wide[..., :rows, :columns]


def _to_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (..., R, C / 2) uint8, block scales (..., R, C / 16) e4m3, matrix scales (..., 1, 1) float32."""
    blocks = _in_blocks(pad(weight, (0, -weight.shape[-1] % FP4_BLOCK)))
    largest = blocks.abs().amax(-1)
    matrix = _scales(largest.amax((-2, -1), keepdim=True), _FP8_MAX * _FP4_MAX)
    # A block so much smaller than the largest that its scale would be zero is zero.
    scales = (largest / _FP4_MAX / matrix).clamp(max=_FP8_MAX).to(_FP8)
    steps = scales.float() * matrix
    values = torch.where(steps[..., None] > 0, blocks / steps[..., None], 0.0).flatten(-2)
    codes = _e2m1(values)
    return codes[..., ::2] | (codes[..., 1::2] << 4), scales, matrix


def _in_blocks(values: Tensor) -> Tensor:
    return values.reshape(*values.shape[:-1], -1, FP4_BLOCK)


def _e2m1(values: Tensor) -> Tensor:
    """The nearest 4-bit code, ties to the even one: sign in bit 3."""
    sizes = values.abs().clamp(max=_FP4_MAX)
    steps = torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0))
    rounded = (sizes / steps).round() * steps
    grid = torch.tensor(_FP4_VALUES, device=values.device)
    codes = torch.searchsorted(grid, rounded.contiguous()).to(torch.uint8)
    return codes | (values.signbit().to(torch.uint8) << 3)


def _from_nvfp4(codes: Tensor, scales: Tensor, matrix: Tensor) -> Tensor:
    values = torch.tensor((*_FP4_VALUES, *(-value for value in _FP4_VALUES)), device=codes.device)
    pairs = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2)
    blocks = _in_blocks(values[pairs.int()])
    return (blocks * (scales.float() * matrix)[..., None]).flatten(-2)


_QUANTIZERS: dict[Format, Any] = {"int8": _to_int8, "fp8": _to_fp8, "nvfp4": _to_nvfp4}
_DEQUANTIZERS: dict[Format, Any] = {"int8": _from_int8, "fp8": _from_fp8, "nvfp4": _from_nvfp4}
