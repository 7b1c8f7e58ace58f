"""Standing still, and who is let in meanwhile.

- New requests wait here, not in the server, which refuses them (503) or queues them, by release and mode.
- RETRACT is vLLM's `keep`, and then all KV is dropped: what runs waits with the tokens it has, and computes
  its KV again when the engine goes on.  The prefix cache goes with it.
- vLLM goes from one mode to another only over running again.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
from pydantic import BaseModel, ConfigDict

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.http import EngineHttp
from sostenuto.runtime.engines.wire import PauseMode

_MODES = {
    PauseMode.KEEP: "keep",
    PauseMode.RETRACT: "keep",
    PauseMode.ABORT: "abort",
    PauseMode.FINISH: "wait",
}
_POLL_S = 0.1


class _Reset(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    success: bool


class _Paused(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    is_paused: bool


class Pausing:
    """Of one server."""

    def __init__(self, http: EngineHttp, *, finish_s: float) -> None:
        """`finish_s`: how long running requests may take to their end."""
        self._http = http
        self._finish_s = finish_s
        self._turn = anyio.Lock()
        self._bell = anyio.Event()
        self._is_closed = False
        self._began_s: float | None = None
        self._total_s = 0.0
        self.mode: PauseMode | None = None

    def __repr__(self) -> str:
        return f"<Pausing {self.mode or 'runs'} {self._total_s:.3f}s>"

    @property
    def is_open(self) -> bool:
        """Whether requests may start."""
        return not self._is_closed

    def paused_s(self) -> float:
        """How long the engine stood still until now, in all."""
        since_s = 0.0 if self._began_s is None else anyio.current_time() - self._began_s
        return self._total_s + since_s

    async def until_open(self, is_given_up: Callable[[], bool]) -> None:
        """Return when requests may start, or when this one is given up."""
        while not self.is_open and not is_given_up():
            await self._bell.wait()

    async def until_resumed(self, is_given_up: Callable[[], bool]) -> bool:
        """The server refused a request: wait while it is paused, by whom ever.  False: it is not."""
        waited = not self.is_open
        await self.until_open(is_given_up)
        while not is_given_up() and await self._is_paused():
            waited = True
            await anyio.sleep(_POLL_S)
        return waited

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
    async def standing_still(self) -> AsyncGenerator[None]:
        """Pause with everything kept, and be as before at the end, however that comes."""
        async with self._turn:
            was_open = self.is_open
            try:
                if was_open:
                    await self._pause(PauseMode.KEEP)
                yield
            finally:
                if was_open:
                    with anyio.CancelScope(shield=True):
                        await self._resume()

    async def drop_kv(self, *, of_running: bool) -> bool:
        """Whether all KV is dropped; vLLM refuses while requests run on some, unless theirs may go, too."""
        query = {"reset_running_requests": str(of_running).lower(), "reset_external": "true"}
        return (
            (await self._http.post("/reset_prefix_cache", query=query, repeatable=True)).read(_Reset).success
        )

    async def _pause(self, mode: PauseMode) -> None:
        if self.mode is mode:
            return
        if self.mode is not None and _MODES[self.mode] != _MODES[mode]:
            await self._resume()
        was_open = self.is_open
        self._is_closed = True
        try:
            await self._stop(mode)
            self.mode = mode
        finally:
            if self.mode is not mode and was_open:
                with anyio.CancelScope(shield=True):
                    await self._resume()

    async def _stop(self, mode: PauseMode) -> None:
        query = {"mode": _MODES[mode], "clear_cache": "false"}
        if mode is PauseMode.FINISH:
            await self._http.post("/pause", query=query, within_s=self._finish_s)
        if self._began_s is None:
            self._began_s = anyio.current_time()
        if mode is not PauseMode.FINISH:
            await self._http.post("/pause", query=query)
        if mode is PauseMode.RETRACT and not await self.drop_kv(of_running=True):
            where = self._http.where("/reset_prefix_cache")
            raise EngineError(f"{where}: it did not drop the KV of what runs; pause with keep or abort")

    async def _resume(self) -> None:
        try:
            await self._http.post("/resume", repeatable=True)
        finally:
            # A server that cannot be resumed must not keep requests waiting here, without a deadline.
            self._total_s, self._began_s, self.mode = self.paused_s(), None, None
            self._is_closed = False
            self.look_again()

    async def _is_paused(self) -> bool:
        return (await self._http.get("/is_paused")).read(_Paused).is_paused
