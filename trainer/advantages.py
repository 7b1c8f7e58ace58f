"""Advantages from rewards, in float64.  No I/O, no torch.

Suffix G: members of one group.  A member that is not valid votes in no statistic and gets zero.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sostenuto.errors import RecordError
from sostenuto.trainer.parts import (
    GAE,
    Advantage,
    BatchNormalized,
    GroupRelative,
    LeaveOneOut,
    NoReward,
    Return,
    TurnReturn,
)

Doubles = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Rewards that are equal on paper may differ by the order of a sum: 0.1 + 0.2 against 0.3.
_ROUNDING_ULPS = 8.0


def has_spread(rewards_G: Doubles) -> bool:  # noqa: N803
    """Whether any two rewards differ by more than rounding.  Compares extremes, never a deviation."""
    if not len(rewards_G):
        return False
    spread = float(rewards_G.max() - rewards_G.min())
    return spread > _ROUNDING_ULPS * float(np.spacing(np.abs(rewards_G).max()))


def batch_advantages(part: Advantage, rewards: Sequence[Doubles], valid: Sequence[Flags]) -> list[Doubles]:
    """Of each group's members (G,); RecordError for rewards that cannot be compared or are not finite."""
    match part:
        case GroupRelative():
            return [
                group_advantages(r, v, normalize_std=part.normalize_std)
                for r, v in zip(rewards, valid, strict=True)
            ]
        case LeaveOneOut():
            return [leave_one_out(r, v) for r, v in zip(rewards, valid, strict=True)]
        case BatchNormalized():
            return batch_normalized(rewards, valid, group_baseline=part.baseline == "group")
        case Return():
            return [
                np.where(v, _checked(r, v, fewest=0)[0] - part.baseline, 0.0)
                for r, v in zip(rewards, valid, strict=True)
            ]
        case NoReward():
            return [np.zeros(len(r)) for r in rewards]
        case GAE() | TurnReturn():
            raise RecordError(f"advantages: {part.kind} is of tokens and turns, not of whole trajectories")


def group_advantages(
    rewards_G: Doubles,  # noqa: N803
    valid_G: Flags | None = None,  # noqa: N803
    *,
    normalize_std: bool = True,
) -> Doubles:
    """(R - mean) / population deviation over the valid members (G,); exactly 0 without a spread.

    GRPO, arXiv 2402.03300.  RecordError for fewer than two valid members or a reward that is not finite.
    """
    whole, rewards = _checked(rewards_G, valid_G, fewest=2)
    if not has_spread(rewards):
        return np.zeros_like(whole)
    centred = whole - rewards.mean()
    return _where_valid(valid_G, centred / rewards.std() if normalize_std else centred)


def leave_one_out(rewards_G: Doubles, valid_G: Flags | None = None) -> Doubles:  # noqa: N803
    """R - mean of the other valid members (G,): RLOO, arXiv 2402.14740; exactly 0 without a spread.

    RecordError for fewer than two valid members or a reward that is not finite.
    """
    whole, rewards = _checked(rewards_G, valid_G, fewest=2)
    if not has_spread(rewards):
        return np.zeros_like(whole)
    # R - (sum - R) / (n - 1) = (R - mean) n / (n - 1)
    return _where_valid(valid_G, (whole - rewards.mean()) * len(rewards) / (len(rewards) - 1))


def batch_normalized(
    rewards: Sequence[Doubles], valid: Sequence[Flags], *, group_baseline: bool = False
) -> list[Doubles]:
    """(R - mean) / population deviation over all valid members of a batch: REINFORCE++, arXiv 2501.03262.

    With `group_baseline` the mean of each member's group is subtracted first, and the deviation is that of
    what is left.  Exactly 0 where nothing is left.
    """
    fewest = 2 if group_baseline else 0
    checked = [_checked(r, v, fewest=fewest) for r, v in zip(rewards, valid, strict=True)]
    left = [whole - (voting.mean() if group_baseline else 0.0) for whole, voting in checked]
    everybody = np.concatenate([values[flags] for values, flags in zip(left, valid, strict=True)])
    if not has_spread(everybody):
        return [np.zeros_like(values) for values in left]
    mean, deviation = everybody.mean(), everybody.std()
    return [
        _where_valid(flags, (values - mean) / deviation) for values, flags in zip(left, valid, strict=True)
    ]


def _checked(rewards_G: Doubles, valid_G: Flags | None, *, fewest: int) -> tuple[Doubles, Doubles]:  # noqa: N803
    """All rewards, those of members without a vote as 0, and those that vote."""
    valid = np.ones(len(rewards_G), dtype=np.bool_) if valid_G is None else valid_G
    if valid.shape != rewards_G.shape:
        raise RecordError(f"advantages: {rewards_G.shape} rewards, {valid.shape} validity flags")
    rewards = rewards_G[valid].astype(np.float64)
    if len(rewards) < fewest:
        raise RecordError(f"advantages: a group of {len(rewards)} has nothing to compare; two are needed")
    if not np.isfinite(rewards).all():
        raise RecordError(f"advantages: a reward is not finite: {rewards.tolist()}")
    return np.where(valid, rewards_G, 0.0).astype(np.float64), rewards


def _where_valid(valid_G: Flags | None, advantages_G: Doubles) -> Doubles:  # noqa: N803
    return advantages_G if valid_G is None else np.where(valid_G, advantages_G, 0.0)
