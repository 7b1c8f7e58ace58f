"""The engines of a simulation, and what they had to do."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sostenuto.runtime.simulation.clock import Clock
from sostenuto.runtime.simulation.engine import Request, Served, SimulatedEngine
from sostenuto.runtime.simulation.profile import EngineProfile, OnRelease
from sostenuto.runtime.simulation.results import EngineResult
from sostenuto.runtime.simulation.waits import Waits
from sostenuto.scheduler.events import EngineJoined, EngineLoaded
from sostenuto.types import EngineId, ProgramId, Version


@dataclass(slots=True)
class _Seat:
    engine: SimulatedEngine
    result: EngineResult
    in_flight: int = 0
    waited_before_s: float = 0.0
    """Time in which programs waited, when the engine had nothing to do any more."""
    reported: tuple[int, int] = (0, 0)
    """Cached and prefilled tokens at the last report."""


class Fleet:
    def __init__(self, profile: EngineProfile, clock: Clock, waits: Waits) -> None:
        self._profile = profile
        self._clock = clock
        self._waits = waits
        self._seats: dict[EngineId, _Seat] = {}
        self.results: list[EngineResult] = []

    def __repr__(self) -> str:
        return f"<Fleet {[seat.engine for seat in self._seats.values()]}>"

    def engines(self) -> Iterable[SimulatedEngine]:
        """Those that are alive."""
        return [seat.engine for seat in self._seats.values()]

    def join(self, engine_id: EngineId, version: Version) -> EngineJoined:
        """A new engine, or an empty one in place of one that died."""
        engine = SimulatedEngine(engine_id, self._profile, self._clock, version=version)
        self._waits.change(self._clock.now_s(), open_engines=1)
        self._seats[engine_id] = _Seat(engine, engine.result, 0, self._waits.waiting_s(self._clock.now_s()))
        self.results.append(engine.result)
        profile = self._profile
        return EngineJoined(
            engine_id,
            version,
            profile.kv_tokens,
            profile.concurrency,
            block_tokens=profile.block_tokens,
            gives_up_parts=profile.on_release is not OnRelease.FREE,
            host_tokens=profile.host_tokens,
            host_tokens_s=profile.host_tokens_s,
        )

    def lose(self, engine_id: EngineId) -> None:
        """The engine dies; its requests fail."""
        seat = self._seats[engine_id]
        seat.engine.die()
        self._waits.change(self._clock.now_s(), open_engines=-1)
        self._note_idle(seat)
        del self._seats[engine_id]

    def has(self, engine_id: EngineId) -> bool:
        return engine_id in self._seats

    def engine(self, engine_id: EngineId) -> SimulatedEngine | None:
        seat = self._seats.get(engine_id)
        return seat.engine if seat else None

    def generate(self, engine_id: EngineId, request: Request, done: Callable[[Served], None]) -> None:
        """As the engine's; `left` has to be called by `done`."""
        seat = self._seats[engine_id]
        if not seat.in_flight:
            self._note_idle(seat)
        seat.in_flight += 1
        if seat.in_flight == self._profile.concurrency:
            self._waits.change(self._clock.now_s(), open_engines=-1)
        seat.engine.generate(request, done)

    def left(self, engine_id: EngineId) -> None:
        """A request is over there."""
        seat = self._seats[engine_id]
        if seat.in_flight == self._profile.concurrency:
            self._waits.change(self._clock.now_s(), open_engines=1)
        seat.in_flight -= 1
        if not seat.in_flight:
            seat.waited_before_s = self._waits.waiting_s(self._clock.now_s())

    def abort(self, engine_id: EngineId, request_id: str) -> None:
        if (seat := self._seats.get(engine_id)) is not None:
            seat.engine.abort(request_id)

    def release(self, engine_id: EngineId, program_id: ProgramId) -> None:
        if (seat := self._seats.get(engine_id)) is not None:
            seat.engine.release(program_id)

    def report(self) -> list[EngineLoaded]:
        """What every engine says of itself since the last report."""
        return [self._report_of(seat) for seat in self._seats.values()]

    def sample(self) -> None:
        now_s = self._clock.now_s()
        for seat in self._seats.values():
            seat.result.used_tokens.append((now_s, seat.engine.cache.active_tokens))
            seat.result.decoding.append((now_s, seat.engine.decoding))

    def close(self) -> None:
        for seat in self._seats.values():
            if not seat.in_flight:
                self._note_idle(seat)

    def _note_idle(self, seat: _Seat) -> None:
        waited_s = self._waits.waiting_s(self._clock.now_s())
        seat.result.idle_with_work_waiting_s += waited_s - seat.waited_before_s
        seat.waited_before_s = waited_s

    def _report_of(self, seat: _Seat) -> EngineLoaded:
        result, (cached, prefilled) = seat.result, seat.reported
        cached, prefilled = result.cached_tokens - cached, result.prefilled_tokens - prefilled
        seat.reported = (result.cached_tokens, result.prefilled_tokens)
        return EngineLoaded(
            seat.engine.id,
            seat.engine.waiting,
            used_share=seat.engine.used_share,
            hit_rate=cached / (cached + prefilled) if cached + prefilled else None,
        )
