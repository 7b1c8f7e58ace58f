"""Per-token losses, each a small function of log-probabilities; suffix M: masked tokens, shape of all.

Weighting and summing is aggregation's; importance weights are corrections'.
"""

import torch
from torch import Tensor

from sostenuto.trainer.corrections import ratio


def policy_gradient(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log p.  Its derivative by log p is -A."""
    return -advantages * logprobs


def clipped_policy(
    logprobs: Tensor, proximal: Tensor, advantages: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """PPO: -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(log p - proximal), arXiv 1707.06347.

    Also whether each token's gradient is stopped: it has moved far enough in its favourable direction.
    """
    r = ratio(logprobs, proximal)
    bounded = r.clamp(1.0 - low, 1.0 + high)
    stopped = ((advantages > 0) & (r > 1.0 + high)) | ((advantages < 0) & (r < 1.0 - low))
    return -torch.minimum(r * advantages, bounded * advantages), stopped


def supervised(logprobs: Tensor) -> Tensor:
    """Cross-entropy: -log p."""
    return -logprobs
