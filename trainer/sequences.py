"""Sums and means over the tokens of each sequence.  Suffix M: tokens, S: sequences."""

import torch
from torch import Tensor


def sum_of_each(sequences: Tensor, values: Tensor) -> Tensor:
    """(S,) sums of `values` (M,) by `sequences` (M,), numbers from 0 without gaps."""
    count = int(sequences.max()) + 1 if sequences.numel() else 0
    sums = torch.zeros(count, dtype=values.dtype, device=values.device)
    return sums.index_add(0, sequences, values)


def mean_of_each(sequences: Tensor, values: Tensor) -> Tensor:
    """(S,) means of `values` (M,)."""
    return sum_of_each(sequences, values) / sum_of_each(sequences, torch.ones_like(values))
