"""Owners' leases on the tool server: who may keep programs here, and until when.

- Pure: time is an argument, in seconds of one clock that never goes back.
- An owner without a lease is unknown; what it owned has to be released.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Leases:
    """The expiry of every owner's lease.  Written by the program table alone."""

    longest_s: float
    """No lease is given for longer, whatever was asked for."""
    _expiry_s: dict[str, float] = field(default_factory=dict[str, float])

    def renew(self, owner: str, lease_s: float, *, now_s: float) -> None:
        """Let the owner's lease end `lease_s` from now, be that sooner or later than before."""
        self._expiry_s[owner] = now_s + min(lease_s, self.longest_s)

    def begin(self, owner: str, lease_s: float, *, now_s: float) -> None:
        """Give the owner at least `lease_s` from now."""
        if self._expiry_s.get(owner, now_s) < now_s + lease_s:
            self.renew(owner, lease_s, now_s=now_s)

    def expire(self, *, now_s: float) -> list[str]:
        """Forget the leases that have run out and name their owners."""
        expired = [owner for owner, expiry_s in self._expiry_s.items() if expiry_s <= now_s]
        for owner in expired:
            del self._expiry_s[owner]
        return expired

    @property
    def next_expiry_s(self) -> float | None:
        """When the first lease runs out; None when there is none."""
        return min(self._expiry_s.values(), default=None)

    def left_s(self, *, now_s: float) -> dict[str, float]:
        """Seconds left to each owner."""
        return {owner: expiry_s - now_s for owner, expiry_s in self._expiry_s.items()}
