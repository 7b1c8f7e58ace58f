"""What one row of logits is drawn with, and what comes out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sostenuto.runtime.engines.wire import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Of the token that follows `tokens`."""

    sampling: Sampling
    tokens: NDArray[np.int32]
    """The whole context, (position,)."""
    prompt_tokens: int
    """The leading ones, which the turn did not sample."""
    allowed: NDArray[np.int32] | None = None
    """What a grammar allows next: bit t % 32 of word t // 32 is token t; (at least V / 32,)."""


TopLogprobs = list[tuple[int, float]]
"""The most probable tokens with their log-probabilities, best first."""


class Drawn(NamedTuple):
    token: int
    logprob: float
    top: TopLogprobs
    """Empty unless the request asks for it."""


def changed(
    values: torch.Tensor,
    rows: Sequence[Row],
    change: Callable[[torch.Tensor, Sequence[Row]], torch.Tensor],
    concerns: Callable[[Row], bool],
) -> torch.Tensor:
    """`values` (N, V) after `change` of the rows that it concerns; the same tensor when there are none."""
    concerned = [i for i, row in enumerate(rows) if concerns(row)]
    if not concerned:
        return values
    if len(concerned) == len(rows):
        return change(values, rows)
    index = torch.tensor(concerned, device=values.device)
    return values.index_copy(0, index, change(values[index], [rows[i] for i in concerned]))
