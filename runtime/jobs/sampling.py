"""How an evaluation samples."""

from dataclasses import dataclass
from typing import ClassVar

from sostenuto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How often each task is run, and what is made of it."""

    samples: int = 1
    """Of each task; one where nothing is left to chance."""
    success: float = 1.0
    """A program with this reward or more has succeeded."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"sampling: samples is {self.samples}; give at least 1")

    @property
    def ks(self) -> tuple[int, ...]:
        """Powers of two up to the number of samples, and that number."""
        powers = [1 << n for n in range(self.samples.bit_length()) if 1 << n < self.samples]
        return (*powers, self.samples)

    def is_success(self, reward: float) -> bool:
        return reward >= self.success - 1e-9
