"""KV of a draft model, by program, beside the pool.

A row says which tokens it was computed for, so nothing has to tell it what was rejected, ended or
rewritten: what is no prefix of the next context is not used.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch

from sostenuto.runtime.engines.embedded.lanes import KvShape
from sostenuto.runtime.engines.embedded.turn import Ids, common_prefix

_NARROWEST = 256


@dataclass(slots=True, eq=False)
class DraftRow:
    """Of one program."""

    keys: torch.Tensor
    """(layers, K, width, D)"""
    values: torch.Tensor
    tokens: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Those whose KV is there."""

    @property
    def width(self) -> int:
        return self.keys.shape[2]

    def keep(self, context: Ids) -> None:
        """Forget what is not of `context`; its last token is computed again, for its logits."""
        self.tokens = self.tokens[: min(common_prefix(self.tokens, context), len(context) - 1)]

    def widen(self, shape: KvShape, width: int) -> None:
        keys, values = shape.empty(width)
        count = len(self.tokens)
        keys[:, :, :count].copy_(self.keys[:, :, :count])
        values[:, :, :count].copy_(self.values[:, :, :count])
        self.keys, self.values = keys, values


class DraftKv:
    """At most `budget_tokens` of row width in all; the least recently used rows go first."""

    def __init__(self, shape: KvShape, *, budget_tokens: int) -> None:
        self._shape = shape
        self._budget = budget_tokens
        self._rows: dict[str, DraftRow] = {}

    @property
    def width(self) -> int:
        """Of all rows."""
        return sum(row.width for row in self._rows.values())

    def row(self, program_id: str, context: Ids, room: int, in_use: Collection[str]) -> DraftRow | None:
        """The program's row, for `context` and `room` tokens; None where the budget has no place for it.

        Rows of programs in `in_use` stay.
        """
        row = self._rows.pop(program_id, None) or DraftRow(*self._shape.empty(0))
        width = _width(len(context) + room)
        self._evict(width, in_use)
        if self.width + max(width, row.width) > self._budget:
            return None
        row.keep(context)
        if width > row.width:
            row.widen(self._shape, width)
        self._rows[program_id] = row
        return row

    def forget(self, program_id: str) -> None:
        self._rows.pop(program_id, None)

    def clear(self) -> None:
        self._rows.clear()

    def _evict(self, width: int, in_use: Collection[str]) -> None:
        for name in [name for name in self._rows if name not in in_use]:
            if self.width + width <= self._budget:
                return
            del self._rows[name]


def _width(tokens: int) -> int:
    return max(_NARROWEST, 1 << (tokens - 1).bit_length())
