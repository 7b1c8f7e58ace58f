"""Sequences packed into one row, (1, N): only attention mixes tokens, and this one keeps to each sequence.

- Registered with transformers, so that any model that takes a registered attention works unchanged.
- Sequences of equal length, one after the other, share a call; no mask is made and nothing is padded.
  Measured on a CPU: docs/trainer.md.
- Without `sequence_lengths` each row is one sequence, as in any model.

Suffixes: N = packed tokens, H = query heads, K = key heads, D = head size.
"""

from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from sostenuto.errors import Unsupported
from sostenuto.trainer.tensors import split, unflatten

NAME = "sostenuto_packed"

# What some models hand to their attention and this one does not do.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sequence_lengths: tuple[int, ...] | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Causal attention of query (1, H, N, D) over keys and values (1, K, N, D); gives (1, N, H, D).

    Unsupported for what would change the result and is not done here.
    """
    asked = [name for name in _UNSUPPORTED if others.get(name) is not None]
    if asked or attention_mask is not None:
        raise Unsupported(f"packed attention: {', '.join(asked) or 'a mask'} is not done here")
    parts = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    if sequence_lengths is None:
        return _causal(parts, scaling, sliding_window), None
    runs = [(len(list(same)), length) for length, same in groupby(sequence_lengths)]
    # Split, not sliced: the backward pass then joins the gradients once instead of once a slice.
    pieces = [split(tensor[0], [count * length for count, length in runs]) for tensor in parts]
    found: list[Tensor] = []
    for shape, q, k, v in zip(runs, *pieces, strict=True):
        rows = (unflatten(q, shape), unflatten(k, shape), unflatten(v, shape))
        found.append(_causal(rows, scaling, sliding_window).flatten(0, 1))
    return torch.cat(found).unsqueeze(0), None


def _causal(parts: tuple[Tensor, Tensor, Tensor], scaling: float | None, window: int | None) -> Tensor:
    """Of queries, keys and values of sequences of equal length, (sequences, tokens, heads, D) each."""
    query, key, value = parts
    mask = _window(query.shape[1], window, query.device)
    out = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2)


def _window(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which keys a query sees; None: all up to its own."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    behind = places[:, None] - places[None, :]
    return (behind >= 0) & (behind < window)


AttentionInterface.register(NAME, attend)  # pyright: ignore[reportUnknownMemberType]
