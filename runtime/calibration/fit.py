"""From measured times to the constants of an engine profile.  Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sostenuto.errors import EngineError


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """A request of one output token; the engine had seen all but the last `tokens` of its prompt."""

    tokens: int
    context_tokens: int
    """Of the whole prompt."""
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """`fixed_s + tokens / tokens_s + s_per_token_squared * tokens * (context_tokens - tokens / 2)`."""

    fixed_s: float
    tokens_s: float
    s_per_token_squared: float

    def marginal_s(self, tokens: float) -> float:
        """What a fresh prompt costs without the fixed part."""
        return tokens / self.tokens_s + self.s_per_token_squared * tokens**2 / 2

    def tokens_in(self, seconds: float) -> float:
        """The inverse of `marginal_s`."""
        if not self.s_per_token_squared:
            return seconds * self.tokens_s
        linear, square = 1 / self.tokens_s, self.s_per_token_squared
        return (np.sqrt(linear**2 + 2 * square * seconds) - linear) / square


def fit_prefill(samples: Sequence[PrefillSample]) -> Prefill:
    """Least squares of the relative error; a fixed or quadratic part below zero is taken as none."""
    tokens = np.array([sample.tokens for sample in samples], dtype=float)
    context = np.array([sample.context_tokens for sample in samples], dtype=float)
    elapsed = np.array([sample.elapsed_s for sample in samples])
    parts = [np.ones_like(tokens), tokens, tokens * (context - tokens / 2)]
    columns = np.stack(parts, axis=1) / elapsed[:, None]
    kept = [0, 1, 2]
    while True:
        solved = _solved(columns, kept)
        negative = [column for column in kept if solved[column] < 0]
        if not negative:
            break
        kept.remove(min(negative, key=lambda column: solved[column] * columns[:, column].mean()))
    fixed_s, s_per_token, square = (float(part) for part in solved)
    if s_per_token <= 0:
        raise EngineError(
            "prefill: longer prompts did not take longer; probe an engine that is otherwise idle"
        )
    return Prefill(fixed_s, 1 / s_per_token, square)


def _solved(columns: NDArray[np.float64], kept: Sequence[int]) -> NDArray[np.float64]:
    solved = np.zeros(columns.shape[1])
    solved[list(kept)] = np.linalg.lstsq(columns[:, list(kept)], np.ones(len(columns)), rcond=None)[0]
    return solved


def itl_of(short_s: float, long_s: float, more_tokens: int) -> float:
    """Time between two tokens, from the same burst at two output lengths that differ by `more_tokens`."""
    itl_s = (long_s - short_s) / more_tokens
    if itl_s <= 0:
        raise EngineError("decode: more tokens did not take longer; probe an engine that is otherwise idle")
    return itl_s


def overlap_of(added_s: float, prefills: int, prefill_s: float, itl_s: float) -> float:
    """How far `prefills` prompts, one in a step each, hid behind decoding that they held up by `added_s`."""
    hidden_s = prefills * prefill_s - added_s
    return min(1.0, max(0.0, hidden_s / (prefills * min(prefill_s, itl_s))))


def chunk_of(gap_s: float, prefill: Prefill, itl_s: float, overlap: float) -> int:
    """Tokens of a fresh prompt in the step that made a decoding request wait for `gap_s`."""
    return max(1, round(prefill.tokens_in(gap_s - itl_s * (1 - overlap))))
