"""Drawing the next token, and the log-probability it had.

- The noise is a hash of (seed, position): equal requests draw equal tokens, alone or in any batch.
- The token is the inverse CDF at that noise, summed in float64.

Shapes: N = rows, V = vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sostenuto.runtime.engines.embedded.tensors import as_list, as_tensor
from sostenuto.runtime.engines.embedded.turn import Turn

_BLOCK = 256
_SEED_MASK = (1 << 64) - 1
_BELOW_ONE = 1.0 - 2.0**-53


@dataclass(frozen=True, slots=True)
class Draws:
    """How each row of a batch is drawn; temperature 0 is greedy."""

    temperatures: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.uint64]


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


def draw_next(logits: torch.Tensor, turns: Sequence[Turn]) -> tuple[list[int], list[float]]:
    """What follows each context and each guess behind it, in the order of `turns`: 1 + drafted each."""
    rows = [(turn, turn.length + i) for turn in turns for i in range(1 + turn.drafted)]
    samplings = [turn.request.sampling for turn, _ in rows]
    draws = Draws(
        np.array([sampling.temperature for sampling in samplings], dtype=np.float32),
        np.array([sampling.seed & _SEED_MASK for sampling in samplings], dtype=np.uint64),
        np.array([position for _, position in rows], dtype=np.uint64),
    )
    return draw(logits, draws)


def draw(logits: torch.Tensor, draws: Draws) -> tuple[list[int], list[float]]:
    """Token and its float32 log-probability under softmax(logits / temperature), for each row of (N, V)."""
    logprobs = log_probabilities(logits, draws.temperatures)
    uniform = as_tensor(noise(draws.seeds, draws.positions), logits.device)
    tokens = _inverse_cdf(logprobs.exp(), uniform)
    greedy = draws.temperatures == 0
    if greedy.any():
        mask = as_tensor(greedy, logits.device)
        tokens = torch.where(mask, logprobs.argmax(-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return as_list(tokens), as_list(chosen)


def log_probabilities(logits: torch.Tensor, temperatures: NDArray[np.float32]) -> torch.Tensor:
    """Float32 log-softmax of logits / temperature, (N, V); temperature 0 counts as 1."""
    logits = logits.float()
    scale = np.where(temperatures == 0, np.float32(1), temperatures)
    if (scale != 1).any():
        logits = logits / as_tensor(scale, logits.device)[:, None]
    return logits.log_softmax(-1)


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
