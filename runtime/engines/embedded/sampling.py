"""Drawing the next token, and the log-probability it had.

- The noise is a hash of (seed, position): equal requests draw equal tokens, alone or in any batch.
- The token is the inverse CDF at that noise, summed in float64.

Suffixes: N = rows, V = vocabulary, B = blocks, W = width of a block.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_BLOCK = 256
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


def draw(logits_NV: torch.Tensor, draws: Draws) -> tuple[list[int], list[float]]:
    """Token and its float32 log-probability under softmax(logits / temperature), for each row."""
    logprobs_NV = log_probabilities(logits_NV, draws.temperatures)
    uniform = torch.from_numpy(noise(draws.seeds, draws.positions)).to(logits_NV.device)
    tokens_N = _inverse_cdf(logprobs_NV.exp(), uniform)
    greedy = draws.temperatures == 0
    if greedy.any():
        mask = torch.from_numpy(greedy).to(logits_NV.device)
        tokens_N = torch.where(mask, logprobs_NV.argmax(-1), tokens_N)
    chosen_N = logprobs_NV.gather(1, tokens_N[:, None])[:, 0]
    return tokens_N.tolist(), chosen_N.tolist()


def log_probabilities(logits_NV: torch.Tensor, temperatures: NDArray[np.float32]) -> torch.Tensor:
    """Float32 log-softmax of logits / temperature; temperature 0 counts as 1."""
    logits_NV = logits_NV.float()
    scale = np.where(temperatures == 0, np.float32(1), temperatures)
    if (scale != 1).any():
        logits_NV = logits_NV / torch.from_numpy(scale).to(logits_NV.device)[:, None]
    return logits_NV.log_softmax(-1)


def _inverse_cdf(probabilities_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative sum exceeds uniform * total; never one of probability 0.

    In two levels, because a cumulative sum over a whole vocabulary costs more than the softmax.
    """
    count, vocabulary = probabilities_NV.shape
    blocks = math.ceil(vocabulary / _BLOCK)
    padded = torch.nn.functional.pad(probabilities_NV, (0, blocks * _BLOCK - vocabulary))
    by_block_NBW = padded.view(count, blocks, _BLOCK)
    cumulative_NB = by_block_NBW.sum(-1, dtype=torch.float64).cumsum(-1)
    target_N = uniform_N * cumulative_NB[:, -1]
    block_N = (cumulative_NB <= target_N[:, None]).sum(-1)
    rows = torch.arange(count, device=uniform_N.device)
    before_N = torch.where(block_N > 0, cumulative_NB[rows, block_N - 1], 0.0)
    inside_NW = by_block_NBW[rows, block_N].double().cumsum(-1)
    # The two levels are summed in different orders: keep the rest inside its block.
    rest_N = torch.minimum(target_N - before_N, inside_NW[:, -1] * _BELOW_ONE)
    return block_N * _BLOCK + (inside_NW <= rest_N[:, None]).sum(-1)
