"""Backend `process`: no isolation at all.  Only for code that is trusted as the user is.

It has the same shell, workspace, rlimits and clean end as the others, and can be constructed only by
who writes `unsafe=True`.
"""

from functools import partial
from pathlib import Path

import anyio.to_thread

from sostenuto.errors import Unsupported
from sostenuto.sandbox.checks import check_blueprint, check_no_network
from sostenuto.sandbox.folders import Folder
from sostenuto.sandbox.launch import Launch
from sostenuto.sandbox.local import LocalSandbox, start_local
from sostenuto.sandbox.protocol import Blueprint, Probe, Snapshot
from sostenuto.sandbox.snapshots import Snapshots
from sostenuto.sandbox.supervised import Confinement, supervised_launch
from sostenuto.sandbox.trial import try_out


class ProcessBackend:
    """See `sostenuto.sandbox.protocol.Backend`.  Raises Unsupported unless `unsafe` is True."""

    def __init__(self, root: Path, *, unsafe: bool) -> None:
        if unsafe is not True:
            raise Unsupported("backend 'process' isolates nothing; write unsafe=True to use it all the same")
        self._root = root.absolute()
        self._snapshots = Snapshots(self._root, self.name)

    @property
    def name(self) -> str:
        return "process"

    async def probe(self) -> Probe:
        isolation = "none: commands run as this user, with its files and its network; rlimits"
        return await try_out(self, isolation, lambda said: said)

    async def start(
        self, name: str, blueprint: Blueprint, *, snapshot: Snapshot | None = None
    ) -> LocalSandbox:
        check_blueprint(name, blueprint)
        check_no_network(name, blueprint)
        origin = self._snapshots.origin(blueprint, snapshot)
        folder = Folder.create(self._root, name, self.name, own_tmp=True)
        return await start_local(folder, name, blueprint, origin, self._snapshots, partial(_plan, blueprint))

    async def forget(self, snapshot: Snapshot) -> None:
        await anyio.to_thread.run_sync(self._snapshots.forget, snapshot)


def _plan(blueprint: Blueprint, folder: Folder) -> Launch:
    return supervised_launch(blueprint, folder, Confinement())
