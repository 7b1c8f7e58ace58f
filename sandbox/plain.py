"""Backend `process`: no isolation at all.  Only for code that is trusted as the user is.

It has the same shell, workspace, rlimits and clean end as the others, and can be constructed only by
who writes `unsafe=True`.
"""

from functools import partial
from pathlib import Path

from sostenuto.errors import Unsupported
from sostenuto.sandbox.folders import Folder
from sostenuto.sandbox.local import Launch, LocalSandbox, check_blueprint, start_local
from sostenuto.sandbox.protocol import Blueprint, Probe
from sostenuto.sandbox.supervised import Confinement, supervised_launch
from sostenuto.sandbox.trial import try_out


class ProcessBackend:
    """See `sostenuto.sandbox.protocol.Backend`.  Raises Unsupported unless `unsafe` is True."""

    def __init__(self, root: Path, *, unsafe: bool) -> None:
        if unsafe is not True:
            raise Unsupported("backend 'process' isolates nothing; write unsafe=True to use it all the same")
        self._root = root.absolute()

    @property
    def name(self) -> str:
        return "process"

    async def probe(self) -> Probe:
        isolation = "none: commands run as this user, with its files and its network; rlimits"
        return await try_out(self, isolation, lambda said: said)

    async def start(self, name: str, blueprint: Blueprint) -> LocalSandbox:
        check_blueprint(name, blueprint)
        folder = Folder.create(self._root, name, self.name, own_tmp=True)
        return await start_local(folder, name, blueprint, partial(_plan, blueprint))


def _plan(blueprint: Blueprint, folder: Folder) -> Launch:
    return supervised_launch(blueprint, folder, Confinement())
