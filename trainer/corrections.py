"""Which log-probability is which, and how the engine's difference from the trainer is corrected.

    behaviour   engine,  weights that sampled the token     recorded with it
    rollout     trainer, weights that sampled the token     known when the trainer still holds them
                                                            (a fresh sample) or was asked in time
    current     trainer, weights now

    engine difference  exp(rollout - behaviour)    0.52 / 0.50
    update difference  exp(current - rollout)      0.60 / 0.52
    both together      exp(current - behaviour)    0.60 / 0.50 = 1.2

Where `rollout` is known, PPO's ratio is the update difference alone (proximal = rollout) and the engine
difference is a weight, truncated (TIS).  Where the weights have moved and nobody asked in time, the two
cannot be told apart: the ratio takes behaviour log-probabilities and carries both, the weight is 1.
With the correction off every token is treated like that.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sostenuto.trainer.settings import TIS

_EXPONENT_BOUND = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """(M,) each, without gradient."""

    proximal: Tensor
    """What the current log-probability is compared with."""
    weights: Tensor
    truncated: Tensor
    """Where the weight met a bound."""


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """exp(numerator - denominator) of log-probabilities, the exponent clamped to +-20."""
    return (numerator - denominator).clamp(-_EXPONENT_BOUND, _EXPONENT_BOUND).exp()


def known_rollout(current: Tensor, rollout: Tensor, fresh: Tensor) -> Tensor:
    """Trainer log-probabilities under the weights that sampled; NaN where they are not known."""
    return torch.where(fresh & rollout.isnan(), current.detach(), rollout)


def correct(settings: TIS | None, behaviour: Tensor, rollout: Tensor) -> Correction:
    """Proximal log-probabilities and truncated weights from `behaviour` and `rollout` (NaN: unknown)."""
    ones = torch.ones_like(behaviour)
    if settings is None:
        return Correction(behaviour, ones, torch.zeros_like(behaviour, dtype=torch.bool))
    known = ~rollout.isnan()
    raw = torch.where(known, ratio(rollout, behaviour), ones)
    weights = raw.clamp(settings.low, settings.high)
    return Correction(torch.where(known, rollout, behaviour), weights, weights != raw)
