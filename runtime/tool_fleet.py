"""Programs spread over several tool servers.

Invariants:
- A program lives on one server, from its prepare to its release, or until that one is lost.
- Of a lost server's programs those whose last snapshot is what their record needs go on with the server that
  is started in its place; whatever is asked of the others fails at once and names the reason.
- A server that answers again has nothing else of ours: our new owner's epoch fences what it may have kept.
- Written by the event loop's tasks alone.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager

import anyio
from pydantic import JsonValue

from sostenuto.errors import SandboxError, SostenutoError, ToolServerError, lone_error
from sostenuto.runtime.tool_keeper import Link, ToolKeeper
from sostenuto.runtime.tool_place import Place, best, key_of
from sostenuto.runtime.tool_stays import RETURN_S, Stay
from sostenuto.scheduler.events import ToolServerJoined
from sostenuto.tools.wire import EnvironmentRef, Moved, Prepared, ProgramState, Reward
from sostenuto.types import CallId, Episode, ProgramId, SandboxRung, ToolCall, ToolResult

Tell = Callable[[ToolServerJoined], None]

_AVOIDED_S = 10.0
"""How long a server that could not prepare something comes last."""

_log = logging.getLogger(__name__)


class ToolFleet:
    """A ToolServer made of several; use `open_fleet`."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        """Those that answer, by URL."""
        self._absent: dict[str, str] = {}
        """Why the others do not."""
        self._given_up: set[str] = set()
        """Those of them that will not come back."""
        self._stays: dict[ProgramId, Stay] = {}
        self._joined = anyio.Event()
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
            stay = Stay(program_id, environment, task, seed, place)
            return await self._prepare(stay, left_s)

        first = await self._best(environment, deadline_s)
        try:
            return await on(first)
        except (SandboxError, ToolServerError) as error:
            first.avoided_until_s = anyio.current_time() + _AVOIDED_S
            first.prepared.discard(key_of(environment))
            elsewhere = first.lost or len(self._places) > 1
            if not elsewhere or anyio.current_time() >= deadline_s:
                raise
            _log.warning("%s could not be prepared on %s: %s", program_id, first.url, error)
        return await on(await self._best(environment, deadline_s, without=first))

    async def call(
        self, program_id: ProgramId, call_id: CallId, call: ToolCall, *, timeout_s: float, priority: int = 0
    ) -> ToolResult:
        stay = self._stay(program_id)
        result = await stay.ask(
            lambda client: client.call(program_id, call_id, call, timeout_s=timeout_s, priority=priority)
        )
        stay.answered(call_id)
        return result

    async def reward(
        self, program_id: ProgramId, call_id: CallId, episode: Episode, *, timeout_s: float
    ) -> Reward:
        return await self._stay(program_id).ask(
            lambda client: client.reward(program_id, call_id, episode, timeout_s=timeout_s)
        )

    async def move(self, program_id: ProgramId, rung: SandboxRung) -> Moved:
        stay = self._stay(program_id)
        moved = await stay.ask(lambda client: client.move(program_id, rung))
        stay.moved(moved)
        return moved

    async def state_of(self, program_id: ProgramId) -> ProgramState | None:
        """What its server says of it; None when it has nothing there."""
        stay = self._stays.get(program_id)
        if stay is None:
            return None
        programs = (await stay.place.ask(lambda client: client.state())).programs
        return next((state for state in programs if state.program_id == program_id), None)

    async def release(self, program_id: ProgramId) -> None:
        """Return when the program holds nothing any more, at once where its server is gone."""
        stay = self._stays.get(program_id)
        if stay is None:
            return
        # One that was started in its place may have what is left of it.
        place = self._places.get(stay.place.url, stay.place)
        try:
            await place.ask(lambda client: client.release(program_id))
        except ToolServerError:
            if not place.lost:
                raise
        self._forget(stay)

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

    async def _best(
        self, environment: EnvironmentRef, deadline_s: float, *, without: Place | None = None
    ) -> Place:
        """The one that suits it best; where none answers, the first that does in time."""
        with anyio.move_on_at(min(deadline_s, anyio.current_time() + RETURN_S)):
            while not self._places and set(self._absent) - self._given_up:
                self._joined = anyio.Event()
                await self._joined.wait()
        places = [place for place in self._places.values() if place is not without]
        if not places:
            raise ToolServerError(f"no tool server answers: {self.why_not()}")
        return best(places, key_of(environment), now_s=anyio.current_time())

    def why_not(self) -> str:
        return "; ".join(f"{url}: {why}" for url, why in self._absent.items())

    def _stay(self, program_id: ProgramId) -> Stay:
        stay = self._stays.get(program_id)
        if stay is None:
            raise ToolServerError(f"no program {program_id} on any tool server")
        return stay

    async def _prepare(self, stay: Stay, timeout_s: float) -> Prepared:
        program_id, environment = stay.program_id, stay.environment
        self._stays[program_id] = stay
        stay.stands_at(stay.place)
        stay.place.prepared.add(key_of(environment))
        try:
            return await stay.place.ask(
                lambda client: client.prepare(
                    program_id, environment, stay.task, seed=stay.seed, timeout_s=timeout_s
                )
            )
        except SostenutoError:
            # Nothing of it is left there.  One that is cancelled may still be: it is released.
            self._forget(stay)
            raise

    def _forget(self, stay: Stay) -> None:
        stay.leaves()
        if self._stays.get(stay.program_id) is stay:
            del self._stays[stay.program_id]

    # ---- servers come and go, for those who keep them ----

    def absent(self, url: str, why: str) -> None:
        """The server does not answer yet."""
        self._absent[url] = why

    def joins(self, place: Place) -> None:
        self._absent.pop(place.url, None)
        self._places[place.url] = place
        self._joined.set()
        self._limits_change()

    async def go_on(self, place: Place) -> None:
        """Let the programs go on that the place's server had, before it was lost, in a snapshot."""
        async with anyio.create_task_group() as group:
            for stay in self._waiting_for(place.url):
                group.start_soon(stay.go_on, place)

    def leaves(self, place: Place, why: str) -> None:
        """The server is lost, and what was asked of it fails."""
        stays = [stay for stay in self._stays.values() if stay.place is place]
        place.lose(why)
        for stay in stays:
            stay.loses_server()
        waiting = sum(stay.waits for stay in stays)
        _log.warning(
            "tool server %s is lost with %d programs, of which %d may go on when it is back: %s",
            place.url, len(stays), waiting, why,
        )  # fmt: skip
        self._absent[place.url] = why
        del self._places[place.url]
        self._limits_change()

    def give_up(self, url: str, why: str) -> None:
        """The server will not come back."""
        self._absent[url] = why
        self._given_up.add(url)
        self._joined.set()
        for stay in self._waiting_for(url):
            stay.gives_up(why)

    def _waiting_for(self, url: str) -> list[Stay]:
        return [stay for stay in self._stays.values() if stay.place.url == url and stay.waits]


@asynccontextmanager
async def open_fleet(links: Sequence[Link]) -> AsyncGenerator[ToolFleet]:
    """The servers as one, with heartbeats, while the block runs; it goes on when some of them are lost.

    ConfigError when one refuses our token at the start, ToolServerError when none answers; what a server of
    ours does not start with is raised as it is.
    """
    fleet = ToolFleet()
    keepers = [ToolKeeper(link, fleet) for link in links]
    # Ended by us alone: programs that are cancelled with the block still give their environments back.
    scopes = [anyio.CancelScope(shield=True) for _ in keepers]

    async def keep(keeper: ToolKeeper, scope: anyio.CancelScope) -> None:
        with scope:
            await keeper.run()

    with lone_error():
        async with anyio.create_task_group() as group:
            for keeper, scope in zip(keepers, scopes, strict=True):
                group.start_soon(keep, keeper, scope)
            try:
                for keeper in keepers:
                    await keeper.tried.wait()
                if not fleet.living:
                    raise ToolServerError(f"no tool server answers: {fleet.why_not()}")
                yield fleet
            finally:
                for scope in scopes:
                    scope.cancel()
