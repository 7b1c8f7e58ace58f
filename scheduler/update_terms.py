"""What a change of version does: when it opens, to requests in flight, and to programs that act."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from sostenuto.errors import ConfigError

Running = Literal["finish", "continue", "retract", "abort"]
Acting = Literal["keep", "recompute", "pin"]
Late = Literal["drain", "quarantine"]


@dataclass(frozen=True, slots=True)
class UpdateTerms:
    """One job's choice, for each of its publications."""

    running: Running = "retract"
    """Requests in flight.  finish: they end under the old weights, and the swap waits for them.  continue:
    they go on with the KV they have.  retract: they compute it anew.  abort: they end with the tokens they
    have, and their turns go on from there with what is left of their budget."""
    acting: Acting = "recompute"
    """KV of programs between turns.  keep: it goes on.  recompute: it is computed anew.  pin: while an
    engine still has the version that the program began with, the program stays with that; then recompute."""
    finish_within_s: float = 60.0
    """finish, abort: how long the swap waits; what still runs then goes on as KV between turns does."""
    max_kv_age: int | None = None
    """keep, continue: how many versions may open over KV that is still used.  None: any number."""
    quorum: int | float | None = None
    """So many engines, or such a share of them below or at 1.0, are enough for a version to open once
    `deadline_s` have passed.  None: all are waited for."""
    deadline_s: float = 0.0
    """From the beginning of a publication."""
    late: Late = "drain"
    """Engines that a quorum opened without.  drain: what runs there ends, and only programs that are pinned
    to its version start.  quarantine: nothing starts.  Either is opened once it has the version."""
    end_stale: bool = True
    """Programs whose record can no longer be trained are ended, in place of being computed anew."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.finish_within_s < 0:
            raise ConfigError(f"at_update: finish_within_s is {self.finish_within_s}; give 0 or more seconds")
        if self.deadline_s < 0:
            raise ConfigError(f"at_update: deadline_s is {self.deadline_s}; give 0 or more seconds")
        if self.max_kv_age is not None and self.max_kv_age < 0:
            raise ConfigError(f"at_update: max_kv_age is {self.max_kv_age}; give 0 or more versions, or none")
        if self.quorum is None and self.deadline_s:
            raise ConfigError("at_update: deadline_s without quorum; give quorum, or all are waited for")
        if self.quorum is not None and not _is_quorum(self.quorum):
            raise ConfigError(
                f"at_update: quorum is {self.quorum}; give a number of engines from 1, or a share such as 0.5"
            )
        if self.max_kv_age is not None and self.acting != "keep" and self.running != "continue":
            raise ConfigError(
                'at_update: max_kv_age bounds KV that is kept, and none is; give acting = "keep" or '
                'running = "continue", or leave it out'
            )

    def engines(self, taking_part: int) -> int:
        """How many of those that take part are enough once the deadline has passed."""
        if self.quorum is None:
            return taking_part
        wanted = self.quorum if isinstance(self.quorum, int) else -(-taking_part * self.quorum // 1)
        return max(1, min(taking_part, int(wanted)))

    @property
    def holds_back(self) -> bool:
        """Whether the swap waits for requests in flight."""
        return self.running in ("finish", "abort")


def _is_quorum(quorum: float) -> bool:
    return quorum >= 1 if isinstance(quorum, int) else 0 < quorum <= 1


DEFAULT = UpdateTerms()
KEEP_ALL = UpdateTerms(running="continue", acting="keep")
"""Whatever KV there is goes on."""
