"""Leaving out improbable tokens: what is left out has -inf, and the rest is not yet normalised again.

- Which tokens stay does not depend on other rows: of equally probable ones, those with lower ids.
- Probabilities are sorted as far as needed: the top_k, or the first _PREFIX; a row whose top_p lies
  beyond is sorted whole.

Shapes: N = rows, V = vocabulary, C = candidates, most probable first.
"""

from collections.abc import Sequence

import numpy as np
import torch

from sostenuto.runtime.engines.embedded.rows import Row
from sostenuto.runtime.engines.embedded.tensors import as_tensor

_PREFIX = 1024


def by_rank(logprobs: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Log-probabilities (N, V) of the top_k, and of those the first that have top_p together."""
    device, vocabulary = logprobs.device, logprobs.shape[1]
    limits = [min(row.sampling.top_k or vocabulary, vocabulary) for row in rows]
    shares = [row.sampling.top_p if row.sampling.top_p < 1 else float("inf") for row in rows]
    top_k = torch.tensor(limits, device=device)
    top_p = torch.tensor(shares, device=device, dtype=torch.float64)
    # One more shows whether the last one that stays has equals.
    candidates = min(max(row.sampling.top_k or _PREFIX for row in rows) + 1, vocabulary)
    found = _last_kept(_highest(logprobs, candidates), top_k, top_p)
    beyond = (found[0] == candidates) & (top_k > candidates)
    if beyond.any():
        whole = _last_kept(_highest(logprobs[beyond], vocabulary), top_k[beyond], top_p[beyond])
        for values, better in zip(found, whole, strict=True):
            values[beyond] = better
    return _without_surplus(logprobs.masked_fill(logprobs < found[1][:, None], float("-inf")), *found)


def by_ratio(logprobs: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Log-probabilities (N, V) of tokens at least min_p times as probable as the most probable one."""
    ratios = torch.tensor([row.sampling.min_p for row in rows], device=logprobs.device)
    floor = logprobs.amax(-1) + ratios.log()
    return logprobs.masked_fill(logprobs < floor[:, None], float("-inf"))


def _highest(logprobs: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest of each row, in descending order: (N, count)."""
    if logprobs.device.type != "cpu":
        return logprobs.topk(count).values
    # numpy's partition and sort use vector instructions: 5 to 10 times as fast as topk on a CPU.
    ascending = logprobs.numpy()
    if count < ascending.shape[1]:
        ascending = np.partition(ascending, -count, axis=1)[:, -count:]
    return as_tensor(np.ascontiguousarray(np.sort(ascending, axis=1)[:, ::-1]))


def _last_kept(
    values: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of candidates (N, C): how many stay, the value of the last one, and whether the next has it, too."""
    ranked = torch.arange(values.shape[1], device=values.device) < top_k[:, None]
    probabilities = values.exp().double() * ranked
    # What top_k leaves has less than 1; without top_k the candidates may not be all that there is.
    mass = torch.where(top_k <= values.shape[1], probabilities.sum(-1), 1.0)
    before = probabilities.cumsum(-1) - probabilities
    # The first one stays, however small the share.
    counts = (ranked & (before < (top_p * mass)[:, None])).sum(-1).clamp(min=1)
    least = values.gather(1, counts[:, None] - 1)[:, 0]
    after = values.gather(1, counts[:, None].clamp(max=values.shape[1] - 1))[:, 0]
    return counts, least, (after == least) & (counts < values.shape[1])


def _without_surplus(
    logprobs: torch.Tensor, counts: torch.Tensor, least: torch.Tensor, tied: torch.Tensor
) -> torch.Tensor:
    """(N, V) without those tokens of value `least` that are more than `counts`; `tied` rows have some."""
    if not tied.any():
        return logprobs
    rows = logprobs[tied]
    level = rows == least[tied][:, None]
    missing = counts[tied] - (rows > least[tied][:, None]).sum(-1)
    surplus = level & (level.cumsum(-1) > missing[:, None])
    return logprobs.index_copy(0, tied.nonzero()[:, 0], rows.masked_fill(surplus, float("-inf")))
