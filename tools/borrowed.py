"""A sandbox that uses something of the server's as long as it is there."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from sostenuto.sandbox.protocol import Sandbox
from sostenuto.tools.passing import Passing


@runtime_checkable
class Renamed(Protocol):
    """A sandbox that is written down under a name."""

    def rename(self, name: str) -> None: ...


class Borrowed(Passing):
    """See `sostenuto.sandbox.protocol.Sandbox`; once it has stopped, `give_back` is called."""

    def __init__(self, sandbox: Sandbox, give_back: Callable[[], None]) -> None:
        super().__init__(sandbox)
        self._sandbox = sandbox
        self._give_back: Callable[[], None] | None = give_back

    def rename(self, name: str) -> None:
        if isinstance(self._sandbox, Renamed):
            self._sandbox.rename(name)

    async def stop(self) -> None:
        await self._sandbox.stop()
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()
