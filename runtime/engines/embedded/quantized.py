"""A model whose matrices are kept in few bits and are made whole, one module at a time, while it computes.

What lies in memory is the codes and scales, and those of the next version once one was prepared; a module's
matrix in the model's dtype lives as long as the module runs.
"""

from torch import Tensor, nn
from transformers import PreTrainedModel

from sostenuto.trainer.quantization import (
    Format,
    Quantized,
    compute_with,
    dequantize,
    quantize,
    quantized_weights,
)


def quantize_model(module: PreTrainedModel, kind: Format) -> dict[str, Quantized]:
    """Quantize in place; the codes by parameter name.  Whoever exchanges their data changes the weights."""
    kept: dict[str, Quantized] = {}
    for weight in quantized_weights(module):
        dtype, quantized = weight.tensor.dtype, quantize(weight.tensor, kind)
        _drop(weight.part, weight.attribute)
        compute_with(weight, lambda quantized=quantized, dtype=dtype: dequantize(quantized, dtype))
        kept[weight.name] = quantized
    return kept


def _drop(part: nn.Module, name: str) -> None:
    """The parameter is gone and its name is kept, for code that asks whether there is one."""
    setattr(part, name, None)


def weight_bytes(module: PreTrainedModel, quantized: dict[str, Quantized]) -> int:
    """What one version of the weights takes in memory; what is shared counts once."""
    tensors: dict[int, Tensor] = {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values()}
    return sum(tensor.nbytes for tensor in tensors.values()) + sum(q.nbytes for q in quantized.values())
