"""Programs spread over several tool servers.

Invariants:
- A program lives on one server, from its prepare to its release.
- Whatever is asked of a server that was lost fails at once and names it; nothing waits for it.
- A server that answers again begins empty: our new owner's epoch fences what it may have kept.
- Written by the event loop's tasks alone.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import anyio
from pydantic import JsonValue

from sostenuto.errors import ConfigError, SandboxError, SostenutoError, ToolServerError, lone_error
from sostenuto.runtime.tool_place import Place, best, key_of
from sostenuto.scheduler.actions import ToolServerJoined
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.refused import WrongToken
from sostenuto.tools.wire import EnvironmentRef, Moved, Prepared, Reward, Supply
from sostenuto.types import CallId, Episode, ProgramId, SandboxRung, ToolCall, ToolResult

T = TypeVar("T")
Tell = Callable[[ToolServerJoined], None]

_AVOIDED_S = 10.0
"""How long a server that could not prepare something comes last."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
"""Between two looks whether a server that was lost answers."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Link:
    """How one server is reached."""

    url: str
    client: Callable[[int], ToolServerClient]
    """A new one, not yet entered, whose owner has this epoch."""


class ToolFleet:
    """A ToolServer made of several; use `open_fleet`."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        """Those that answer, by URL."""
        self._absent: dict[str, str] = {}
        """Why the others do not."""
        self._at: dict[ProgramId, Place] = {}
        self._told: list[Tell] = []
        self._limits = ToolServerJoined()

    def __repr__(self) -> str:
        here = " ".join(f"{place.url}={len(place.claims)}" for place in self._places.values())
        return f"<ToolFleet {here or 'none answers'}>"

    @property
    def living(self) -> tuple[str, ...]:
        """URLs of the servers that take programs."""
        return tuple(self._places)

    @property
    def isolation(self) -> str:
        """What sandboxes are separated by on those that answer, for people."""
        return "; ".join(sorted({place.supply.isolation for place in self._places.values()}))

    # ---- what a program asks for ----

    async def prepare(
        self,
        program_id: ProgramId,
        environment: EnvironmentRef,
        task: dict[str, JsonValue],
        *,
        seed: int,
        timeout_s: float,
    ) -> Prepared:
        """Prepare it on the server that suits it best; where the infrastructure fails, once on another.

        Both within the same deadline.
        """
        deadline_s = anyio.current_time() + timeout_s

        async def on(place: Place) -> Prepared:
            left_s = deadline_s - anyio.current_time()
            return await self._prepare(
                place,
                program_id,
                environment,
                lambda client: client.prepare(program_id, environment, task, seed=seed, timeout_s=left_s),
            )

        first = self._best(environment)
        try:
            return await on(first)
        except (SandboxError, ToolServerError) as error:
            first.avoided_until_s = anyio.current_time() + _AVOIDED_S
            first.prepared.discard(key_of(environment))
            others = [place for place in self._places.values() if place is not first]
            if not others or anyio.current_time() >= deadline_s:
                raise
            _log.warning("%s could not be prepared on %s: %s", program_id, first.url, error)
        return await on(self._best(environment, without=first))

    async def call(
        self, program_id: ProgramId, call_id: CallId, call: ToolCall, *, timeout_s: float, priority: int = 0
    ) -> ToolResult:
        return await self._place(program_id).ask(
            lambda client: client.call(program_id, call_id, call, timeout_s=timeout_s, priority=priority)
        )

    async def reward(
        self, program_id: ProgramId, call_id: CallId, episode: Episode, *, timeout_s: float
    ) -> Reward:
        return await self._place(program_id).ask(
            lambda client: client.reward(program_id, call_id, episode, timeout_s=timeout_s)
        )

    async def move(self, program_id: ProgramId, rung: SandboxRung) -> Moved:
        return await self._place(program_id).ask(lambda client: client.move(program_id, rung))

    async def release(self, program_id: ProgramId) -> None:
        """Return when the program holds nothing any more, at once where its server is gone."""
        place = self._at.get(program_id)
        if place is None:
            return
        try:
            await place.ask(lambda client: client.release(program_id))
        except ToolServerError:
            if not place.lost:
                raise
        self._forget(program_id, place)

    # ---- what sandboxes may take ----

    @contextmanager
    def limiting(self, tell: Tell) -> Generator[None]:
        """Tell what the servers that answer can give to sandboxes together, now and whenever it changes."""
        self._told.append(tell)
        tell(self._limits)
        try:
            yield
        finally:
            self._told.remove(tell)

    def _limits_change(self) -> None:
        budgets = [place.supply.sandbox_memory_bytes for place in self._places.values()]
        # With none left the old limits stand: programs are to fail there, not to wait forever.
        if not budgets:
            return
        known = [budget for budget in budgets if budget is not None]
        limits = ToolServerJoined(memory_bytes=sum(known) if len(known) == len(budgets) else None)
        if limits != self._limits:
            self._limits = limits
            for tell in self._told:
                tell(limits)

    # ---- which server ----

    def _best(self, environment: EnvironmentRef, *, without: Place | None = None) -> Place:
        places = [place for place in self._places.values() if place is not without]
        if not places:
            raise ToolServerError(f"no tool server answers: {self.why_not()}")
        return best(places, key_of(environment), now_s=anyio.current_time())

    def why_not(self) -> str:
        return "; ".join(f"{url}: {why}" for url, why in self._absent.items())

    def _place(self, program_id: ProgramId) -> Place:
        place = self._at.get(program_id)
        if place is None:
            raise ToolServerError(f"no program {program_id} on any tool server")
        return place

    async def _prepare(
        self,
        place: Place,
        program_id: ProgramId,
        environment: EnvironmentRef,
        prepare: Callable[[ToolServerClient], Awaitable[Prepared]],
    ) -> Prepared:
        self._at[program_id] = place
        place.claims[program_id] = environment.memory_bytes
        place.prepared.add(key_of(environment))
        try:
            return await place.ask(prepare)
        except SostenutoError:
            # Nothing of it is left there.  One that is cancelled may still be: it is released.
            self._forget(program_id, place)
            raise

    def _forget(self, program_id: ProgramId, place: Place) -> None:
        place.claims.pop(program_id, None)
        if self._at.get(program_id) is place:
            del self._at[program_id]

    # ---- servers come and go ----

    async def keep(self, link: Link, tried: anyio.Event) -> None:
        """Take the server whenever it answers, and let it go whenever its lease cannot be kept, forever.

        `tried` is set once it is known whether it answers.  ConfigError when it refuses the token until then.
        """
        epoch = 0
        while True:
            epoch += 1
            async with link.client(epoch) as client:
                supply = await self._reached(link.url, client, tried)
                place = Place(link.url, client, supply)
                self._joins(place)
                tried.set()
                try:
                    await client.heartbeats()
                except ToolServerError as error:
                    self._leaves(place, str(error))

    async def _reached(self, url: str, client: ToolServerClient, tried: anyio.Event) -> Supply:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await client.supply()
            except ToolServerError as error:
                if isinstance(error, WrongToken) and not tried.is_set():
                    raise ConfigError(f"tool_servers: {url}: {error}; see its token_env") from error
                self._absent[url] = str(error)
                if not tried.is_set():
                    _log.warning("tool server %s takes no programs until it answers: %s", url, error)
                    tried.set()
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _joins(self, place: Place) -> None:
        self._absent.pop(place.url, None)
        self._places[place.url] = place
        self._limits_change()

    def _leaves(self, place: Place, why: str) -> None:
        _log.warning("tool server %s is lost with %d programs: %s", place.url, len(place.claims), why)
        self._absent[place.url] = why
        del self._places[place.url]
        place.lose(why)
        self._limits_change()


@asynccontextmanager
async def open_fleet(links: Sequence[Link]) -> AsyncGenerator[ToolFleet]:
    """The servers as one, with heartbeats, while the block runs; it goes on when some of them are lost.

    ConfigError when one refuses our token at the start, ToolServerError when none answers.
    """
    fleet = ToolFleet()
    tried = [anyio.Event() for _ in links]
    with lone_error():
        async with anyio.create_task_group() as group:
            for link, is_tried in zip(links, tried, strict=True):
                group.start_soon(fleet.keep, link, is_tried)
            for is_tried in tried:
                await is_tried.wait()
            if not fleet.living:
                raise ToolServerError(f"no tool server answers: {fleet.why_not()}")
            yield fleet
            group.cancel_scope.cancel()
