"""How many environments are prepared ahead of their programs' admission.

As many as are admitted while one is made, and as many as the free KV would take in at once.
"""

from math import ceil, exp

_MARGIN = 1.5
_SMOOTHING = 0.1
_FIRST_FOOTPRINT = 4096
"""Tokens of a first prompt, before one was seen."""
_WINDOW_S = 120.0
"""Admissions are counted with weights that fall to 1/e in that time."""


class Prefetch:
    """Written with every prepared environment and every first turn."""

    def __init__(self) -> None:
        self._prepare_s: float | None = None
        self._footprint: float | None = None
        self._admissions = 0.0
        self._counted_s = 0.0

    def prepared(self, took_s: float, tokens: int) -> None:
        """An environment was made in `took_s`, and the program's first prompt has `tokens`."""
        self._prepare_s = _moved(self._prepare_s, took_s)
        self._footprint = _moved(self._footprint, tokens)

    def admitted(self, now_s: float) -> None:
        """A program has begun its first turn."""
        self._decay(now_s)
        self._admissions += 1.0

    def ahead(self, free_tokens: int, now_s: float) -> float:
        """Programs that may be without a first turn, prepared or being prepared."""
        if self._prepare_s is None or self._footprint is None:
            return free_tokens / _FIRST_FOOTPRINT + 1
        self._decay(now_s)
        rate = self._admissions / _WINDOW_S
        return ceil(_MARGIN * rate * self._prepare_s) + free_tokens / max(1.0, self._footprint) + 1

    def _decay(self, now_s: float) -> None:
        self._admissions *= exp((self._counted_s - now_s) / _WINDOW_S)
        self._counted_s = now_s


def _moved(before: float | None, seen: float) -> float:
    return seen if before is None else before + _SMOOTHING * (seen - before)
