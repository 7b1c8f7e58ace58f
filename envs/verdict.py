"""What a reward function returned, read strictly: a reward is a finite number or it is a failure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import cast

from sostenuto.errors import EnvironmentFailure


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward and the metrics beside it, all finite."""

    value: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])


def read_verdict(returned: object, doing: str) -> Verdict:
    """A number, or a mapping of numbers with "reward"; anything else is an EnvironmentFailure."""
    if not isinstance(returned, Mapping):
        return Verdict(_finite(returned, doing))
    metrics = {
        str(name): _finite(value, f"{doing}: {name!r}")
        for name, value in cast("Mapping[object, object]", returned).items()
    }
    if "reward" not in metrics:
        raise EnvironmentFailure(f"{doing}: its metrics have no 'reward', only {sorted(metrics)}")
    return Verdict(metrics.pop("reward"), metrics)


def _finite(value: object, doing: str) -> float:
    if not isinstance(value, Real):
        raise EnvironmentFailure(f"{doing}: returned {value!r:.80}; return a finite float")
    number = float(value)
    if not math.isfinite(number):
        raise EnvironmentFailure(f"{doing}: returned {number}; a reward must be finite")
    return number
