"""One program's stay on a tool server, and what is known of how it could go on after that one's death."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
from pydantic import JsonValue

from sostenuto.errors import SostenutoError, ToolServerError
from sostenuto.runtime.tool_place import Place
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.refused import Interrupted, Unreachable
from sostenuto.tools.results import Pending
from sostenuto.tools.wire import EnvironmentRef, Moved, Prepared
from sostenuto.types import CallId, ProgramId, SandboxRung

T = TypeVar("T")

RETURN_S = 60.0
"""How long programs that could go on wait for their server."""
_AGAIN_S = 0.5


@dataclass(slots=True, eq=False)
class Stay:
    """Written by the fleet alone.

    - What its server has answered to a call, its snapshot does not have: then it ends with the server, unless
      that one takes snapshots by itself.
    - Whether it can go on, and whether its snapshot is what its record needs, is decided by the next server.
    """

    program_id: ProgramId
    environment: EnvironmentRef
    task: dict[str, JsonValue]
    seed: int
    place: Place
    ends_with_server: str = ""
    """Why it cannot go on without this server, as far as is known here; empty: it may."""
    _seen: list[CallId] = field(default_factory=list[CallId])
    _back: Pending[None] = field(default_factory=Pending[None])
    """Settled, after its server was lost, when it goes on or cannot."""
    _until_s: float = 0.0
    _resuming: anyio.Lock = field(default_factory=anyio.Lock)

    def __post_init__(self) -> None:
        if self.place.supply.snapshot_idle_s is None:
            self.ends_with_server = "no snapshot of it was taken"

    def stands_at(self, place: Place) -> None:
        """From now on; it counts among what the place has taken."""
        self.leaves()
        self.place = place
        place.claims[self.program_id] = self.environment.memory_bytes

    def leaves(self) -> None:
        self.place.claims.pop(self.program_id, None)

    async def ask(self, ask: Callable[[ToolServerClient], Awaitable[T]]) -> T:
        """The answer of its server, or of the one that it goes on with; ToolServerError when it cannot.

        It is asked for again after the server was away, so it has to be something that is done once.
        """
        tried_until_s, is_interrupted = anyio.current_time() + RETURN_S, False
        while True:
            place = await self._found()
            try:
                if is_interrupted:
                    await self._resume(place)
                return await place.ask(ask)
            except ToolServerError as error:
                is_interrupted = isinstance(error, Interrupted)
                is_away = isinstance(error, Unreachable) and anyio.current_time() < tried_until_s
                if not (place.lost or is_interrupted or is_away):
                    raise
                if self.ends_with_server:
                    raise self._over(str(error)) from error

    def answered(self, call_id: CallId) -> None:
        """Its record has the result from now on."""
        self._seen.append(call_id)
        if not self.ends_with_server and self.place.supply.snapshot_idle_s is None:
            self.ends_with_server = f"call {call_id} came after its last snapshot"

    def moved(self, moved: Moved) -> None:
        if moved.rung is SandboxRung.SNAPSHOTTED:
            self.ends_with_server = moved.ends_with_server

    def loses_server(self) -> None:
        """Its place is lost: it waits for a new one, or ends."""
        self._back = Pending[None]()
        self._until_s = anyio.current_time() + RETURN_S

    @property
    def waits(self) -> bool:
        """Whether it could go on with a server that has what its last one left."""
        return bool(self.place.lost) and not self.ends_with_server

    async def go_on(self, place: Place) -> None:
        """Go on at the place, which knows what became of it there; or it ends."""
        while not place.lost:
            try:
                await self._resume(place)
            except Unreachable:
                await anyio.sleep(_AGAIN_S)
            except SostenutoError as error:
                if not place.lost:  # else it waits for the next one
                    self.gives_up(str(error))
                return
            else:
                self._back.settle(None)
                return

    def gives_up(self, why: str) -> None:
        self.ends_with_server = why
        self._back.settle(ToolServerError(f"tool server {self.place.url} was lost: {self.place.lost}; {why}"))

    async def _resume(self, place: Place) -> Prepared:
        async with self._resuming:
            prepared = await place.ask(
                lambda client: client.resume(
                    self.program_id, self.environment, self.task, seed=self.seed, seen=self._seen
                )
            )
            self.stands_at(place)
            return prepared

    async def _found(self) -> Place:
        if self.waits:
            with anyio.move_on_at(self._until_s):
                await self._back.wait()
            if self.place.lost and not self.ends_with_server:
                raise self._over(
                    f"tool server {self.place.url} was lost, and was not back within {RETURN_S:g} s"
                )
        return self.place

    def _over(self, what: str) -> ToolServerError:
        why = f"; {self.program_id} cannot go on: {self.ends_with_server}" if self.ends_with_server else ""
        return ToolServerError(f"{what}{why}")
