"""One simulated inference engine: continuous batching with chunked prefill over a paged KV cache.

It is never simulated step by step.  Every request that decodes gets one token in each step, so one clock
of steps says when all of them end; a step's length changes only when a request begins or ends.

- A prefill takes as few steps as chunks allow, all of the same size, and its last one gives the first
  token.  One request prefills at a time, first come first served.
- A request starts when there is room for its context and its whole output: it is never preempted.  The
  first in the queue blocks those behind it.
- What comes back from the lower tier comes one request after the other, beside the prefill of others.
"""

import heapq
from collections import deque
from collections.abc import Callable
from math import ceil

from sostenuto.runtime.simulation.cache import KvCache
from sostenuto.runtime.simulation.clock import Clock, Timer
from sostenuto.runtime.simulation.profile import EngineProfile, OnRelease
from sostenuto.runtime.simulation.request import Request, Run, Served, Stage
from sostenuto.runtime.simulation.results import EngineResult
from sostenuto.types import EngineId, ProgramId, Version

__all__ = ["Request", "Served", "SimulatedEngine"]

_SOON = 1e-9
"""Steps that are due together."""


class SimulatedEngine:
    def __init__(
        self, engine_id: EngineId, profile: EngineProfile, clock: Clock, *, version: Version | None = None
    ) -> None:
        self.id = engine_id
        self.version = version or Version(0, 0)
        self.profile = profile
        self.running = 0
        """Requests that have their room in the pool."""
        self.result = EngineResult(engine_id, profile.kv_tokens)
        self.cache = KvCache(profile.kv_tokens, profile.block_tokens, host_tokens=profile.host_tokens)
        self.is_dead = False
        self._clock = clock
        self._runs: dict[str, Run] = {}
        self._queue: deque[Run] = deque()
        self._to_prefill: deque[Run] = deque()
        """They have their room and come before the queue."""
        self._prefilling: Run | None = None
        self._decoding: list[tuple[float, int, Run]] = []
        self._decoders = 0
        self._itl_s = [0.0, *(profile.itl(n) for n in range(1, profile.concurrency + 1))]
        self._order = 0
        self._steps: float = 0.0
        self._at_s = 0.0
        """When `_steps` was true."""
        self._step_s = 0.0
        """0: nothing runs, or all stands still."""
        self._timer: Timer | None = None
        self._pauses = 0
        self._paused_s = 0.0
        self._host_free_s = 0.0
        self._busy_since_s = 0.0

    def __repr__(self) -> str:
        return f"<SimulatedEngine {self.id} running={self.running} waiting={self.waiting} {self.cache!r}>"

    @property
    def waiting(self) -> int:
        return len(self._runs) - self.running

    @property
    def decoding(self) -> int:
        return self._decoders

    @property
    def used_share(self) -> float:
        """Of the pool, by requests that run."""
        return self.cache.active_tokens / self.cache.pool_tokens

    # ---- requests ----

    def generate(self, request: Request, done: Callable[[Served], None]) -> None:
        """Serve the request; `done` is called once, however it ends."""
        run = Run(request, done, self._clock.now_s())
        if self.is_dead:
            done(run.served(failed=f"engine {self.id} is gone"))
        elif not self.cache.could_ever_hold([*run.sizes[:-1], run.private + request.output_tokens]):
            done(run.served(failed=self._too_large(request)))
        else:
            self._runs[request.request_id] = run
            if self.profile.request_s:
                self._clock.call_at(run.submitted_s + self.profile.request_s, lambda: self._enqueue(run))
            else:
                self._enqueue(run)

    def _too_large(self, request: Request) -> str:
        needed = request.context_tokens + request.output_tokens
        return f"needs {needed} tokens of KV; the pool of {self.id} has {self.cache.pool_tokens}"

    def _enqueue(self, run: Run) -> None:
        if run.stage is not Stage.OVER:
            self._queue.append(run)
            if self._prefilling is None:
                self._go_on()

    def abort(self, request_id: str) -> None:
        """End it with what it has generated so far."""
        run = self._runs.get(request_id)
        if run is not None:
            self._advance()
            self._end(run)
            self._go_on()
            run.done(run.served(aborted=True))

    def die(self) -> None:
        """Every request fails with what it has generated so far; nothing is served any more."""
        self._advance()
        runs = list(self._runs.values())
        for run in runs:
            self._end(run)
        self.is_dead = True
        self.cache.invalidate()
        self._go_on()
        for run in runs:
            run.done(run.served(failed=f"engine {self.id} is gone"))

    # ---- KV between turns ----

    def release(self, program_id: ProgramId) -> None:
        """The program's KV is not needed for now."""
        if self.profile.on_release is OnRelease.FREE:
            self.cache.free(program_id)
        elif self.profile.on_release is OnRelease.DEMOTE:
            self.cache.demote(program_id)

    def offload(self, program_id: ProgramId) -> None:
        """The program's KV goes to the lower tier."""
        self.cache.offload(program_id)

    # ---- weights ----

    def stage(self, done: Callable[[], None]) -> None:
        """A new version is copied beside the old one, while decoding goes on."""
        self._clock.call_at(self._clock.now_s() + self.profile.stage_s, lambda: self._staged(done))

    def _staged(self, done: Callable[[], None]) -> None:
        if not self.is_dead:
            done()

    def commit(self, version: Version, *, keep_kv: bool, done: Callable[[], None]) -> None:
        """Stand still and swap; without `keep_kv` requests that run prefill their context again."""
        self._advance()
        self._pauses += 1
        self._go_on()
        swapped_s = self._clock.now_s() + self.profile.swap_s
        self._clock.call_at(swapped_s, lambda: self._swapped(version, keep_kv, done))

    def _swapped(self, version: Version, keep_kv: bool, done: Callable[[], None]) -> None:
        self._at_s = self._clock.now_s()
        self._pauses -= 1
        self._paused_s += self.profile.swap_s
        if self.is_dead:
            return
        self.version = version
        for _, _, run in self._decoding:
            if run.stage is Stage.DECODING:
                run.stamp(version, run.generated + int(self._steps - run.from_step))
        if not keep_kv:
            self._recompute()
        self._go_on()
        done()

    def _recompute(self) -> None:
        decoding = [run for _, _, run in sorted(self._decoding) if run.stage is Stage.DECODING]
        again = [self._prefilling, *decoding] if self._prefilling else decoding
        for run in again:
            self._note_progress(run)
            run.begins(Stage.RECOMPUTING, self._at_s, self._paused_s)
        self.cache.invalidate()
        self._prefilling, self._decoding, self._decoders = None, [], 0
        self._to_prefill.extendleft(reversed(again))

    # ---- steps ----

    def _advance(self) -> None:
        """Count the steps until now."""
        now_s = self._clock.now_s()
        if now_s != self._at_s:
            if self._step_s:
                self._steps += (now_s - self._at_s) / self._step_s
            self._at_s = now_s

    def _go_on(self) -> None:
        """After a change: start what can start, and wait for what ends first."""
        self._advance()
        if self._prefilling is None and not self._pauses:
            self._start_prefill()
        self._step_s = 0.0 if self._pauses else self._step_length_s()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = self._next_end()
        if ends is not None and self._step_s:
            due_s = self._at_s + (ends - self._steps) * self._step_s
            self._timer = self._clock.call_at(due_s, self._reached)

    def _step_length_s(self) -> float:
        run = self._prefilling
        decode_s = self._itl_s[self._decoders]
        if run is None:
            return decode_s
        lesser_s = min(run.chunk_s, decode_s)
        return run.chunk_s + decode_s - self.profile.overlap * lesser_s

    def _next_end(self) -> float | None:
        decoding = self._decoding
        while decoding and decoding[0][2].stage is not Stage.DECODING:
            heapq.heappop(decoding)
        ends = decoding[0][0] if decoding else None
        run = self._prefilling
        if run is not None and (ends is None or run.ends_step < ends):
            return run.ends_step
        return ends

    def _reached(self) -> None:
        """A prefill ends, or requests have their last token, or both."""
        self._timer = None
        ends = self._next_end()
        assert ends is not None
        self._steps, self._at_s = max(self._steps, ends), self._clock.now_s()
        due = self._steps + _SOON
        if self._prefilling is not None and self._prefilling.ends_step <= due:
            self._begin_decoding(self._prefilling)
        finished: list[Run] = []
        while self._decoding and self._decoding[0][0] <= due:
            run = heapq.heappop(self._decoding)[2]
            if run.stage is Stage.DECODING:
                finished.append(run)
                self._end(run)
        self._go_on()
        for run in finished:
            run.done(run.served())

    # ---- the life of a request ----

    def _start_prefill(self) -> None:
        while self._prefilling is None:
            run = self._to_prefill.popleft() if self._to_prefill else self._admit()
            if run is None:
                return
            if run.stage is not Stage.OVER and run.stage is not Stage.RESTORING:
                self._prefill(run)

    def _admit(self) -> Run | None:
        """The first in the queue, when there is room for it; it may have to come back from below first."""
        while self._queue and self._queue[0].stage is Stage.OVER:
            self._queue.popleft()
        if not self._queue or self.running >= self.profile.concurrency:
            return None
        run = self._queue[0]
        request = run.request
        room = run.private + request.output_tokens
        chain = self.cache.take(request.program_id, request.shared, room)
        if chain is None:
            return None
        self._queue.popleft()
        run.chain = chain
        if not self.running:
            self._busy_since_s = self._at_s
        self.running += 1
        if self.profile.host_tokens:
            self._restore(run)
        return run

    def _restore(self, run: Run) -> None:
        device, below = self.cache.hit(run.chain, run.sizes)
        if not below:
            return
        run.stage = Stage.RESTORING
        run.restored += below
        self._host_free_s = max(self._host_free_s, self._at_s) + below / self.profile.host_tokens_s
        self._clock.call_at(self._host_free_s, lambda: self._restored(run, device + below))

    def _restored(self, run: Run, tokens: int) -> None:
        if run.stage is Stage.RESTORING:
            self.cache.fill(run.chain, run.sizes, tokens)
            run.stage = Stage.QUEUED
            self._to_prefill.append(run)
            if self._prefilling is None:
                self._go_on()

    def _prefill(self, run: Run) -> None:
        if run.stage is Stage.QUEUED:
            run.queue_s = self._at_s - run.submitted_s
            run.begins(Stage.PREFILLING, self._at_s, self._paused_s)
        run.stage = Stage.PREFILLING
        context = run.request.context_tokens + run.generated
        if run.generated:
            run.sizes[-1] = run.private + run.generated
        hit = self.cache.hit(run.chain, run.sizes)[0]
        run.hit, run.new = hit, context - hit
        chunks = ceil(run.new / self.profile.chunk_tokens)
        run.chunk_s = self.profile.prefill_s(run.new, context) / chunks
        run.from_step, run.ends_step = self._steps, self._steps + chunks
        self._prefilling = run

    def _begin_decoding(self, run: Run) -> None:
        run.stamp(self.version, run.generated)
        self._note_progress(run)
        run.begins(Stage.DECODING, self._at_s, self._paused_s)
        self._prefilling = None
        run.from_step = self._steps
        run.ends_step = self._steps + run.request.output_tokens - run.generated
        self._order += 1
        self._decoders += 1
        heapq.heappush(self._decoding, (run.ends_step, self._order, run))

    def _note_progress(self, run: Run) -> None:
        """Count what a run that prefills or decodes has got so far."""
        run.spends(self._at_s, self._paused_s)
        is_whole = run.ends_step <= self._steps + _SOON
        if run.stage is Stage.DECODING:
            steps = run.ends_step if is_whole else self._steps
            tokens = round(steps - run.from_step) if is_whole else int(steps - run.from_step)
        else:
            share = (self._steps - run.from_step) / (run.ends_step - run.from_step)
            prefilled = run.new if is_whole else int(run.new * share)
            tokens = int(is_whole)
            run.prefilled += prefilled
            run.cached = run.cached or max(0, run.hit - run.restored)
            self.cache.fill(run.chain, run.sizes, run.hit + prefilled)
            self.result.prefilled_tokens += prefilled
            self.result.cached_tokens += run.hit
        run.generated += tokens
        self.result.generated_tokens += tokens

    def _end(self, run: Run) -> None:
        """The run gives back its room; whoever asked for it is told afterwards."""
        if run.stage is Stage.DECODING or run.stage is Stage.PREFILLING:
            self._note_progress(run)
        self._decoders -= run.stage is Stage.DECODING
        if run is self._prefilling:
            self._prefilling = None
        has_room = bool(run.chain)
        if has_room:
            kept = run.private + run.generated if run.stage is Stage.DECODING else 0
            self.cache.give_back(run.chain, kept)
            self.running -= 1
            if not self.running:
                self.result.busy_s += self._at_s - self._busy_since_s
        run.stage = Stage.OVER
        self.result.evicted_tokens = self.cache.evicted_tokens
        del self._runs[run.request.request_id]
