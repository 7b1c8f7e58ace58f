"""Work of the tool server that belongs to no program."""

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup

from sostenuto.errors import ToolServerError


class Background:
    """Runs in the group that it is given, until `close`."""

    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        self._scopes: set[anyio.CancelScope] = set()
        self._changed = anyio.Event()
        self.closed = False

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Begin `work`, which raises nothing; ToolServerError after `close`."""
        if self.closed:
            raise ToolServerError("the tool server is stopping")
        scope = anyio.CancelScope()
        self._scopes.add(scope)
        self._group.start_soon(self._run, scope, work)

    async def close(self) -> None:
        """Begin nothing more, cancel what runs, and return when it has ended."""
        self.closed = True
        for scope in self._scopes:
            scope.cancel()
        while self._scopes:
            self._changed = anyio.Event()
            await self._changed.wait()

    async def _run(self, scope: anyio.CancelScope, work: Callable[[], Awaitable[None]]) -> None:
        try:
            with scope:
                await work()
        finally:
            self._scopes.discard(scope)
            self._changed.set()
