"""Requests between `generate` and its answer."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.wire import FinishReason, GenerateReply, GenerateRequest


@dataclass(slots=True, eq=False)
class Flight:
    """One request."""

    request: GenerateRequest
    rid: str
    is_given_up: bool = False
    is_sent: bool = False


@dataclass(slots=True)
class Flights:
    """Of one engine."""

    _flying: dict[str, Flight] = field(default_factory=dict[str, Flight])
    _landed: anyio.Event = field(default_factory=anyio.Event)
    _busy_since_s: float = 0.0
    _busy_s: float = 0.0

    def __len__(self) -> int:
        return len(self._flying)

    def get(self, request_id: str) -> Flight | None:
        return self._flying.get(request_id)

    def sent(self) -> list[Flight]:
        """Those that the engine has."""
        return [flight for flight in self._flying.values() if flight.is_sent]

    def busy_s(self) -> float:
        """How long there was at least one, in all."""
        return self._busy_s + (anyio.current_time() - self._busy_since_s if self._flying else 0.0)

    @contextmanager
    def under_way(self, request: GenerateRequest, rid: str) -> Generator[Flight]:
        """EngineError when a request of this id is under way."""
        if request.request_id in self._flying:
            raise EngineError(
                f"request_id: {request.request_id!r} is running; give each request an id of its own"
            )
        if not self._flying:
            self._busy_since_s = anyio.current_time()
        flight = self._flying[request.request_id] = Flight(request, rid)
        try:
            yield flight
        finally:
            busy_s = self.busy_s()
            del self._flying[request.request_id]
            if not self._flying:
                self._busy_s = busy_s
            self._landed.set()
            self._landed = anyio.Event()

    async def until_none_is_sent(self) -> None:
        while self.sent():
            await self._landed.wait()


def without_tokens() -> GenerateReply:
    """Of a request that was given up before the engine had it."""
    return GenerateReply(
        token_ids=[], logprobs=[], versions=[], finish_reason=FinishReason.ABORT, cached_tokens=0,
        prefilled_tokens=0, queue_s=0.0, prefill_s=0.0, decode_s=0.0,
    )  # fmt: skip


@contextmanager
def waiting_for_it(limit_s: float, error: Callable[[str], EngineError]) -> Generator[None]:
    """While the engine stands still; `error` when that takes longer."""
    with anyio.move_on_after(limit_s) as waiting:
        yield
    if waiting.cancelled_caught:
        raise error(f"it stands still for over {limit_s:g} s; resume it, or start it again")
