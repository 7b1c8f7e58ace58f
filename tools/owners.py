"""Who may keep programs on this server: leases and fences, watched."""

from collections.abc import Callable, Iterable
from logging import getLogger
from math import inf

import anyio

from sostenuto.tools.journal import Journal
from sostenuto.tools.leases import Fences, Leases
from sostenuto.tools.refused import Refused

log = getLogger(__name__)


class Owners:
    """Time is that of the event loop.  Written by the program table and by `watch` alone."""

    def __init__(self, longest_lease_s: float, journal: Journal) -> None:
        self._journal = journal
        self._leases = Leases(longest_lease_s)
        self._fences = Fences(dict(journal.left.epochs))
        self._changed = anyio.Event()

    def begin(self, owner: str, lease_s: float) -> None:
        """Give the owner at least `lease_s` from now."""
        self._leases.begin(owner, lease_s, now_s=anyio.current_time())
        self._changed.set()

    def renew(self, owner: str, lease_s: float) -> None:
        """Let the owner's lease end `lease_s` from now."""
        self._leases.renew(owner, lease_s, now_s=anyio.current_time())
        self._changed.set()

    def check(self, owner: str) -> None:
        """Refuse an owner that a newer epoch of its name has fenced."""
        if (newest := self._fences.newest(owner)) is not None:
            raise Refused(
                f"owner {owner}: its name came back with epoch {newest}, which fences it", status=409
            )

    def enter(self, owner: str, present: Iterable[str]) -> list[str]:
        """Let the owner in, or refuse it; those `present` that it fences have no lease any more."""
        self.check(owner)
        risen = self._fences.raise_to(owner)
        if risen is None:
            return []
        self._journal.epoch_rose(*risen)
        fenced = self._fences.fenced(present)
        for other in fenced:
            log.warning("%s is fenced by %s: its programs are released", other, owner)
            self._leases.drop(other)
        return fenced

    def left_s(self) -> dict[str, float]:
        """Seconds left to each owner's lease."""
        return self._leases.left_s(now_s=anyio.current_time())

    async def watch(self, expired: Callable[[str], None]) -> None:
        """Name, forever, each owner whose lease has run out."""
        while True:
            self._changed = anyio.Event()
            next_s = self._leases.next_expiry_s
            with anyio.CancelScope(deadline=inf if next_s is None else next_s):
                await self._changed.wait()
            for owner in self._leases.expire(now_s=anyio.current_time()):
                log.warning("lease of %s ran out: its programs are released", owner)
                expired(owner)
