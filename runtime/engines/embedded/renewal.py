"""What a swap of the model's weights does to the KV of a pool."""

from dataclasses import dataclass, field

from sostenuto.runtime.engines.embedded.pool import Pool
from sostenuto.runtime.engines.embedded.turn import Turn
from sostenuto.runtime.engines.embedded.weights import parsed
from sostenuto.runtime.engines.wire import CommitRequest
from sostenuto.types import Version


@dataclass(frozen=True, slots=True)
class Renewed:
    """What was given up."""

    dropped_programs: int = 0
    """That held KV between their turns."""
    dropped: list[str] = field(default_factory=list[str])
    """Those of them whose KV was too old, where others keep theirs."""
    recomputed: int = 0
    """Requests that run, and compute their KV again."""
    retracted: tuple[Turn, ...] = ()
    """Those of them that have lost their row for it."""


def renew(pool: Pool, request: CommitRequest, version: Version) -> Renewed:
    """Give up what the request says, now that `version` is served.

    What runs is given up by its age alone, also where all that is held goes: it goes on by other terms.
    """
    oldest = None if request.oldest_kv is None else parsed(request.oldest_kv)
    dropped: list[str] = []
    if request.held == "drop":
        programs = pool.raise_floor(version)
    else:
        dropped = [] if oldest is None else pool.forget_older(oldest)
        programs = len(dropped)
    if request.running == "recompute":
        return Renewed(programs, dropped, recomputed=pool.recompute())
    retracted = () if oldest is None else pool.retract_older(oldest)
    return Renewed(programs, dropped, len(retracted), retracted)
