"""One tool server of a fleet, kept: it joins, and when it is lost it comes back.

- A server of ours that has served and dies is started again on what it left, so often and no more; one that
  runs elsewhere is waited for.
- Each time it is met as a new epoch of the same owner, which fences the one before.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio

from sostenuto.errors import ConfigError, SostenutoError, ToolServerError, lone_error
from sostenuto.runtime.tool_place import Place
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.refused import WrongToken
from sostenuto.tools.wire import Supply

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""Between two attempts to reach it, or to start it."""
_COUNTED_S = 600.0
"""For so long a restart counts."""

_log = logging.getLogger(__name__)


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Linked:
    """A server that is there, or may be."""

    client: ToolServerClient
    """Entered."""
    ended: Callable[[], Awaitable[str]]
    """Returns why, once its process has ended; of one that is not ours, never."""
    kill: Callable[[], None] = _nothing
    """Ends its process, if that is ours, so that what it has left stays as it is."""


@dataclass(frozen=True, slots=True)
class Link:
    """How one server is reached, any number of times."""

    url: str
    """Its name, too."""
    open: Callable[[int], AbstractAsyncContextManager[Linked]]
    """With a client whose owner has this epoch; an error of ours when it does not start."""
    restarts: int | None = None
    """How often it is started again within ten minutes.  None: it is not ours to start, and waited for."""


def reached(url: str, client: Callable[[int], ToolServerClient]) -> Link:
    """A server that others run."""

    @asynccontextmanager
    async def opened(epoch: int) -> AsyncGenerator[Linked]:
        async with client(epoch) as entered:
            yield Linked(entered, _never)

    return Link(url, opened)


async def _never() -> str:
    await anyio.sleep_forever()
    return ""


class Fleet(Protocol):
    """What a keeper tells of its server."""

    def absent(self, url: str, why: str) -> None: ...

    def joins(self, place: Place) -> None: ...

    async def go_on(self, place: Place) -> None: ...

    def leaves(self, place: Place, why: str) -> None: ...

    def give_up(self, url: str, why: str) -> None: ...


class ToolKeeper:
    """Use `run`, once."""

    def __init__(self, link: Link, fleet: Fleet) -> None:
        self.tried = anyio.Event()
        """Set once it is known whether the server answers."""
        self._link = link
        self._fleet = fleet
        self._epoch = 0
        self._began_again_s: list[float] = []
        self._pause_s = _FIRST_PAUSE_S

    async def run(self) -> None:
        """Keep it, until it is given up.

        ConfigError when it refuses our token at the start; what one of ours does not start with is raised.
        """
        while True:
            why = await self._life()
            if not self._may_come_back(why):
                return
            await anyio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    async def _life(self) -> str:
        """From its opening to its loss; why it was lost."""
        self._epoch += 1
        try:
            with lone_error():
                async with self._link.open(self._epoch) as linked:
                    place = Place(self._link.url, linked.client, await self._answers(linked.client))
                    self._fleet.joins(place)
                    self._pause_s = _FIRST_PAUSE_S
                    self.tried.set()
                    await self._until_lost(place, linked)
                    return place.lost
        except SostenutoError as error:
            if not self.tried.is_set():
                raise
            return str(error)

    async def _answers(self, client: ToolServerClient) -> Supply:
        """What it has, as soon as it answers."""
        url = self._link.url
        while True:
            try:
                return await client.supply()
            except ToolServerError as error:
                if self._link.restarts is not None:
                    raise
                if isinstance(error, WrongToken) and not self.tried.is_set():
                    raise ConfigError(f"tool_servers: {url}: {error}; see its token_env") from error
                self._fleet.absent(url, str(error))
                if not self.tried.is_set():
                    _log.warning("tool server %s takes no programs until it answers: %s", url, error)
                    self.tried.set()
            await anyio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    async def _until_lost(self, place: Place, linked: Linked) -> None:
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                # At once: programs need not wait until the lease cannot be kept.
                why = await linked.ended()
                if not place.lost:
                    self._fleet.leaves(place, why)

            group.start_soon(watch)
            group.start_soon(self._fleet.go_on, place)
            try:
                await place.ask(lambda client: client.heartbeats())
            except ToolServerError as error:
                if not place.lost:
                    linked.kill()
                    self._fleet.leaves(place, str(error))
            group.cancel_scope.cancel()

    def _may_come_back(self, why: str) -> bool:
        allowed, url = self._link.restarts, self._link.url
        if allowed is None:
            return True
        now_s = anyio.current_time()
        self._began_again_s = [at_s for at_s in self._began_again_s if now_s - at_s < _COUNTED_S]
        if len(self._began_again_s) >= allowed:
            self._fleet.give_up(
                url, f"{why}; it was started again {len(self._began_again_s)} times, and is given up"
            )
            return False
        self._began_again_s.append(now_s)
        _log.warning("tool server %s is started again: %s", url, why)
        return True
