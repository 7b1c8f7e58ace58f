"""Means and 95 % confidence intervals over seeds.

Student's t: with the handful of seeds that a sweep has, resampling would give intervals that are too
narrow.  Ratios of two policies are paired by seed and averaged as logarithms.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_T = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
"""The 97.5 % quantile for 1, 2, ... degrees of freedom."""
_NORMAL = 1.959964


@dataclass(frozen=True, slots=True)
class Interval:
    """`low` and `high` are NaN where one value alone is known, or none."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.mean)

    @property
    def has_width(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


def mean_interval(values: Sequence[float]) -> Interval:
    """Of the values that are finite."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(known) / len(known)
    half = _half_width(known, mean)
    return Interval(mean, mean - half, mean + half, len(known))


def paired_ratio(numerators: Mapping[int, float], denominators: Mapping[int, float]) -> Interval:
    """Geometric mean of the ratios, over the seeds that both have."""
    logs = [
        math.log(numerators[seed] / denominators[seed])
        for seed in sorted(numerators.keys() & denominators.keys())
        if numerators[seed] > 0 and denominators[seed] > 0
    ]
    interval = mean_interval(logs)
    return Interval(math.exp(interval.mean), math.exp(interval.low), math.exp(interval.high), interval.n)


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = _NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _half_width(values: Sequence[float], mean: float) -> float:
    if len(values) < 2:
        return math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return t_quantile(len(values) - 1) * math.sqrt(variance / len(values))
