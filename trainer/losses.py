"""Per-token losses, each a small function of log-probabilities; suffix M: masked tokens, shape of all.

Weighting and summing is aggregation's; importance weights are corrections'.  Each also says which tokens its
bounds hold back, for the report.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sostenuto.trainer.corrections import ratio
from sostenuto.trainer.parts import (
    CISPOWeight,
    GSPOClip,
    PolicyGradient,
    PolicyLoss,
    PPOClip,
    SAPOGate,
)
from sostenuto.trainer.sequences import mean_of_each


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """(M,) each."""

    current: Tensor
    """Log-probabilities of the present weights, with gradient."""
    proximal: Tensor
    """Those that the ratio is over."""
    advantages: Tensor
    sequences: Tensor
    """Which sequence a token is of, counted from 0 without gaps."""


def policy_loss(part: PolicyLoss, terms: Terms) -> tuple[Tensor, Tensor]:
    """The loss of each token, and whether a bound held it back."""
    match part:
        case PolicyGradient():
            loss = policy_gradient(terms.current, terms.advantages)
            return loss, torch.zeros_like(loss, dtype=torch.bool)
        case PPOClip():
            return clipped_policy(
                terms.current, terms.proximal, terms.advantages, low=part.low, high=part.high, dual=part.dual
            )
        case GSPOClip():
            return sequence_clipped(terms, low=part.low, high=part.high)
        case CISPOWeight():
            return clipped_weight(terms, low=part.low, high=part.high)
        case SAPOGate():
            return soft_gate(terms, positive=part.positive, negative=part.negative)


def policy_gradient(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log p.  Its derivative by log p is -A."""
    return -advantages * logprobs


def clipped_policy(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    *,
    low: float,
    high: float,
    dual: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO: -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(log p - proximal), arXiv 1707.06347.

    With `dual` at most dual * |A| where A < 0, arXiv 1912.09729.
    Also whether each token's gradient is stopped: it has moved far enough in its favourable direction, or
    an unfavourable one too far to be believed.
    """
    r = ratio(logprobs, proximal)
    bounded = r.clamp(1.0 - low, 1.0 + high)
    stopped = ((advantages > 0) & (r > 1.0 + high)) | ((advantages < 0) & (r < 1.0 - low))
    loss = -torch.minimum(r * advantages, bounded * advantages)
    if dual is not None:
        most = dual * advantages.abs()
        stopped = stopped | ((advantages < 0) & (loss > most))
        loss = torch.where(advantages < 0, torch.minimum(loss, most), loss)
    return loss, stopped


def sequence_clipped(terms: Terms, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """GSPO, arXiv 2507.18071, in its token form: the value is the sequence's, the gradient each token's.

    With s = exp(mean over a sequence of log p - proximal): -min(s A, clip(s) A), and the derivative of s by
    a token's log p is s, so that a mean over tokens is the derivative of the sequence's objective.
    """
    moved = (terms.current - terms.proximal).detach()
    mean = mean_of_each(terms.sequences, moved)[terms.sequences]
    # log s, with the gradient of the token's own log p.
    own = mean + terms.current - terms.current.detach()
    return clipped_policy(own, torch.zeros_like(own), terms.advantages, low=low, high=high)


def clipped_weight(terms: Terms, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """CISPO: -clip(r, 1 - low, 1 + high) A log p, the weight without gradient; arXiv 2506.13585."""
    r = ratio(terms.current.detach(), terms.proximal)
    weight = r.clamp(1.0 - low, 1.0 + high)
    return weight * policy_gradient(terms.current, terms.advantages), weight != r


def soft_gate(terms: Terms, *, positive: float, negative: float) -> tuple[Tensor, Tensor]:
    """SAPO: -(4 / t) sigmoid(t (r - 1)) A with t by the sign of A; arXiv 2511.20347.

    At r = 1 its gradient is that of r A.  A token counts as held back where less than half of that is left.
    """
    r = ratio(terms.current, terms.proximal)
    is_good = terms.advantages > 0
    sharpness = torch.where(is_good, torch.full_like(r, positive), torch.full_like(r, negative))
    gate = torch.sigmoid(sharpness * (r - 1.0))
    slope = (4.0 * gate * (1.0 - gate)).detach()
    return -4.0 / sharpness * gate * terms.advantages, slope < 0.5


def clipped_value(
    values: Tensor, before: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Half the squared error of values, max(|V - R|, |clip(V, before +- clip) - R|)^2 / 2, as PPO has it.

    Also whether each token's gradient is stopped: its value has moved far enough towards its return.
    """
    errors = (values - returns).square()
    if clip is None:
        return errors / 2.0, torch.zeros_like(values, dtype=torch.bool)
    bounded = (values.clamp(before - clip, before + clip) - returns).square()
    return torch.maximum(errors, bounded) / 2.0, bounded > errors


def supervised(logprobs: Tensor) -> Tensor:
    """Cross-entropy: -log p."""
    return -logprobs
