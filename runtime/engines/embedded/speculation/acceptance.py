"""How likely the next guess is right, from those that were verified."""

from dataclasses import dataclass

_PRIOR_WEIGHT = 2.0
"""Guesses that the prior counts for."""


@dataclass(slots=True)
class Acceptance:
    """Of one request, or of one source.  Old evidence fades, so that what did not pay is tried again."""

    tested: float = 0.0
    accepted: float = 0.0

    def learn(self, tested: int, accepted: int) -> None:
        """Take the guesses of one step up to the first wrong one; those after it say nothing."""
        self.tested += tested
        self.accepted += accepted

    def fade(self, kept: float) -> None:
        self.tested *= kept
        self.accepted *= kept

    def chance(self, prior: float) -> float:
        """Expected share of right guesses: the mean of the beta distribution with this evidence."""
        return (self.accepted + prior * _PRIOR_WEIGHT) / (self.tested + _PRIOR_WEIGHT)
