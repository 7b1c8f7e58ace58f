"""Attention of a prompt's chunk as two matrix products, where torch's own kernel is slow.

On a CPU with products of bfloat16 and without tiles for them, the fused kernel of torch computes a chunk at
a sixth of the speed of a product.  Two plain products would round every score to bfloat16 before the softmax,
five times the fused kernel's error.  Here the scores are computed twice: once for their maximum, and then
less it, subtracted inside of the product, which adds up in float32.  The scores that matter are near zero
then, where rounding costs least (measured: 1.4 times the fused kernel's error, half of its time).

Suffixes as in `attention`.
"""

import time
from collections.abc import Callable
from functools import cache

import torch
from torch.nn.functional import scaled_dot_product_attention

_TILE = 128
"""Queries at a time: their scores stay in the cache."""
_FEWEST = 16
"""Queries below which the fused kernel is as good."""
_GAIN = 1.3
"""How much faster it has to be to be used."""
_TRIED = (128, 768)
"""Queries and keys of the trial."""
_TRIALS = 3


def suits(query: torch.Tensor) -> bool:
    """Whether chunks like this one (H, count, D) go by `attend`."""
    fits = query.dtype is torch.bfloat16 and query.device.type == "cpu" and query.shape[1] >= _FEWEST
    return fits and _is_faster(query.shape[0], query.shape[2])


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """From query (H, count, D), the last of the context, over keys and values (K, S, D): (H, count, D).

    Each query sees the keys up to its own, the last `window` of them.
    """
    heads, count, size = query.shape
    end = keys.shape[1]
    scaled = query * (size**-0.5 if scaling is None else scaling)
    out = query.new_empty((heads, count, values.shape[2]))
    for first in range(0, count, _TILE):
        tile = scaled[:, first : first + _TILE]
        last = end - count + first + tile.shape[1]
        start = 0 if window is None else max(0, last - tile.shape[1] - window + 1)
        out[:, first : first + _TILE] = _tile(tile, keys[:, start:last], values[:, start:last], window)
    return out


def _tile(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    heads, count, size = query.shape
    # The query heads of one key head become its queries: no key is repeated.
    grouped = query.reshape(keys.shape[0], -1, size)
    scores = _hide(torch.bmm(grouped, keys.transpose(1, 2)), count, window)
    shift = scores.amax(-1, keepdim=True)
    shifted = torch.cat((grouped, -shift), -1)
    ones = keys.new_ones((*keys.shape[:2], 1))
    scores = _hide(torch.bmm(shifted, torch.cat((keys, ones), -1).transpose(1, 2)), count, window)
    return torch.bmm(scores.softmax(-1), values).view(heads, count, -1)


def _hide(scores: torch.Tensor, count: int, window: int | None) -> torch.Tensor:
    """Scores (K, groups * count, S) without the keys that a query does not see; in place."""
    width = scores.shape[2]
    by_query = scores.view(-1, count, width)
    if window is None:
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        by_query[..., width - count :].masked_fill_(later, -torch.inf)
    else:
        places = torch.arange(width - count, width)[:, None]
        keys = torch.arange(width)
        by_query.masked_fill_((keys > places) | (keys <= places - window), -torch.inf)
    return scores


@cache
def _is_faster(heads: int, size: int) -> bool:
    """Than the fused kernel, on this machine; tried once."""
    count, width = _TRIED
    query = torch.zeros(heads, count, size, dtype=torch.bfloat16)
    keys = torch.zeros(heads, width, size, dtype=torch.bfloat16)
    seen = torch.ones(count, width, dtype=torch.bool)
    fused_s = _spent_s(
        lambda: scaled_dot_product_attention(query[None], keys[None], keys[None], attn_mask=seen)
    )
    return fused_s > _GAIN * _spent_s(lambda: attend(query, keys, keys, None, None))


def _spent_s(compute: Callable[[], object]) -> float:
    compute()
    spent: list[float] = []
    for _ in range(_TRIALS):
        before_s = time.thread_time()
        compute()
        spent.append(time.thread_time() - before_s)
    return min(spent)
