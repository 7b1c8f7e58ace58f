"""How a program comes to its sandbox: one that waits, one over the layer of its content, or a fresh one.

- A start that fails, or whose sandbox is unfit, is tried once more here; a wrong value is not, and neither is
  a set-up command that failed.
- A sandbox that was started and is not handed out is ended, whatever happens to who wanted it.
- What is stocked belongs to the server, under names of its own, until a program has it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf

import anyio
from anyio.abc import TaskGroup

from sostenuto.errors import SandboxError
from sostenuto.sandbox.protocol import Backend, Blueprint, Probe, Sandbox, Snapshot
from sostenuto.tools.background import Background
from sostenuto.tools.borrowed import Borrowed, Renamed
from sostenuto.tools.bounded import bounded
from sostenuto.tools.config import ServerConfig
from sostenuto.tools.content import Kind, Kinds
from sostenuto.tools.journal import Journal
from sostenuto.tools.ladder import Ladder, Resting
from sostenuto.tools.layers import Layer, Layers
from sostenuto.tools.machine import budget
from sostenuto.tools.setup import Setup, SetupFailed, check_health, run_setup
from sostenuto.tools.teardown import Teardown
from sostenuto.tools.warm import Room, Warm
from sostenuto.tools.wire import WarmSandbox


class Stock:
    """Of one server."""

    def __init__(
        self,
        config: ServerConfig,
        backend: Backend,
        group: TaskGroup,
        teardown: Teardown,
        journal: Journal,
    ) -> None:
        self._backend = backend
        self._teardown = teardown
        self._background = Background(group)
        self._starts = anyio.CapacityLimiter(config.starts_at_once)
        self._kinds = Kinds(backend.name)
        self._layers = Layers(config, backend, self._background, teardown, journal)
        memory_bytes = config.sandbox_memory_bytes or budget(config).memory_bytes
        room = Room(config.warm, memory_bytes, config.warm_idle_s)
        self._warm = Warm(room, self, self._background)
        self._serial = count(1)
        self._warm_hits = 0

    @property
    def backend(self) -> str:
        return self._backend.name

    @property
    def counters(self) -> Mapping[str, int]:
        return {**self._layers.counters, "warm_hits": self._warm_hits}

    @property
    def layer_bytes(self) -> int:
        return self._layers.size_bytes

    @property
    def warm_bytes(self) -> int:
        """What the sandboxes may take that no program has yet."""
        return self._warm.memory_bytes

    def waiting(self, now_s: float) -> tuple[WarmSandbox, ...]:
        """The sandboxes that no program has yet."""
        return tuple(
            WarmSandbox(sandbox=self.backend, age_s=now_s - one.since_s, memory_bytes=one.memory_bytes)
            for one in self._warm.waiting
        )

    async def start(self, name: str, blueprint: Blueprint, setup: Setup) -> Ladder:
        """A program's sandbox, or SandboxError."""
        return await Ladder.start(_Shelf(self, self._backend, setup), name, blueprint)

    def resting(self, name: str, blueprint: Blueprint, on: Resting) -> Ladder:
        """A program's sandbox that a server before this one has snapshotted."""
        return Ladder.resting_on(self._backend, name, blueprint, on)

    def forget_soon(self, snapshot: Snapshot) -> None:
        """Begin to remove a snapshot that nobody comes back to."""
        what = f"removing snapshot {snapshot.reference}"
        self._teardown.give_back_soon(what, partial(self._backend.forget, snapshot))

    async def close(self) -> None:
        """End what waits and what is being made, and begin to remove every layer.  Safe to call twice."""
        await self._background.close()
        self._layers.close()

    async def fresh(self, name: str, blueprint: Blueprint, setup: Setup) -> Sandbox:
        """One that nobody has used."""
        if not self._warm.is_used and not setup.commands:
            return await self._start_twice(name, Kind(blueprint, setup, ""))
        kind = await self._kinds.of(blueprint, setup)
        sandbox = await self._warm.take(kind)
        if sandbox is None:
            sandbox = await self._start_twice(name, kind)
        else:
            self._warm_hits += 1
            if isinstance(sandbox, Renamed):
                sandbox.rename(name)
        self._warm.fill(kind)
        return sandbox

    async def _start_twice(self, name: str, kind: Kind) -> Sandbox:
        try:
            return await self.start_cold(name, kind)
        except SetupFailed:
            raise
        except SandboxError:
            return await self.start_cold(name, kind, again=True)

    async def start_cold(self, name: str, kind: Kind, *, again: bool = False) -> Sandbox:
        """One that starts now, and is fit; after a second failure its layer is not used any more."""
        if not kind.setup.commands:
            return await self._start_fit(name, kind, None)
        layer = await self._layers.borrow(kind.content, partial(self._build, kind))
        give_back = partial(self._layers.give_back, layer)
        try:
            return Borrowed(await self._start_fit(name, kind, layer), give_back)
        except BaseException as error:
            if again and isinstance(error, SandboxError):
                self._layers.doubt(layer)
            give_back()
            raise

    async def _start_fit(self, name: str, kind: Kind, layer: Layer | None) -> Sandbox:
        snapshot = None if layer is None else layer.snapshot

        async def start() -> Sandbox:
            async with self._starts:
                sandbox = await self._backend.start(name, kind.blueprint, snapshot=snapshot)
            try:
                await check_health(sandbox, kind.setup)
            except BaseException:
                await self._end(name, sandbox)
                raise
            return sandbox

        doing = f"starting a {self.backend} sandbox"
        return await bounded(start, timeout_s=inf, late=SandboxError, broken=SandboxError, doing=doing)

    async def _build(self, kind: Kind) -> Snapshot:
        name = f"layer-{kind.content[:12]}-{next(self._serial)}"
        async with self._starts:
            sandbox = await self._backend.start(name, kind.blueprint)
        try:
            await run_setup(sandbox, kind.setup)
            return await sandbox.snapshot()
        finally:
            await self._end(name, sandbox)

    async def _end(self, name: str, sandbox: Sandbox) -> None:
        with anyio.CancelScope(shield=True):
            await self._teardown.give_back(f"stopping the sandbox {name}", sandbox.stop)

    def end_soon(self, name: str, sandbox: Sandbox) -> None:
        self._teardown.give_back_soon(f"stopping the sandbox {name}", sandbox.stop)


@dataclass(frozen=True, slots=True)
class _Shelf:
    """A `Backend` for one program: its first start takes from the stock."""

    stock: Stock
    backend: Backend
    setup: Setup

    @property
    def name(self) -> str:
        return self.backend.name

    async def probe(self) -> Probe:
        return await self.backend.probe()

    async def start(self, name: str, blueprint: Blueprint, *, snapshot: Snapshot | None = None) -> Sandbox:
        if snapshot is not None:
            return await self.backend.start(name, blueprint, snapshot=snapshot)
        return await self.stock.fresh(name, blueprint, self.setup)

    async def forget(self, snapshot: Snapshot) -> None:
        await self.backend.forget(snapshot)
