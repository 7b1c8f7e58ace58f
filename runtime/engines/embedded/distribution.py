"""The distribution that the next token is drawn from, as `wire.Sampling` states it.

Each row depends on its own logits and settings alone, and a part costs nothing where no row asks for it.

Shapes: N = rows, V = vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from sostenuto.runtime.engines.embedded.penalties import penalised
from sostenuto.runtime.engines.embedded.rows import Row, changed
from sostenuto.runtime.engines.embedded.tensors import as_tensor
from sostenuto.runtime.engines.embedded.truncation import by_rank, by_ratio

_COLDEST, _HOTTEST = 1e-30, 1e30
_COLD = 1e-3
"""Below it, logits divided by the temperature can overflow float32."""


def log_probabilities(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Float32 log-probabilities of the distribution that each row is drawn from, (N, V); -inf: left out.

    `logits` is not changed.
    """
    logits = changed(logits.float(), rows, penalised, lambda row: row.sampling.penalises)
    logits = changed(logits, rows, _allowed, lambda row: row.allowed is not None)
    logprobs = tempered(logits, np.array([row.sampling.temperature for row in rows]))
    logprobs = changed(logprobs, rows, by_rank, lambda row: row.sampling.ranks)
    logprobs = changed(logprobs, rows, by_ratio, lambda row: row.sampling.min_p > 0)
    return changed(logprobs, rows, _normalised, lambda row: row.sampling.truncates)


def tempered(logits: torch.Tensor, temperatures: NDArray[np.float64]) -> torch.Tensor:
    """Float32 log-softmax of logits / temperature, (N, V); temperature 0 counts as 1."""
    logits = logits.float()
    scale = np.where(temperatures == 0, 1.0, temperatures).clip(_COLDEST, _HOTTEST).astype(np.float32)
    cold = scale < _COLD
    if cold.any():
        largest = torch.where(as_tensor(cold, logits.device), logits.amax(-1), 0.0)
        logits = logits - largest[:, None]
    if (scale != 1).any():
        logits = logits / as_tensor(scale, logits.device)[:, None]
    return logits.log_softmax(-1)


def _allowed(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    words = np.stack([row.allowed for row in rows if row.allowed is not None])
    bits = np.unpackbits(words.astype("<i4").view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    return logits.masked_fill(as_tensor(bits == 0, logits.device), float("-inf"))


def _normalised(logprobs: torch.Tensor, _rows: Sequence[Row]) -> torch.Tensor:
    return logprobs.log_softmax(-1)
