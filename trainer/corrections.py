"""Which log-probability is which, and how the engine's difference from the trainer is corrected.

    behaviour   engine,  weights that sampled the token     recorded with it
    rollout     trainer, weights that sampled the token     known when the trainer still holds them
                                                            (a fresh sample) or was asked in time
    start       trainer, weights at the batch's beginning   known when it is asked for
    current     trainer, weights now

    engine difference  exp(rollout - behaviour)    0.52 / 0.50
    update difference  exp(current - rollout)      0.60 / 0.52
    both together      exp(current - behaviour)    0.60 / 0.50 = 1.2

Where `rollout` is known, PPO's ratio is the update difference alone (proximal = rollout) and the engine
difference is a weight, truncated (TIS) or gated (IcePop).  Where the weights have moved and nobody asked in
time, the two cannot be told apart: the ratio takes behaviour log-probabilities and carries both, the weight
is 1.  With the correction off every token is treated like that.  A method with `proximal = "current"` takes
`start` in place of `rollout`: it is always known, and the weight carries all that came before the batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sostenuto.trainer.parts import TIS, Correction, IcePop, Level, Rejection
from sostenuto.trainer.sequences import mean_of_each, sum_of_each

_EXPONENT_BOUND = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class Corrected:
    """(M,) each, without gradient."""

    proximal: Tensor
    """What the current log-probability is compared with."""
    weights: Tensor
    """0 where a token is left out."""
    truncated: Tensor
    """Where the weight met a bound."""
    rejected: Tensor
    """Where the token is left out by the rejection."""


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """exp(numerator - denominator) of log-probabilities, the exponent clamped to +-20."""
    return bounded_exp(numerator - denominator)


def bounded_exp(exponent: Tensor) -> Tensor:
    """exp with the exponent clamped to +-20."""
    return exponent.clamp(-_EXPONENT_BOUND, _EXPONENT_BOUND).exp()


def known_rollout(current: Tensor, rollout: Tensor, fresh: Tensor) -> Tensor:
    """Trainer log-probabilities under the weights that sampled; NaN where they are not known."""
    return torch.where(fresh & rollout.isnan(), current.detach(), rollout)


def correct(
    weighting: Correction | None,
    behaviour: Tensor,
    proximal: Tensor,
    *,
    sequences: Tensor | None = None,
    rejection: Rejection | None = None,
) -> Corrected:
    """Compare what the engine says with `proximal` (NaN: unknown); all (M,).

    `sequences`: which one each token is of; None: all are of one.
    """
    known = ~proximal.isnan()
    compared = torch.where(known, proximal, behaviour)
    moved = torch.where(known, proximal - behaviour, torch.zeros_like(behaviour))
    of = torch.zeros_like(behaviour, dtype=torch.long) if sequences is None else sequences
    nothing = torch.zeros_like(behaviour, dtype=torch.bool)
    weights, truncated = torch.ones_like(behaviour), nothing
    if weighting is not None:
        weights, truncated = _weigh(weighting, moved, of)
    rejected = nothing if rejection is None else _is_rejected(rejection, moved, of)
    return Corrected(
        proximal=behaviour if weighting is None else compared,
        weights=torch.where(rejected, torch.zeros_like(weights), weights),
        truncated=truncated,
        rejected=rejected,
    )


def _weigh(part: Correction, moved: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor]:
    raw = bounded_exp(_at_level(part.level, moved, sequences))
    out = (raw < part.low) | (raw > part.high)
    match part:
        case TIS():
            return raw.clamp(part.low, part.high), out
        case IcePop():
            return torch.where(out, torch.zeros_like(raw), raw), out


def _at_level(level: Level, moved: Tensor, sequences: Tensor) -> Tensor:
    """Log ratios (M,) of a token, or of its whole sequence."""
    match level:
        case "token":
            return moved
        case "sequence":
            return sum_of_each(sequences, moved)[sequences]
        case "geometric":
            return mean_of_each(sequences, moved)[sequences]


def _is_rejected(part: Rejection, moved: Tensor, sequences: Tensor) -> Tensor:
    estimate = divergence(part.estimator, -moved)
    if part.level == "sequence":
        estimate = mean_of_each(sequences, estimate)[sequences]
    above = estimate > part.high
    return above if part.low is None else above | (estimate < part.low)


def divergence(estimator: str, difference: Tensor) -> Tensor:
    """Estimates of KL(p || q) from d = log p - log q at a token sampled from p; http://joschu.net/blog/kl-approx.html.

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, the exponent clamped to +-20.
    """
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2.0
        case "k3":
            return bounded_exp(-difference) - 1.0 + difference
        case _:
            raise ValueError(f"estimator {estimator!r}")
