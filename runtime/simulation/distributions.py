"""The laws that workloads draw from.  All are drawn with a generator that the caller seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Draws = NDArray[np.float64]


class Law(Protocol):
    def draw(self, rng: np.random.Generator, size: int) -> Draws: ...


@dataclass(frozen=True, slots=True)
class Constant:
    value: float

    def draw(self, rng: np.random.Generator, size: int) -> Draws:
        del rng
        return np.full(size, self.value)


@dataclass(frozen=True, slots=True)
class Uniform:
    low: float
    high: float

    def draw(self, rng: np.random.Generator, size: int) -> Draws:
        return rng.uniform(self.low, self.high, size)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """The logarithm is normal with standard deviation `sigma`; draws beyond a limit are set to it."""

    median: float
    sigma: float
    low: float = 0.0
    high: float = math.inf

    @classmethod
    def with_mean(cls, mean: float, sigma: float, *, low: float = 0.0, high: float = math.inf) -> "LogNormal":
        """The one whose draws have this mean after they were limited; `mean` lies between the limits."""
        small, large = math.log(mean) - 20 * sigma, math.log(mean) + 20 * sigma
        for _ in range(100):
            middle = (small + large) / 2
            if cls(math.exp(middle), sigma, low, high).mean < mean:
                small = middle
            else:
                large = middle
        return cls(math.exp(large), sigma, low, high)

    def draw(self, rng: np.random.Generator, size: int) -> Draws:
        return np.clip(rng.lognormal(math.log(self.median), self.sigma, size), self.low, self.high)

    @property
    def mean(self) -> float:
        """Of the limited draws."""
        below, above = self._share_under(self.low), 1 - self._share_under(self.high)
        tails = self.low * below + (self.high * above if above else 0.0)
        whole = self.median * math.exp(self.sigma**2 / 2)
        return tails + whole * (
            self._share_under(self.high, self.sigma) - self._share_under(self.low, self.sigma)
        )

    def log_density(self, values: Draws) -> Draws:
        """Of the logarithm of a value, before the limits; without the constant that all laws share."""
        distance = (np.log(values) - math.log(self.median)) / self.sigma
        return -0.5 * distance**2 - math.log(self.sigma)

    def _share_under(self, value: float, shift: float = 0.0) -> float:
        if value <= 0:
            return 0.0
        return _normal_share(math.log(value / self.median) / self.sigma - shift)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Each draw comes from one of the parts, chosen by weight."""

    parts: tuple[tuple[float, Law], ...]

    def draw(self, rng: np.random.Generator, size: int) -> Draws:
        weights = [weight for weight, _ in self.parts]
        chosen = rng.choice(len(weights), size=size, p=weights)
        draws = np.stack([law.draw(rng, size) for _, law in self.parts])
        return draws[chosen, np.arange(size)]


@dataclass(frozen=True, slots=True)
class Tool:
    """`share` of all calls are of this tool, and take about `seconds`."""

    name: str
    share: float
    seconds: LogNormal


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Which tool is called and how long the call takes.

    The time is drawn from `seconds`, and then the tool given the time: by Bayes' rule from what each
    tool's calls look like.  So the times of all tools together are exactly `seconds`, whatever the
    tools are; the laws of the tools themselves come out as given only as far as they add up to it.
    """

    seconds: Law
    tools: Sequence[Tool]

    def draw(self, rng: np.random.Generator, size: int) -> tuple[list[str], Draws]:
        seconds = self.seconds.draw(rng, size)
        scores = np.stack([math.log(t.share) + t.seconds.log_density(seconds) for t in self.tools])
        chosen: list[int] = np.argmax(scores + rng.gumbel(size=scores.shape), axis=0).tolist()
        return [self.tools[index].name for index in chosen], seconds


def _normal_share(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))
