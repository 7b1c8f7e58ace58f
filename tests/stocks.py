"""A stock of sandboxes without the rest of a server."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from fakes_tools import config
from sandboxes import entries, left_processes, sandbox_root
from sostenuto.sandbox.protocol import Backend
from sostenuto.tools.journal import Journal, Left
from sostenuto.tools.stock import Stock
from sostenuto.tools.teardown import Teardown


@asynccontextmanager
async def stocked(
    backend: Backend, journal: Journal | None = None, **changes: object
) -> AsyncGenerator[Stock]:
    """Open as long as the block is, and then closed as the server does it."""
    async with anyio.create_task_group() as group:
        teardown = Teardown(group, 10)
        stock = Stock(config(**changes), backend, group, teardown, journal or Journal(None, Left()))
        try:
            yield stock
        finally:
            with anyio.CancelScope(shield=True):
                await stock.close()
                await teardown.settle()
            assert not teardown.leaked
            group.cancel_scope.cancel()


@asynccontextmanager
async def clean_root() -> AsyncGenerator[Path]:
    """A root under which nothing is left after the block."""
    with sandbox_root() as root:
        yield root
        assert left_processes(root) == []
        assert entries(root) == []
