"""A program's place in the scheduler, for whoever drives it."""

import asyncio
from collections.abc import Callable

from sostenuto.errors import EngineError, Overloaded
from sostenuto.runtime.drive import Grant, Surroundings
from sostenuto.scheduler.actions import TurnAway
from sostenuto.types import ProgramId


class Mail:
    """The scheduler's last word to a program: what it said before the loss of an engine does not count."""

    def __init__(self) -> None:
        self._grant: Grant | None = None
        self._lost: str | None = None
        self._comes: asyncio.Future[None] | None = None

    def put(self, grant: Grant) -> None:
        self._grant = grant
        self._wake()

    def lose(self, reason: str) -> None:
        """There will be no other word."""
        self._lost = reason
        self._wake()

    async def take(self) -> Grant:
        """EngineError once the place is lost."""
        while self._grant is None:
            if self._lost is not None:
                raise EngineError(self._lost)
            self._comes = asyncio.get_running_loop().create_future()
            await self._comes
        grant, self._grant = self._grant, None
        return grant

    def _wake(self) -> None:
        if self._comes is not None and not self._comes.done():
            self._comes.set_result(None)


class Place:
    """From `Dispatcher.admit` until `leave`: the program is in the scheduler, which has a lease on it."""

    def __init__(
        self,
        program_id: ProgramId,
        around: Surroundings,
        mail: Mail,
        *,
        leave: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        self.program_id = program_id
        self.around = around
        self._mail = mail
        self._lost = lost
        self._leave: Callable[[], None] | None = leave

    async def grant(self) -> Grant:
        """The scheduler's next word; EngineError once the place is lost, Overloaded when turned away."""
        grant = await self._mail.take()
        if isinstance(grant, TurnAway):
            raise Overloaded(
                f"too many programs wait; try again in {grant.retry_after_s:.0f} s, or raise "
                "scheduler.queue_limit",
                retry_after_s=grant.retry_after_s,
            )
        return grant

    def lose(self, reason: str) -> None:
        """For the dispatcher: the lease ended, or no engine will come back.  It has to be left then."""
        self._mail.lose(reason)
        self._lost(reason)

    def hand_over(self, lost: Callable[[str], None]) -> None:
        """Somebody else drives the program from now on, and is told why it has to be left."""
        self._lost = lost

    def leave(self) -> None:
        """The program is over for the scheduler.  Safe to call twice."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()
