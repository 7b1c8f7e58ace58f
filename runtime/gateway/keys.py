"""Keys of the gateway: who may do what, and which program a key belongs to.

Only hashes are kept: what the gateway knows does not let anybody in.
"""

import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

PREFIX = "so-"


class Scope(StrEnum):
    AGENT = "agent"
    """Model calls."""
    METRICS = "metrics"
    ADMIN = "admin"
    """Everything: programs, workers, weights."""


@dataclass(frozen=True, slots=True)
class Grantee:
    """Whom a key belongs to.  `program`: the calls made with it are that program's."""

    scopes: frozenset[Scope]
    program: str | None = None
    is_over: bool = False
    """The program has ended; the key says so instead of being unknown."""

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or Scope.ADMIN in self.scopes


EVERYTHING = Grantee(frozenset({Scope.ADMIN}))
"""Where no keys are configured, whoever reaches the gateway."""


class Keys:
    """By hash.  A key of 256 random bits needs no salt and no slow hash."""

    def __init__(self, *, remembered: int = 10_000) -> None:
        """`remembered`: keys of programs that are over."""
        self._grantees: dict[bytes, Grantee] = {}
        self._over = OrderedDict[bytes, Grantee]()
        self._of_program: dict[str, list[bytes]] = {}
        self._remembered = remembered

    def __len__(self) -> int:
        return len(self._grantees)

    def add(self, key: str, scopes: Iterable[Scope]) -> None:
        """A key that was chosen by whoever runs the gateway."""
        self._grantees[_hash(key)] = Grantee(frozenset(scopes))

    def mint(self, program: str) -> str:
        """A new key for one program."""
        key = PREFIX + secrets.token_urlsafe(32)
        self._grantees[_hash(key)] = Grantee(frozenset({Scope.AGENT}), program)
        self._of_program.setdefault(program, []).append(_hash(key))
        return key

    def find(self, key: str) -> Grantee | None:
        hashed = _hash(key)
        return self._grantees.get(hashed) or self._over.get(hashed)

    def program_over(self, program: str) -> None:
        """Its keys open nothing any more, and say why."""
        for hashed in self._of_program.pop(program, ()):
            del self._grantees[hashed]
            self._over[hashed] = Grantee(frozenset(), program, is_over=True)
        while len(self._over) > self._remembered:
            self._over.popitem(last=False)


def _hash(key: str) -> bytes:
    return sha256(key.encode(errors="surrogatepass")).digest()
