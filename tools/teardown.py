"""Giving things back, also when it does not work at once.

- Whoever gives something back waits for a bounded time, and then no longer: a teardown that hangs holds
  nobody's place.
- What failed or is late counts as leaked and is tried again in the background, with growing pauses, until
  it succeeds.  No cancellation reaches it before `settle` is over; what is left then is the successor's.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from logging import getLogger

import anyio
from anyio.abc import TaskGroup

from sostenuto.errors import SostenutoError, ToolServerError
from sostenuto.tools.bounded import bounded

log = getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_IGNORED_S = 1.0
"""A step that does not end when it is cancelled at its limit is waited for this much longer."""


@dataclass(slots=True, eq=False)
class _Debt:
    what: str
    step: Callable[[], Awaitable[None]]
    tried: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=lambda: anyio.CancelScope(shield=True))
    leaked: bool = False


class Teardown:
    """Runs in the group that it is given, which ends after `settle`."""

    def __init__(self, group: TaskGroup, limit_s: float) -> None:
        """`limit_s` bounds each attempt, and how long anyone waits for the first."""
        self._group = group
        self._limit_s = limit_s
        self._debts: set[_Debt] = set()
        self._hurry = anyio.Event()
        self._paid = anyio.Event()
        self.failures = 0
        self.leaked = 0
        """Things that are not given back, though they should be."""

    async def give_back(self, what: str, step: Callable[[], Awaitable[None]]) -> None:
        """Return when `step`, which can be repeated, has succeeded, has failed once or is late."""
        debt = self._begin(what, step)
        with anyio.move_on_after(self._limit_s + _IGNORED_S):
            await debt.tried.wait()
        if not debt.tried.is_set():
            self._leak(debt, "not done in its time")

    def give_back_soon(self, what: str, step: Callable[[], Awaitable[None]]) -> None:
        """Begin with `step`, as `give_back` does, and wait for nothing."""
        self._begin(what, step)

    def _begin(self, what: str, step: Callable[[], Awaitable[None]]) -> _Debt:
        debt = _Debt(what, step)
        self._debts.add(debt)
        self._group.start_soon(self._pay, debt)
        return debt

    async def settle(self) -> None:
        """Try everything that leaked once more, and return when all is given back, or late."""
        self._hurry.set()
        with anyio.move_on_after(self._limit_s):
            while self._debts:
                self._paid = anyio.Event()
                await self._paid.wait()
        if self.leaked:
            log.error("%d things could not be given back and are left to the next start", self.leaked)
        for debt in self._debts:
            debt.scope.cancel()

    async def _pay(self, debt: _Debt) -> None:
        with debt.scope:
            await self._try_until_done(debt)
        self._debts.discard(debt)
        self._paid.set()

    async def _try_until_done(self, debt: _Debt) -> None:
        pause_s = _FIRST_PAUSE_S
        while not await self._attempt(debt):
            debt.tried.set()
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        debt.tried.set()
        if debt.leaked:
            self.leaked -= 1

    async def _pause(self, pause_s: float) -> None:
        """Wait; `settle` cuts it short once."""
        if self._hurry.is_set():
            await anyio.sleep(pause_s)
        with anyio.move_on_after(pause_s):
            await self._hurry.wait()

    async def _attempt(self, debt: _Debt) -> bool:
        try:
            await bounded(debt.step, timeout_s=self._limit_s, late=ToolServerError, doing=debt.what)
        except SostenutoError as error:
            self._leak(debt, str(error))
            return False
        return True

    def _leak(self, debt: _Debt, why: str) -> None:
        self.failures += 1
        self.leaked += not debt.leaked
        debt.leaked = True
        log.warning("%s: %s; it is tried again", debt.what, why)
