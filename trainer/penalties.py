"""What is taken off rewards for the distance from a reference.  No torch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sostenuto.errors import RecordError
from sostenuto.records import Floats
from sostenuto.trainer.samples import Sample

Doubles = NDArray[np.float64]

_EXPONENT_BOUND = 20.0


def distances(samples: Sequence[Sample], reference: Sequence[Floats], estimator: str) -> dict[str, float]:
    """By program, the sum of `token_distances` over its trained tokens, in nats."""
    far: dict[str, float] = {}
    for sample, found in zip(samples, token_distances(samples, reference, estimator), strict=True):
        total = float(found[sample.mask].sum(dtype=np.float64))
        far[sample.origin] = far.get(sample.origin, 0.0) + total
    return far


def token_distances(samples: Sequence[Sample], reference: Sequence[Floats], estimator: str) -> list[Doubles]:
    """(T,) for each sample: an estimate of KL(policy || reference) at its trained tokens, NaN elsewhere.

    With d = log p engine - log p reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d
    (http://joschu.net/blog/kl-approx.html).  `reference`: (T,) for each sample.
    """
    return [
        _estimate(estimator, np.where(sample.mask, sample.logprobs.astype(np.float64) - against, np.nan))
        for sample, against in zip(samples, reference, strict=True)
    ]


def _estimate(estimator: str, difference: Doubles) -> Doubles:
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference**2 / 2.0
        case "k3":
            return np.exp(np.clip(-difference, -_EXPONENT_BOUND, _EXPONENT_BOUND)) - 1.0 + difference
        case _:
            raise RecordError(f"kl: estimator {estimator!r} has no value at a single token")
