"""What is taken off a trajectory's reward for its distance from a reference.  No torch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sostenuto.errors import RecordError
from sostenuto.records import Floats
from sostenuto.trainer.samples import Sample

Doubles = NDArray[np.float64]

_EXPONENT_BOUND = 20.0


def distances(samples: Sequence[Sample], reference: Sequence[Floats], estimator: str) -> dict[str, float]:
    """By program, the sum over its trained tokens of an estimate of KL(policy || reference), in nats.

    With d = log p engine - log p reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d
    (http://joschu.net/blog/kl-approx.html).  `reference`: (T,) for each sample.
    """
    far: dict[str, float] = {}
    for sample, against in zip(samples, reference, strict=True):
        difference = (sample.logprobs - against)[sample.mask].astype(np.float64)
        far[sample.origin] = far.get(sample.origin, 0.0) + float(_estimate(estimator, difference).sum())
    return far


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
