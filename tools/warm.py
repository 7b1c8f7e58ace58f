"""Sandboxes that are started before they are asked for.

For a kind that was asked for once some wait, each in a task of its own, which ends it when nobody has come
for `idle_s`.  Each is used once: none comes back, so there is nothing to be cleaned that a program has had.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from logging import getLogger
from typing import Protocol

import anyio

from sostenuto.errors import SandboxError, SostenutoError, boundary
from sostenuto.sandbox.protocol import Sandbox
from sostenuto.tools.background import Background
from sostenuto.tools.content import Kind
from sostenuto.tools.setup import check_health

log = getLogger(__name__)

CANARY_S = 2.0


class Source(Protocol):
    """Where sandboxes come from and go to."""

    async def start_cold(self, name: str, kind: Kind) -> Sandbox: ...

    def end_soon(self, name: str, sandbox: Sandbox) -> None: ...


@dataclass(frozen=True, slots=True)
class Room:
    """What may wait."""

    size: int
    """Of each kind."""
    memory_bytes: int
    """What all may take together, by the limits of their blueprints."""
    idle_s: float


@dataclass(slots=True, eq=False)
class Waiting:
    """A sandbox that nobody has yet."""

    name: str
    sandbox: Sandbox
    memory_bytes: int
    """The most that it may take."""
    since_s: float
    taken: anyio.Event = field(default_factory=anyio.Event)


class Warm:
    """The pool of one server; all in one event loop."""

    def __init__(self, room: Room, source: Source, background: Background) -> None:
        self._room = room
        self._source = source
        self._background = background
        self._shelves: defaultdict[str, deque[Waiting]] = defaultdict(deque[Waiting])
        self._starting: defaultdict[str, int] = defaultdict(int)
        self._serial = count(1)
        self._memory_bytes = 0

    @property
    def is_used(self) -> bool:
        return self._room.size > 0

    @property
    def memory_bytes(self) -> int:
        """What those may take that wait or are being started."""
        return self._memory_bytes

    @property
    def waiting(self) -> list[Waiting]:
        return [one for shelf in self._shelves.values() for one in shelf]

    async def take(self, kind: Kind) -> Sandbox | None:
        """One that waits and still answers, which is the caller's from now on; None when there is none."""
        while shelf := self._shelves.get(kind.key):
            one = shelf.popleft()
            # At once: whoever fills the shelf again has its room.
            self._memory_bytes -= one.memory_bytes
            one.taken.set()
            if await self._is_fit(one, kind):
                return one.sandbox
        return None

    def fill(self, kind: Kind) -> None:
        """Start, in the background, as many as are missing and as there is room for."""
        if self._background.closed:
            return
        memory_bytes = kind.blueprint.limits.memory_bytes
        missing = self._room.size - len(self._shelves.get(kind.key, ())) - self._starting.get(kind.key, 0)
        for _ in range(missing):
            if self._memory_bytes + memory_bytes > self._room.memory_bytes:
                return
            self._background.start(partial(self._keep, kind))
            self._starting[kind.key] += 1
            self._memory_bytes += memory_bytes

    async def _is_fit(self, one: Waiting, kind: Kind) -> bool:
        try:
            with boundary(SandboxError, "asking a sandbox that waited"):
                answer = await one.sandbox.shell("true", timeout_s=CANARY_S)
                await check_health(one.sandbox, kind.setup)
        except SandboxError as error:
            log.warning("a sandbox that waited is unfit, and is ended: %s", error)
        except BaseException:
            self._source.end_soon(one.name, one.sandbox)
            raise
        else:
            if answer.exit_code == 0:
                return True
        self._source.end_soon(one.name, one.sandbox)
        return False

    async def _keep(self, kind: Kind) -> None:
        """One sandbox, from its start until it is taken or has waited too long."""
        one: Waiting | None = None
        try:
            one = await self._start(kind)
            if one is not None:
                await self._shelve(one, kind)
        finally:
            if one is None or not one.taken.is_set():
                self._memory_bytes -= kind.blueprint.limits.memory_bytes

    async def _start(self, kind: Kind) -> Waiting | None:
        """None, for the next who asks to try again, when it fails."""
        name = f"warm-{next(self._serial)}"
        try:
            sandbox = await self._source.start_cold(name, kind)
        except SostenutoError as error:
            log.warning("no sandbox could be started ahead: %s", error)
            return None
        finally:
            self._starting[kind.key] -= 1
            if not self._starting[kind.key]:
                del self._starting[kind.key]
        return Waiting(name, sandbox, kind.blueprint.limits.memory_bytes, anyio.current_time())

    async def _shelve(self, one: Waiting, kind: Kind) -> None:
        self._shelves[kind.key].append(one)
        try:
            with anyio.move_on_after(self._room.idle_s):
                await one.taken.wait()
        finally:
            if not one.taken.is_set():
                self._shelves[kind.key].remove(one)
                self._source.end_soon(one.name, one.sandbox)
            if not self._shelves[kind.key]:
                del self._shelves[kind.key]
