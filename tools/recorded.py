"""A backend whose sandboxes and snapshots stand in the journal as long as they exist; starts are timed.

A name is written when a start begins and taken out when the sandbox is gone, so what a server that died had
can be told from what it had not.
"""

import anyio

from sostenuto.sandbox.protocol import Backend, Blueprint, Probe, Sandbox, Snapshot
from sostenuto.tools.journal import Journal
from sostenuto.tools.metrics import Metrics
from sostenuto.tools.passing import Passing


class RecordedBackend:
    """See `sostenuto.sandbox.protocol.Backend`."""

    def __init__(self, backend: Backend, journal: Journal, metrics: Metrics) -> None:
        self._backend = backend
        self._journal = journal
        self._metrics = metrics

    @property
    def name(self) -> str:
        return self._backend.name

    async def probe(self) -> Probe:
        return await self._backend.probe()

    async def start(self, name: str, blueprint: Blueprint, *, snapshot: Snapshot | None = None) -> Sandbox:
        self._journal.sandbox_comes(name, self.name)
        started_s = anyio.current_time()
        try:
            sandbox = await self._backend.start(name, blueprint, snapshot=snapshot)
        except BaseException:
            self._journal.sandbox_went(name)
            raise
        self._metrics.started(anyio.current_time() - started_s)
        return RecordedSandbox(name, self.name, sandbox, self._journal)

    async def forget(self, snapshot: Snapshot) -> None:
        await self._backend.forget(snapshot)
        self._journal.snapshot_went(snapshot)


class RecordedSandbox(Passing):
    """See `sostenuto.sandbox.protocol.Sandbox`; what the journal need not know of goes straight through."""

    def __init__(self, name: str, backend: str, sandbox: Sandbox, journal: Journal) -> None:
        super().__init__(sandbox)
        self._name = name
        self._backend = backend
        self._sandbox = sandbox
        self._journal = journal
        self.snapshot = self._snapshot

    def rename(self, name: str) -> None:
        """It stands in the journal under `name` from now on."""
        self._journal.sandbox_went(self._name)
        self._journal.sandbox_comes(name, self._backend)
        self._name = name

    async def _snapshot(self) -> Snapshot:
        snapshot = await self._sandbox.snapshot()
        self._journal.snapshot_came(snapshot)
        return snapshot

    async def stop(self) -> None:
        await self._sandbox.stop()
        self._journal.sandbox_went(self._name)
