"""Work that can be cancelled from the moment its request is read, before its task has run a step."""

import anyio


class Cancellable:
    """`scope` is made in the task that does the work: a scope cannot be made outside of one."""

    def __init__(self, program_id: str) -> None:
        self.program_id = program_id
        self.ended = anyio.Event()
        self._scope: anyio.CancelScope | None = None
        self._cancelled = False

    def scope(self) -> anyio.CancelScope:
        """To be entered once, around the work."""
        self._scope = anyio.CancelScope()
        if self._cancelled:
            self._scope.cancel()
        return self._scope

    def cancel(self) -> None:
        self._cancelled = True
        if self._scope is not None:
            self._scope.cancel()
