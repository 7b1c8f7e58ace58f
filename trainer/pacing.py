"""How far generation may run ahead of learning.

Derivation.  A step takes N groups and raises the version by one.  A group that starts under version v
is used after every group in front of it: those that are open or ready, and those that a step has taken
whose new version is not deployed yet (they will raise the version too).  With A groups in front of it,
at most floor(A / N) versions are deployed before its turn.  It must not be more than S, so

    A <= (S + 1) * N - 1,   that is   open + ready + learning + this one <= (S + 1) * N.

S = 0 is the synchronous case: N groups start when nothing is open, ready or being learned from.

Order of use need not be order of start: a group that younger ones overtook is waited for before the
next version would make it too old (`Buffer.take`), so what is finished is used, whatever it took.
"""

from dataclasses import dataclass

from sostenuto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pacing:
    """The rule for one job."""

    groups_per_step: int
    max_staleness: int

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.max_staleness < 0:
            raise ConfigError(
                f"pacing: groups_per_step {self.groups_per_step} must be at least 1, "
                f"max_staleness {self.max_staleness} at least 0"
            )

    def room(self, *, open_groups: int, ready_groups: int, learning_groups: int) -> int:
        """How many groups may start now.

        `learning_groups` were taken for a step whose new version is not deployed yet.
        """
        ahead = open_groups + ready_groups + learning_groups
        return max(0, (self.max_staleness + 1) * self.groups_per_step - ahead)
