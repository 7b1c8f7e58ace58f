"""Layers: snapshots in which set-up commands have run, one for each content, that sandboxes start over.

- A layer is made once, by a task of the server: whoever wants it waits, and none who leaves ends the making.
- It is removed when its disk is wanted for others, the one that was used longest ago first, and never while
  somebody uses or waits for it: layers in use may take more than the budget.
- With a journal they survive the server's death, and with `keep_layers` its end: the next one begins with
  those that are as they were made.
- That a set-up command failed is remembered for `FAILED_S`; anything else that went wrong is not.
"""

import shutil
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger
from math import inf
from pathlib import Path

import anyio
from anyio import to_thread

from sostenuto.errors import SandboxError, SostenutoError, ToolServerError
from sostenuto.sandbox.protocol import Backend, Snapshot
from sostenuto.sandbox.snapshots import seal_of
from sostenuto.tools.background import Background
from sostenuto.tools.bounded import bounded, outcome_of
from sostenuto.tools.config import ServerConfig
from sostenuto.tools.journal import Journal, LayerRow
from sostenuto.tools.results import Pending
from sostenuto.tools.setup import SetupFailed
from sostenuto.tools.teardown import Teardown

log = getLogger(__name__)

FAILED_S = 60.0
COUNTERS = ("layers_built", "layers_failed", "layers_evicted", "layers_inherited", "layer_hits")
Build = Callable[[], Awaitable[Snapshot]]


@dataclass(slots=True, eq=False)
class Layer:
    """Written by `Layers` alone."""

    content: str
    built: Pending[Snapshot] = field(default_factory=Pending[Snapshot])
    snapshot: Snapshot | None = None
    """None until it is built."""
    users: int = 0
    """Those that use it or wait for it."""
    ends_s: float = inf
    """When its failure is forgotten."""
    dropped: bool = False
    """Nobody comes to it any more; it goes with its last user."""


class Layers:
    """The cache of one server; all in one event loop."""

    def __init__(
        self,
        config: ServerConfig,
        backend: Backend,
        background: Background,
        teardown: Teardown,
        journal: Journal,
    ) -> None:
        self._backend = backend
        self._background = background
        self._teardown = teardown
        self._budget_bytes = _budget_bytes(config)
        self._builds = anyio.CapacityLimiter(config.starts_at_once)
        self._layers: OrderedDict[str, Layer] = OrderedDict()
        """The one that was used last is the last."""
        self._on_disk: set[Layer] = set()
        self.counters = Counter[str](dict.fromkeys(COUNTERS, 0))
        self._journal = journal
        self._stays = config.keep_layers and journal.keeps
        for content, row in journal.left.layers.items():
            self._inherit(content, row.snapshot)
        self._shrink()

    async def borrow(self, content: str, build: Build) -> Layer:
        """The layer of the content, built if need be, in use until `give_back`; or why there is none."""
        layer = self._find(content) or self._begin(content, build)
        self._layers.move_to_end(content)
        self.counters["layer_hits"] += layer.snapshot is not None
        layer.users += 1
        try:
            await layer.built.wait()
        except BaseException:
            self.give_back(layer)
            raise
        return layer

    def give_back(self, layer: Layer) -> None:
        """One user less."""
        layer.users -= 1
        if layer.dropped and not layer.users:
            self._remove(layer)
        self._shrink()

    def doubt(self, layer: Layer) -> None:
        """Sandboxes could not start over it: the next one who wants its content has it built anew."""
        if not layer.dropped:
            log.warning("the layer of %.12s is given up: nothing could be started over it", layer.content)
            self._drop(layer)

    @property
    def size_bytes(self) -> int:
        """Of all that are on disk, as their snapshots say."""
        return sum(layer.snapshot.size_bytes for layer in self._on_disk if layer.snapshot is not None)

    def close(self) -> None:
        """Remove every layer, unless they stay; the background has ended before.  Safe to call twice."""
        self._layers.clear()
        if self._stays:
            return
        for layer in list(self._on_disk):
            self._remove(layer)

    def _inherit(self, content: str, snapshot: Snapshot) -> None:
        layer = self._layers[content] = Layer(content, snapshot=snapshot)
        layer.built.settle(snapshot)
        self._on_disk.add(layer)
        self.counters["layers_inherited"] += 1

    def _find(self, content: str) -> Layer | None:
        layer = self._layers.get(content)
        if layer is not None and layer.ends_s <= anyio.current_time():
            self._drop(layer)
            return None
        return layer

    def _begin(self, content: str, build: Build) -> Layer:
        layer = Layer(content)
        self._background.start(partial(self._build, layer, build))
        self._layers[content] = layer
        return layer

    async def _build(self, layer: Layer, build: Build) -> None:
        outcome: Snapshot | SostenutoError = ToolServerError("the tool server is stopping")
        try:
            async with self._builds:
                outcome = await outcome_of(partial(_bounded, build))
                if isinstance(outcome, Snapshot):
                    await self._write_down(layer.content, outcome)
        finally:
            self._settle(layer, outcome)

    async def _write_down(self, content: str, snapshot: Snapshot) -> None:
        if self._journal.keeps and (seal := await to_thread.run_sync(seal_of, snapshot)):
            self._journal.layer_came(content, LayerRow(snapshot, seal))

    def _settle(self, layer: Layer, outcome: Snapshot | SostenutoError) -> None:
        if isinstance(outcome, Snapshot):
            layer.snapshot = outcome
            self._on_disk.add(layer)
            self.counters["layers_built"] += 1
        else:
            self.counters["layers_failed"] += 1
            log.warning("the layer of %.12s could not be built: %s", layer.content, outcome)
            if isinstance(outcome, SetupFailed):
                layer.ends_s = anyio.current_time() + FAILED_S
            else:
                self._drop(layer)
        layer.built.settle(outcome)
        self._shrink()

    def _shrink(self) -> None:
        """Back to the budget, as far as nobody uses what there is, and away with failures that are over."""
        now_s = anyio.current_time()
        for layer in list(self._layers.values()):
            evicted = layer.snapshot is not None and self.size_bytes > self._budget_bytes
            if not layer.users and (evicted or layer.ends_s <= now_s):
                self._drop(layer)
                self.counters["layers_evicted"] += evicted

    def _drop(self, layer: Layer) -> None:
        layer.dropped = True
        del self._layers[layer.content]
        if not layer.users:
            self._remove(layer)

    def _remove(self, layer: Layer) -> None:
        if layer.snapshot is None or layer not in self._on_disk:
            return
        self._on_disk.discard(layer)
        forget = partial(self._backend.forget, layer.snapshot)
        self._teardown.give_back_soon(f"removing layer {layer.snapshot.reference}", forget)


async def _bounded(build: Build) -> Snapshot:
    return await bounded(build, timeout_s=inf, late=SandboxError, broken=SandboxError, doing="setting up")


def _budget_bytes(config: ServerConfig) -> int:
    """As configured, else half of what is free now where sandboxes live."""
    if config.layer_bytes is not None:
        return config.layer_bytes
    folder = Path(config.sandbox_root or tempfile.gettempdir()).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free // 2
