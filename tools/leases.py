"""Owners' leases on the tool server: who may keep programs here, and until when.

- Pure: time is an argument, in seconds of one clock that never goes back.
- An owner without a lease is unknown; what it owned has to be released.
- An owner may be called NAME/EPOCH, the epoch a number that rises when NAME starts again: whoever comes
  with a higher one fences those with lower ones, for good.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_WITH_EPOCH = re.compile(r"(.+)/([0-9]{1,18})", re.DOTALL)


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

    def drop(self, owner: str) -> None:
        """End the owner's lease now."""
        self._expiry_s.pop(owner, None)


@dataclass(slots=True)
class Fences:
    """The highest epoch of each name.  Written by the program table alone."""

    epochs: dict[str, int] = field(default_factory=dict[str, int])

    def newest(self, owner: str) -> int | None:
        """The epoch by which the owner is fenced; None when it is not."""
        name, epoch = split_owner(owner)
        highest = self.epochs.get(name, 0)
        return highest if epoch is not None and epoch < highest else None

    def fenced(self, owners: Iterable[str]) -> list[str]:
        """Those of the owners that are fenced."""
        return [owner for owner in owners if self.newest(owner) is not None]

    def raise_to(self, owner: str) -> tuple[str, int] | None:
        """Let the owner fence those before it; its name and epoch when that is news."""
        name, epoch = split_owner(owner)
        if epoch is None or epoch <= self.epochs.get(name, -1):
            return None
        self.epochs[name] = epoch
        return name, epoch


def split_owner(owner: str) -> tuple[str, int | None]:
    """Name and epoch; an owner who has no epoch is a name of its own."""
    found = _WITH_EPOCH.fullmatch(owner)
    return (found[1], int(found[2])) if found else (owner, None)
