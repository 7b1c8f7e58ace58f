"""What rewards of several samples on several tasks say of a model.

pass@k is the chance that at least one of k samples on a task succeeds. From n samples of which c did,
1 - C(n - c, k) / C(n, k) estimates it without bias (Chen et al. 2021, arXiv 2107.03374); drawing k of the n
once would have the same mean and a larger spread.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal

from sostenuto.runtime.bench.intervals import mean_interval

_Z = 1.959964
"""The 97.5 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Confidence:
    """95 % about a mean over tasks.

    wilson: where every reward is 0 or 1, Wilson's score interval with the tasks as observations, which is
    wider than need be with several samples on each.  student: Student's t over the tasks' means (samples on
    one task are not independent, so the task is the unit).  none: of one task alone; both ends are NaN.
    """

    low: float
    high: float
    method: Literal["wilson", "student", "none"]


def pass_at(k: int, samples: int, successes: int) -> float:
    """Of one task; ValueError unless 1 <= k <= samples and successes are among them."""
    if not 1 <= k <= samples or not 0 <= successes <= samples:
        raise ValueError(f"pass@{k} of {successes} successes in {samples} samples")
    return 1.0 - comb(samples - successes, k) / comb(samples, k)


def mean_pass_at(k: int, tasks: Iterable[Sequence[bool]]) -> float | None:
    """Over the tasks with k samples or more; None when there is none."""
    known = [pass_at(k, len(samples), sum(samples)) for samples in tasks if len(samples) >= k]
    return math.fsum(known) / len(known) if known else None


def confidence(tasks: Sequence[Sequence[float]]) -> Confidence:
    """Of the mean over tasks of the mean reward of each; each has at least one."""
    means = [math.fsum(rewards) / len(rewards) for rewards in tasks]
    if len(means) < 2:
        return Confidence(math.nan, math.nan, "none")
    if all(reward in {0.0, 1.0} for rewards in tasks for reward in rewards):
        return Confidence(*wilson(math.fsum(means), len(means)), "wilson")
    interval = mean_interval(means)
    return Confidence(interval.low, interval.high, "student")


def wilson(successes: float, observations: int) -> tuple[float, float]:
    """The score interval of a share (Wilson 1927): it has width at 0 and 1, and stays between them."""
    n, share = observations, successes / observations
    centre = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)
