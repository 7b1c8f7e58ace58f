"""Group-relative advantages, in float64.  No I/O, no torch.

Suffix G: members of one group.  A member that is not valid votes in no statistic and gets zero.
"""

import numpy as np
from numpy.typing import NDArray

from sostenuto.errors import RecordError

Doubles = NDArray[np.float64]

# Rewards that are equal on paper may differ by the order of a sum: 0.1 + 0.2 against 0.3.
_ROUNDING_ULPS = 8.0


def has_spread(rewards_G: Doubles) -> bool:  # noqa: N803
    """Whether any two rewards differ by more than rounding.  Compares extremes, never a deviation."""
    if not len(rewards_G):
        return False
    spread = float(rewards_G.max() - rewards_G.min())
    return spread > _ROUNDING_ULPS * float(np.spacing(np.abs(rewards_G).max()))


def group_advantages(
    rewards_G: Doubles,  # noqa: N803
    valid_G: NDArray[np.bool_] | None = None,  # noqa: N803
    *,
    normalize_std: bool = True,
) -> Doubles:
    """(R - mean) / population deviation over the valid members (G,); exactly 0 without a spread.

    GRPO, arXiv 2402.03300.  RecordError for fewer than two valid members or a reward that is not finite.
    """
    valid = np.ones(len(rewards_G), dtype=np.bool_) if valid_G is None else valid_G
    if valid.shape != rewards_G.shape:
        raise RecordError(f"advantages: {rewards_G.shape} rewards, {valid.shape} validity flags")
    rewards = rewards_G[valid].astype(np.float64)
    if len(rewards) < 2:
        raise RecordError(f"advantages: a group of {len(rewards)} has nothing to compare; two are needed")
    if not np.isfinite(rewards).all():
        raise RecordError(f"advantages: a reward is not finite: {rewards.tolist()}")
    advantages = np.zeros(len(rewards_G), dtype=np.float64)
    if has_spread(rewards):
        centred = rewards - rewards.mean()
        advantages[valid] = centred / rewards.std() if normalize_std else centred
    return advantages
