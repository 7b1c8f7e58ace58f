"""What an engine is told our requests and sessions are called.

- The scheduler's abort takes every request whose id begins with the one it is given, so no id here is the
  beginning of another: each ends with a mark that is nowhere else in it.
- An id is never used twice, also not by a runtime that comes after this one: the server refuses an id
  that runs, and a session that was closed stays closed.
"""

import secrets
from dataclasses import dataclass, field
from itertools import count
from urllib.parse import quote

from sostenuto.types import ProgramId

_END = "!"


@dataclass(slots=True)
class Names:
    """Of one adapter.  `prefix` tells ids from other clients' and from the server's own health checks."""

    prefix: str = field(default_factory=lambda: f"so-{secrets.token_hex(4)}")
    _count: "count[int]" = field(default_factory=count)

    def of(self, name: str) -> str:
        """An id that was never given before."""
        return f"{self.prefix}-{next(self._count)}-{quote(name, safe='')}{_END}"


@dataclass(slots=True)
class Held:
    """A program's KV in the engine."""

    session_id: str
    tokens: int = 0
    """Its context when its last turn ended."""


@dataclass(slots=True)
class Sessions:
    """Whose KV the engine is asked to keep, under which session."""

    names: Names
    _held: dict[ProgramId, Held] = field(default_factory=dict[ProgramId, Held])

    def __len__(self) -> int:
        return len(self._held)

    @property
    def tokens(self) -> int:
        """Of all held programs; prefixes that they share are counted for each."""
        return sum(held.tokens for held in self._held.values())

    def of(self, program_id: ProgramId) -> Held:
        """The program's session, a new one where it has none."""
        if program_id not in self._held:
            self._held[program_id] = Held(self.names.of(program_id))
        return self._held[program_id]

    def release(self, program_id: ProgramId) -> str | None:
        """Forget the program's session, and say which one has to be closed."""
        held = self._held.pop(program_id, None)
        return held.session_id if held else None

    def forget(self) -> int:
        """The engine dropped all of them; how many there were."""
        dropped = len(self._held)
        self._held.clear()
        return dropped
