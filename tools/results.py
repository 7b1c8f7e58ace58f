"""What each call of one program came to, by call id.

- A call id is opened once; afterwards it is found, running or done, until the program is released.
- A call starts when it is recorded that it may run; what it came to is recorded when it ends.
- The text that is kept is bounded: the oldest results are forgotten, their ids are not.  An id
  whose result is forgotten is refused, because running it again would break the promise.
- A call that was open when its server died is unknown.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

import anyio

from sostenuto.errors import SostenutoError
from sostenuto.tools.journal import ResultRow
from sostenuto.tools.keeping import Keeping
from sostenuto.tools.refused import OutcomeUnknown, Refused

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Pending(Generic[T]):
    """The outcome of one piece of work, for any number of waiters; settled once."""

    _done: anyio.Event = field(default_factory=anyio.Event)
    _outcome: T | SostenutoError | None = None

    @property
    def is_unknown(self) -> bool:
        return isinstance(self._outcome, OutcomeUnknown)

    def settle(self, outcome: T | SostenutoError) -> None:
        """Give the outcome to everyone who waits or will wait; a second one is ignored."""
        if not self._done.is_set():
            self._outcome = outcome
            self._done.set()

    async def wait(self) -> T:
        """The value, or raise the error that took its place."""
        await self._done.wait()
        outcome = self._outcome
        if isinstance(outcome, SostenutoError):
            # Each waiter raises the same object: it must not gather their tracebacks.
            raise outcome.with_traceback(None)
        return cast("T", outcome)


@dataclass(slots=True)
class ResultLog(Generic[T]):
    """Results of one program, oldest first.  Written by the program table alone."""

    max_bytes: int
    size_bytes: Callable[[T | SostenutoError], int]
    keeping: Keeping[T]
    _entries: dict[str, Pending[T] | None] = field(default_factory=dict[str, "Pending[T] | None"])
    _kept_bytes: OrderedDict[str, int] = field(default_factory=OrderedDict[str, int])
    """Of the results that are done and not forgotten, in the order they came."""
    _all_bytes: int = 0

    def find(self, call_id: str) -> Pending[T] | None:
        """What runs or ran under this id; None for a new id, Refused for a forgotten result."""
        entry = self._entries.get(call_id)
        if entry is None and call_id in self._entries:
            raise Refused(
                f"call {call_id!r} ran, and its result is no longer kept: "
                f"a program's results keep within {self.max_bytes} bytes",
                status=410,
            )
        return entry

    @property
    def unknown(self) -> set[str]:
        """Calls of which nobody knows how far they came."""
        return {call_id for call_id, entry in self._entries.items() if entry is not None and entry.is_unknown}

    @property
    def ended(self) -> set[str]:
        """Those that have ended, of a log in which nothing runs."""
        return self._entries.keys() - self.unknown

    def open(self, call_id: str) -> Pending[T]:
        """Claim an id that is new, or whose outcome is unknown."""
        entry = Pending[T]()
        self._entries[call_id] = entry
        return entry

    async def starts(self, call_id: str) -> None:
        """Return when the open call may run; ToolServerError when that could not be recorded."""
        await self.keeping.opens(call_id)

    def close(self, call_id: str, outcome: T | SostenutoError) -> None:
        """Record the outcome of an open id and wake its waiters."""
        entry = self._entries[call_id]
        assert entry is not None
        entry.settle(outcome)
        self.keeping.closes(call_id, outcome)
        self._keep(call_id, outcome)
        self._forget_oldest()

    def restore(self, rows: Iterable[ResultRow]) -> None:
        """Take over what a server that died had recorded."""
        for row in rows:
            outcome = self.keeping.restored(row)
            self._entries[row.call_id] = None
            if outcome is not None:
                entry = self.open(row.call_id)
                entry.settle(outcome)
                self._keep(row.call_id, outcome)

    def _keep(self, call_id: str, outcome: T | SostenutoError) -> None:
        size = self.size_bytes(outcome)
        self._all_bytes += size - self._kept_bytes.pop(call_id, 0)
        self._kept_bytes[call_id] = size

    def _forget_oldest(self) -> None:
        while self._all_bytes > self.max_bytes and len(self._kept_bytes) > 1:
            call_id, size = self._kept_bytes.popitem(last=False)
            self._all_bytes -= size
            self._entries[call_id] = None
            self.keeping.forgets(call_id)
