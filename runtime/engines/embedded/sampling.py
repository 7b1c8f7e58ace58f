"""Drawing the next tokens, and the log-probabilities they had.

- The noise is a hash of (seed, position): equal requests draw equal tokens, alone or in any batch.
- The token is the inverse CDF at that noise, summed in float64.

Shapes: N = rows, V = vocabulary.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from sostenuto.runtime.engines.embedded.distribution import log_probabilities
from sostenuto.runtime.engines.embedded.rows import Drawn, Row, TopLogprobs
from sostenuto.runtime.engines.embedded.tensors import as_list, as_tensor
from sostenuto.runtime.engines.embedded.turn import Turn

_BLOCK = 256
_SEED_MASK = (1 << 64) - 1
_BELOW_ONE = 1.0 - 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # splitmix64's output function (Steele, Lea, Flood 2014)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def noise(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One uniform number in [0, 1) for each pair, from 53 bits of its hash."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(seeds + golden) + (positions + np.uint64(1)) * golden
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw_next(logits: torch.Tensor, turns: Sequence[Turn]) -> list[Drawn]:
    """What follows each context and each guess behind it, in the order of `turns`: 1 + drafted each."""
    rows = [row for turn in turns for row in turn.rows]
    logprobs = log_probabilities(logits, rows)
    tokens = draw(logprobs, rows)
    asked = [turn.request.top_logprobs for turn in turns for _ in range(1 + turn.drafted)]
    drawn = zip(as_list(tokens), chosen(logprobs, tokens), most_probable(logprobs, asked), strict=True)
    return [Drawn(token, logprob, top) for token, logprob, top in drawn]


def draw_at(logits: torch.Tensor, places: Sequence[tuple[Turn, int]]) -> list[int]:
    """What the logits (N, V) of a drafter say to follow the tokens of each request before the position."""
    rows = [turn.row_at(position) for turn, position in places]
    return as_list(draw(log_probabilities(logits, rows), rows))


def draw(logprobs: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """A token of each row of log-probabilities (N, V): (N,)."""
    samplings = [row.sampling for row in rows]
    seeds = np.array([sampling.seed & _SEED_MASK for sampling in samplings], dtype=np.uint64)
    positions = np.array([len(row.tokens) for row in rows], dtype=np.uint64)
    tokens = _inverse_cdf(logprobs.exp(), as_tensor(noise(seeds, positions), logprobs.device))
    greedy = np.array([sampling.temperature == 0 for sampling in samplings])
    if greedy.any():
        tokens = torch.where(as_tensor(greedy, logprobs.device), logprobs.argmax(-1), tokens)
    return tokens


def chosen(logprobs: torch.Tensor, tokens: torch.Tensor) -> list[float]:
    """Of (N, V), what each row gives its token of (N,)."""
    return as_list(logprobs.gather(1, tokens[:, None])[:, 0])


def most_probable(logprobs: torch.Tensor, counts: Sequence[int]) -> list[TopLogprobs]:
    """As many tokens of each row of (N, V) as `counts` says, less those without probability."""
    found: list[TopLogprobs] = [[] for _ in counts]
    asked = [i for i, count in enumerate(counts) if count]
    if asked:
        most = min(max(counts), logprobs.shape[1])
        values, tokens = logprobs[torch.tensor(asked, device=logprobs.device)].topk(most)
        for i, row_tokens, row_values in zip(asked, as_list(tokens), as_list(values), strict=True):
            pairs = zip(row_tokens[: counts[i]], row_values, strict=False)
            found[i] = [(token, value) for token, value in pairs if value > -math.inf]
    return found


def _inverse_cdf(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative sum exceeds uniform * total; never one of probability 0.

    In two levels, because a cumulative sum over a whole vocabulary costs more than the softmax.
    """
    count, vocabulary = probabilities.shape
    blocks = math.ceil(vocabulary / _BLOCK)
    padded = torch.nn.functional.pad(probabilities, (0, blocks * _BLOCK - vocabulary))
    by_block = padded.view(count, blocks, _BLOCK)
    cumulative = by_block.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniform * cumulative[:, -1]
    block = (cumulative <= target[:, None]).sum(-1)
    rows = torch.arange(count, device=uniform.device)
    before = torch.where(block > 0, cumulative[rows, block - 1], 0.0)
    inside = by_block[rows, block].double().cumsum(-1)
    # The two levels are summed in different orders: keep the rest inside its block.
    rest = torch.minimum(target - before, inside[:, -1] * _BELOW_ONE)
    return block * _BLOCK + (inside <= rest[:, None]).sum(-1)
