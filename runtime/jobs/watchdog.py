"""Finds a hang by progress, not by processes: groups run, and none has been completed for a while."""

import logging
from collections.abc import Awaitable, Callable, Sequence

import anyio

from sostenuto.runtime.inspection import Sighting
from sostenuto.runtime.jobs.events import JobEvent, Stalled
from sostenuto.types import ProgramId

Inspect = Callable[[Sequence[ProgramId]], Awaitable[Sighting | None]]
"""Of the programs, the one that was submitted first, and what it does."""
_SHOWN = 5

_log = logging.getLogger(__name__)


class Watchdog:
    """Of one job.  `run` it beside what makes groups."""

    def __init__(
        self,
        after_s: float,
        running: Callable[[], Sequence[ProgramId]],
        otherwise: Callable[[], str],
        inspect: Inspect | None,
        say: Callable[[JobEvent], None],
    ) -> None:
        """`running`: who is waited for.  `otherwise`: what is waited for when nobody runs; empty: nothing."""
        self._after_s = after_s
        self._running = running
        self._otherwise = otherwise
        self._inspect = inspect
        self._say = say
        self._progress = anyio.Event()

    def completed(self) -> None:
        """A group has come to its end."""
        self._progress.set()

    async def run(self) -> None:
        """Tell whenever nothing was completed for so long, until cancelled."""
        while True:
            self._progress = anyio.Event()
            with anyio.move_on_after(self._after_s) as waiting:
                await self._progress.wait()
            if waiting.cancelled_caught:
                await self._tell()

    async def _tell(self) -> None:
        running = self._running()
        if running:
            oldest = None if self._inspect is None else await self._inspect(running)
            self._stalled(tuple(map(str, running[:_SHOWN])), oldest)
        elif otherwise := self._otherwise():
            self._stalled((otherwise,), None)

    def _stalled(self, programs: tuple[str, ...], oldest: Sighting | None) -> None:
        event = Stalled(self._after_s, programs, oldest)
        _log.warning("%s", event)
        self._say(event)
