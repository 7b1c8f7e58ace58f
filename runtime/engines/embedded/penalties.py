"""Penalties on tokens that were there before.

Repetition (Keskar et al. 2019) concerns every token of the context, once; presence and frequency concern
what the turn has sampled, once and for each time.

Shapes: N = rows, V = vocabulary, M = tokens that are penalised, of all rows together.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from sostenuto.runtime.engines.embedded.rows import Row
from sostenuto.runtime.engines.embedded.tensors import as_tensor

_LARGEST = 1e30
"""A logit stays finite, whatever the penalty."""


def penalised(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """A copy of float32 logits (N, V) with the penalties of each row."""
    logits = logits.clone()
    vocabulary, device = logits.shape[1], logits.device
    seen = _Places([np.unique(row.tokens) for row in rows], vocabulary, device)
    strengths = seen.of([row.sampling.repetition_penalty for row in rows])
    values = logits[seen.index]
    seen.write(logits, torch.where(values > 0, values / strengths, values * strengths))
    counted = [np.unique(row.tokens[row.prompt_tokens :], return_counts=True) for row in rows]
    sampled = _Places([tokens for tokens, _ in counted], vocabulary, device)
    times = sampled.each([count for _, count in counted])
    presence = sampled.of([row.sampling.presence_penalty for row in rows])
    frequency = sampled.of([row.sampling.frequency_penalty for row in rows])
    sampled.write(logits, logits[sampled.index] - presence - frequency * times)
    return logits


class _Places:
    """Distinct tokens of each row, as M places in (N, V); ids without a logit have none."""

    def __init__(self, by_row: list[NDArray[np.int32]], vocabulary: int, device: torch.device) -> None:
        tokens = np.concatenate(by_row)
        self._kept = tokens < vocabulary
        self._device = device
        self._rows = np.repeat(np.arange(len(by_row)), [len(tokens) for tokens in by_row])[self._kept]
        self.index = self._put(self._rows), self._put(tokens[self._kept].astype(np.int64))

    def of(self, by_row: list[float]) -> torch.Tensor:
        """A number of each row, at its places: (M,)."""
        return self._put(np.array(by_row).clip(-_LARGEST, _LARGEST).astype(np.float32)[self._rows])

    def each(self, by_row: list[NDArray[np.int64]]) -> torch.Tensor:
        """A number of each token, at its place: (M,)."""
        return self._put(np.concatenate(by_row)[self._kept].astype(np.float32))

    def write(self, logits: torch.Tensor, values: torch.Tensor) -> None:
        logits[self.index] = values.clamp(-_LARGEST, _LARGEST)

    def _put(self, array: NDArray[np.generic]) -> torch.Tensor:
        return as_tensor(array, self._device)
