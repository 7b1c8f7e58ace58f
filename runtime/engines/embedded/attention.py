"""Attention over KV that stays where it is, for tokens of many requests packed into one row.

The model runs with a batch of one, (1, T): first the requests that decode, one token each and what is
drafted for them, ordered as they lie in their lanes; then the chunks of prompts.  Only attention mixes
tokens, and this function is the attention, so any transformers model that takes a registered one works
unchanged.  Keys and values are written in place; nothing is gathered (measured: a gather costs more than
the matmuls it serves).

Suffixes: T = packed tokens, N = rows, H = query heads, K = key heads, S = key positions, D = head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from sostenuto.runtime.engines.embedded import shifted
from sostenuto.runtime.engines.embedded.tensors import as_list

NAME = "sostenuto_slots"

_MOST_PADDING = 1.15
"""Keys that are read over those that are seen, from which on a CPU computes row by row."""

# What some models hand to their attention and this one does not do.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True, eq=False)
class Decode:
    """New tokens for each of the first N rows of a lane: one, or a few where drafts are verified.

    Only attention pads a row to the most tokens of one; the packed tokens are exact.
    """

    first: int
    """Place of its first token among the packed ones."""
    keys: torch.Tensor
    """(layers, rows, K, width, D), written in place."""
    values: torch.Tensor
    counts: tuple[int, ...]
    """Tokens of each row, N of them; together T."""
    positions: torch.Tensor
    """(T,) of the new tokens."""
    longest: int
    rows: torch.Tensor = field(init=False)
    """(T,)"""
    _ragged: "_Ragged | None" = field(init=False)
    _lengths: tuple[int, ...] = field(init=False)
    """Of the rows, where each is attended alone; else empty."""
    _masks: dict[tuple[int | None, int], torch.Tensor] = field(
        init=False, default_factory=dict[tuple[int | None, int], torch.Tensor]
    )

    def __post_init__(self) -> None:
        device, counts = self.positions.device, torch.tensor(self.counts)
        rows = torch.arange(len(self.counts)).repeat_interleave(counts)
        object.__setattr__(self, "rows", rows.to(device))
        object.__setattr__(self, "_ragged", None if max(self.counts) == 1 else _ragged(counts, device))
        object.__setattr__(self, "_lengths", self._alone())

    @property
    def last(self) -> int:
        return self.first + self.positions.shape[0]

    def _alone(self) -> tuple[int, ...]:
        if self._ragged is not None or self.positions.device.type != "cpu":
            return ()
        lengths: list[int] = as_list(self.positions + 1)
        padded = self.longest * len(lengths)
        return tuple(lengths) if padded > _MOST_PADDING * sum(lengths) else ()

    def mask(self, window: int | None, heads: int) -> torch.Tensor:
        """(N, 1, heads * W, S), True where a key is seen; W = the most tokens of a row."""
        if (window, heads) not in self._masks:
            keys = torch.arange(self.longest, device=self.positions.device)
            seen = _seen(self.positions[:, None], keys[None, :], window)
            if self._ragged is None:
                self._masks[window, heads] = seen[:, None, None, :]
            else:
                padded = self._ragged.pad(seen)[:, None, None]
                self._masks[window, heads] = padded.expand(-1, 1, heads, -1, -1).flatten(2, 3)
        return self._masks[window, heads]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        scaling: float | None, window: int | None,
    ) -> torch.Tensor:  # fmt: skip
        """Append key and value (K, T, D), attend from query (H, T, D); returns (T, H, D)."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self.rows, :, self.positions] = key.transpose(0, 1)
        values[self.rows, :, self.positions] = value.transpose(0, 1)
        queries, count, ragged = query.transpose(0, 1), len(self.counts), self._ragged
        group = query.shape[0] // key.shape[0]
        # The query heads of one key head become its queries: no key is repeated.
        shape = (count, key.shape[0], group, query.shape[2])
        grouped = queries.reshape(shape) if ragged is None else ragged.group(queries, group)
        if self._lengths and window is None:
            return self._attend_alone(grouped, keys, values, scaling)
        out = scaled_dot_product_attention(
            grouped, keys[:count, :, : self.longest], values[:count, :, : self.longest],
            attn_mask=self.mask(window, 1 if ragged is None else group), scale=scaling,
        )  # fmt: skip
        return out.flatten(1, 2) if ragged is None else ragged.ungroup(out, group)

    def _attend_alone(
        self, grouped: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """From (N, K, group, D), reading of each row what is there; returns (N, H, D)."""
        outs = [
            scaled_dot_product_attention(
                grouped[row, None], keys[row, None, :, :length], values[row, None, :, :length], scale=scaling
            )
            for row, length in enumerate(self._lengths)
        ]
        return torch.cat(outs).flatten(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class _Ragged:
    """Between T packed tokens and N rows padded to W tokens each."""

    places: torch.Tensor
    """(N, W): which packed token; the last of a row again where it has fewer."""
    back: torch.Tensor
    """(T,): where each packed token lies among the N * W."""

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """(T, ...) to (N, W, ...)."""
        return packed[self.places]

    def group(self, queries: torch.Tensor, group: int) -> torch.Tensor:
        """(T, H, D) to (N, K, group * W, D)."""
        rows, width = self.places.shape
        heads, size = queries.shape[1:]
        padded = self.pad(queries).view(rows, width, heads // group, group, size)
        return padded.permute(0, 2, 3, 1, 4).flatten(2, 3)

    def ungroup(self, out: torch.Tensor, group: int) -> torch.Tensor:
        """(N, K, group * W, D) to (T, H, D)."""
        rows, keys, _, size = out.shape
        padded = out.view(rows, keys, group, -1, size).permute(0, 3, 1, 2, 4)
        return padded.reshape(-1, keys * group, size)[self.back]


def _ragged(counts: torch.Tensor, device: torch.device) -> _Ragged:
    width = int(counts.max())
    inside = torch.arange(width).minimum(counts[:, None] - 1)
    first = counts.cumsum(0) - counts
    back = (torch.arange(width) < counts[:, None]).flatten().nonzero()[:, 0]
    return _Ragged((first[:, None] + inside).to(device), back.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """`count` consecutive tokens of one request, after `start` whose KV is there."""

    first: int
    keys: torch.Tensor
    """(layers, K, width, D), written in place."""
    values: torch.Tensor
    start: int
    count: int
    _masks: dict[int | None, torch.Tensor] = field(init=False, default_factory=dict[int | None, torch.Tensor])

    @property
    def last(self) -> int:
        return self.first + self.count

    def mask(self, window: int | None) -> torch.Tensor:
        """(count, S), True where a key is seen."""
        if window not in self._masks:
            end = self.start + self.count
            keys = torch.arange(end, device=self.keys.device)
            self._masks[window] = _seen(keys[self.start :, None], keys[None, :], window)
        return self._masks[window]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        scaling: float | None, window: int | None,
    ) -> torch.Tensor:  # fmt: skip
        """Append key and value (K, count, D), attend from query (H, count, D); returns (count, H, D)."""
        end = self.start + self.count
        keys, values = self.keys[layer], self.values[layer]
        keys[:, self.start : end] = key
        values[:, self.start : end] = value
        if shifted.suits(query):
            out = shifted.attend(query, keys[:, :end], values[:, :end], scaling, window)
            return out.transpose(0, 1)
        whole = (self.start == 0 or self.count == 1) and (window is None or window >= end)
        out = scaled_dot_product_attention(
            query[None], keys[None, :, :end], values[None, :, :end],
            attn_mask=None if whole else self.mask(window), is_causal=whole and self.count > 1,
            scale=scaling, enable_gqa=query.shape[0] != key.shape[0],
        )  # fmt: skip
        return out[0].transpose(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Who the T packed tokens of one forward pass belong to; together the parts cover them in order."""

    decodes: tuple[Decode, ...]
    chunks: tuple[Chunk, ...]

    @property
    def parts(self) -> tuple[Decode | Chunk, ...]:
        return (*self.decodes, *self.chunks)


def _seen(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    slots: Step,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **extra: object,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in each layer: (1, H, T, D) in, (1, T, H, D) out."""
    _refuse_unsupported(extra)
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    outs = [
        part.attend(
            layer, query[0, :, part.first : part.last], key[0, :, part.first : part.last],
            value[0, :, part.first : part.last], scaling, sliding_window,
        )
        for part in slots.parts
    ]  # fmt: skip
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[None], None


def _refuse_unsupported(extra: Mapping[str, object]) -> None:
    for name in _UNSUPPORTED:
        if extra.get(name) is not None:
            raise NotImplementedError(f"the model's attention needs {name!r}")


def register() -> None:
    """Make `NAME` known to transformers as an attention without masks of its own."""
    AttentionInterface.register(NAME, _attend)  # pyright: ignore[reportUnknownMemberType]
