"""Standing still, and who is let in meanwhile.

- New requests wait here, not in the server: one that waits behind its pause can no longer be aborted
  there, also not after the pause.
- A running request that is aborted during a pause is aborted when that ends, for the same reason.
- The server's `abort` pause never ends over requests that stand still, so from one pause to another that
  is not a stricter one the way leads over running again.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

from sostenuto.runtime.engines.http import EngineHttp
from sostenuto.runtime.engines.wire import PauseMode

_MODES = {
    PauseMode.KEEP: "in_place",
    PauseMode.RETRACT: "retract",
    PauseMode.ABORT: "abort",
    PauseMode.FINISH: "in_place",
}
_GOES_ON = {
    (PauseMode.KEEP, PauseMode.RETRACT),
    (PauseMode.FINISH, PauseMode.KEEP),
    (PauseMode.FINISH, PauseMode.RETRACT),
}
"""From the first to the second without running in between."""


class Pausing:
    """Of one server."""

    def __init__(self, admin: EngineHttp, drain: Callable[[], Awaitable[None]]) -> None:
        """`drain` returns when no request runs or waits in the engine."""
        self._admin = admin
        self._drain = drain
        self._turn = anyio.Lock()
        self._bell = anyio.Event()
        self._began_s: float | None = None
        self._total_s = 0.0
        self.mode: PauseMode | None = None

    def __repr__(self) -> str:
        return f"<Pausing {self.mode or 'runs'} {self._total_s:.3f}s>"

    @property
    def is_open(self) -> bool:
        return self._began_s is None

    def paused_s(self) -> float:
        """How long the engine stood still until now, in all."""
        since_s = 0.0 if self._began_s is None else anyio.current_time() - self._began_s
        return self._total_s + since_s

    async def until_open(self, is_given_up: Callable[[], bool]) -> None:
        """Return when requests may start, or when this one is given up."""
        while not self.is_open and not is_given_up():
            await self._bell.wait()

    def look_again(self) -> None:
        """Somebody who waits may have been given up."""
        self._bell.set()
        self._bell = anyio.Event()

    async def pause(self, mode: PauseMode) -> None:
        """Idempotent.  Raises EngineError, and lets requests in again where nothing stood still before."""
        async with self._turn:
            await self._pause(mode)

    async def resume(self) -> None:
        """Idempotent, also on an engine that somebody else has paused."""
        async with self._turn:
            await self._resume()

    @asynccontextmanager
    async def standing_still(self, mode: PauseMode) -> AsyncGenerator[None]:
        """Pause, and be as before at the end, however that comes."""
        async with self._turn:
            was_open = self.is_open
            try:
                if was_open or (self.mode, mode) in _GOES_ON:
                    await self._pause(mode)
                yield
            finally:
                if was_open:
                    with anyio.CancelScope(shield=True):
                        await self._resume()

    async def _pause(self, mode: PauseMode) -> None:
        if self.mode is mode:
            return
        if self.mode is not None and (self.mode, mode) not in _GOES_ON:
            await self._resume()
        before = self.mode
        self._close()
        try:
            if mode is PauseMode.FINISH:
                await self._drain()
            await self._admin.post("/pause_generation", {"mode": _MODES[mode]})
            self.mode = mode
        finally:
            if self.mode is not mode and before is None:
                with anyio.CancelScope(shield=True):
                    await self._resume()

    async def _resume(self) -> None:
        try:
            await self._admin.post("/continue_generation", {"torch_empty_cache": False}, repeatable=True)
        finally:
            # A server that cannot be resumed must not keep requests waiting here, without a deadline.
            self._total_s, self._began_s, self.mode = self.paused_s(), None, None
            self.look_again()

    def _close(self) -> None:
        if self._began_s is None:
            self._began_s = anyio.current_time()
