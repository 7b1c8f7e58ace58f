"""The engine without its process: requests in, answers out, one model step at a time.

- A step computes, in one forward pass, one token of each request that decodes, what is guessed to
  follow it (`speculation`), and chunks of the prompts that wait for it; requests join and leave between
  any two steps.
- The highest priority first, then first come, first served.  A request waits only for room, a place in
  the batch, a prefix that a running request is just computing for it, or the end of a pause.
- Every request is answered exactly once.
- Not thread-safe: `worker` calls everything here on the engine's thread.
"""

import time
from bisect import insort
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from sostenuto.runtime.engines.embedded.adapters import Adapters
from sostenuto.runtime.engines.embedded.checks import Checks
from sostenuto.runtime.engines.embedded.grammar.grammars import Grammars, is_installed
from sostenuto.runtime.engines.embedded.lora import Adapter
from sostenuto.runtime.engines.embedded.lower import LowerTier
from sostenuto.runtime.engines.embedded.model import Model
from sostenuto.runtime.engines.embedded.packing import Plan, plan
from sostenuto.runtime.engines.embedded.pausing import Paused, Pausing
from sostenuto.runtime.engines.embedded.pool import Admission, Pool
from sostenuto.runtime.engines.embedded.publications import publications_of
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.renewal import Renewed, renew
from sostenuto.runtime.engines.embedded.sampling import Drawn, draw_next
from sostenuto.runtime.engines.embedded.scoring import ScoreJob
from sostenuto.runtime.engines.embedded.speculation.speculator import Speculator
from sostenuto.runtime.engines.embedded.standing import Counters, capabilities_of, load_of, speculation_of
from sostenuto.runtime.engines.embedded.turn import Ending, StopStrings, Turn, tagged
from sostenuto.runtime.engines.wire import (
    Capabilities,
    CommitReply,
    CommitRequest,
    Feature,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Load,
    PauseMode,
    ScoreReply,
    ScoreRequest,
)
from sostenuto.types import Version

if TYPE_CHECKING:
    from sostenuto.runtime.engines.embedded.grammar.guide import Guide

FEATURES = frozenset(
    {
        Feature.HOLD, Feature.SCORE, Feature.UPDATE, Feature.PAUSE, Feature.TRUNCATION, Feature.PENALTIES,
        Feature.TOP_LOGPROBS, Feature.STREAM, Feature.ADAPTERS, Feature.KV_AGE,
    }
)  # fmt: skip


class Core:
    """Continuous batching over one model."""

    def __init__(
        self, model: Model, *, version: Version, kv_tokens: int, concurrency: int, threads: int,
        lower: LowerTier | None = None, speculator: Speculator | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self.weights = publications_of(model, speculator and speculator.source.weights, version)
        self._limit = min(model.context_tokens, kv_tokens)
        self._pool = Pool(
            model.shape, kv_tokens=kv_tokens, widest=self._limit, concurrency=concurrency, lower=lower
        )
        self._lower = lower
        self.adapters = Adapters(model.module, model.shape.dtype, model.shape.device)
        self.grammars = Grammars(model.tokenizer, model.tokenizer_size)
        self._features = FEATURES | model.features | _optional(lower)
        self._checks = Checks(model, kv_tokens, self._limit, self._features)
        self._threads = threads
        self._pausing = Pausing()
        self._submitted = 0
        self._speculator = speculator
        self._waiting: list[Turn] = []
        """By priority, then as they came."""
        self._scores: list[ScoreJob] = []
        self._counters = Counters()

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        if self._pool.kept.is_copying:
            return True
        if self._pausing.is_still:
            return False
        unheld = any(not self._pausing.holds(turn) for turn in self._waiting)
        return bool(self._pool.running or unheld or (self._scores and not self._pausing.is_paused))

    @property
    def _known(self) -> tuple[Turn, ...]:
        """Every request that is not answered."""
        return (*self._waiting, *self._pool.running)

    def capabilities(self) -> Capabilities:
        return capabilities_of(
            self._model, self._pool, self._lower,
            version=self.weights.version, threads=self._threads, features=self._features,
        )  # fmt: skip

    def load(self) -> Load:
        told = speculation_of(self._speculator, self.weights)
        return load_of(self._counters, self._pool, self._lower, waiting=len(self._waiting), speculation=told)

    def submit(
        self,
        request: GenerateRequest,
        answer: Callable[[GenerateReply | Refusal], None],
        guide: "Guide | None" = None,
    ) -> Turn:
        """Queue a request, or raise Refusal.  With a grammar, `guide` stands at its start."""
        self._refuse_when_broken()
        adapter = self.adapters.get(request.adapter)
        served = self._version(adapter)
        self._checks.generate(request, served, self._known)
        if adapter is not None:
            request = adapter.apart(request)
        context = np.asarray(request.token_ids, dtype=np.int32)
        tokens = np.empty(min(len(context) + request.max_new_tokens, self._limit), dtype=np.int32)
        tokens[: len(context)] = context
        strings = request.sampling.stop_strings
        turn = Turn(
            request=request,
            answer=answer,
            tokens=tokens,
            length=len(context),
            matcher=StopStrings(self._model.tokenizer, strings) if strings else None,
            submitted_s=time.monotonic(),
            hold=request.hold,
            order=self._submitted,
            stop_ids=frozenset(request.sampling.stop_token_ids),
            guide=guide,
            adapter=adapter,
        )
        self._submitted += 1
        self._wait(turn)
        return turn

    def _wait(self, turn: Turn) -> None:
        insort(self._waiting, turn, key=lambda turn: turn.place)

    def score(self, request: ScoreRequest, answer: Callable[[ScoreReply | Refusal], None]) -> None:
        """Queue tokens to be scored, or raise Refusal."""
        self._refuse_when_broken()
        self._checks.score(request)
        self._scores.append(ScoreJob(request, answer, self.adapters.get(request.adapter)))

    def abort(self, request_id: str, *, hold: bool = True) -> None:
        """End the request of exactly this id with the tokens it has; nothing happens when there is none."""
        for turn in self._known:
            if turn.request.request_id == request_id:
                turn.hold = turn.hold and hold
                self._finish(turn, FinishReason.ABORT, None)
                return

    def release(self, program_id: str) -> None:
        """Give up the KV of a program; idempotent."""
        self._pool.release(program_id)
        if self._speculator:
            self._speculator.forget(program_id)
        for turn in self._waiting:
            if turn.request.program_id == program_id:
                turn.hold = False

    def offload(self, program_id: str) -> None:
        """Move the held KV of a program to the lower tier, if there is some and it has room; idempotent."""
        self._checks.has(Feature.OFFLOAD)
        self._pool.kept.offload(program_id)

    def restore(self, program_id: str) -> None:
        """Bring it back ahead of its turn, if there is room; idempotent."""
        self._checks.has(Feature.OFFLOAD)
        self._pool.restore(program_id)

    def flush(self) -> None:
        """Drop every KV that no request runs on."""
        self._pool.kept.clear()

    def pause(self, mode: PauseMode, answer: Paused) -> None:
        """Let new requests wait; answered when those that run are as the mode says."""
        self._count_pause()
        self._pausing.begin(mode, answer, time.monotonic())
        if mode is PauseMode.RETRACT:
            for turn in list(self._pool.running):
                self._pool.remove(turn)
                self._wait(turn)
        elif mode is PauseMode.ABORT:
            for turn in filter(lambda turn: turn.is_started, self._known):
                self._finish(turn, FinishReason.ABORT, None)
        self._pausing.settle(self._known)

    def resume(self) -> None:
        """Go on; idempotent."""
        self._count_pause()
        self._pausing.end()

    def _count_pause(self) -> None:
        self._counters.pause_s += self._pausing.take_s(self._known, time.monotonic())

    def commit(self, request: CommitRequest) -> CommitReply:
        """Swap to the prepared weights; the running and the held go on as the request says."""
        started_s = time.monotonic()
        try:
            swapped = self.weights.commit(request.version)
        except Refusal:
            raise
        except Exception as exc:
            self._fail_everything()
            raise self._broken(f"{self.weights.broken}: {exc}") from exc
        renewed = self._renew(request, swapped.version) if swapped.target else Renewed()
        self._end_those_for_another()
        pause_s = time.monotonic() - started_s
        if self._speculator:
            self._speculator.updated(drafter=swapped.drafter)
        self._counters.updates += 1
        if not self._pausing.is_still:  # else it is counted at the end of the pause
            for turn in self._known:
                turn.pause_s += pause_s
            self._counters.pause_s += pause_s
        return CommitReply(
            version=str(swapped.version),
            pause_s=pause_s,
            recomputed_requests=renewed.recomputed,
            dropped_programs=renewed.dropped_programs,
            dropped=renewed.dropped,
        )

    def _end_those_for_another(self) -> None:
        """Requests for exactly a version that is not served any more keep the tokens they have."""
        for turn in self._known:
            exact = turn.request.exact_version
            if exact is not None and Version.parse(exact) != self._version(turn.adapter):
                self._finish(turn, FinishReason.ABORT, None)

    def _renew(self, request: CommitRequest, version: Version) -> Renewed:
        for job in self._scores:
            job.restart()
        renewed = renew(self._pool, request, version)
        for turn in renewed.retracted:
            self._wait(turn)
        return renewed

    @torch.no_grad()
    def step(self) -> None:
        """Admit who can be, compute one forward pass, sample, answer who is done."""
        started_s = time.monotonic()
        self._pool.kept.settle()
        if not self._pausing.is_still:
            for turn in self._pool.make_growth_room():
                self._wait(turn)
            self._admit()
        if self._pausing.is_still or not (self._pool.running or self._scores):
            self._pool.kept.settle(wait=True)  # what there is to do waits for a copy
        elif self._pool.running:
            if self._speculator:
                self._speculator.propose(self._pool)
            self._compute(plan(self._pool, self._model.shape.device))
        if not self._pausing.is_paused:
            self._advance_scores()
        self._counters.busy_s += time.monotonic() - started_s

    def _admit(self) -> None:
        programs = {turn.request.program_id for turn in self._waiting}
        for turn in list(self._waiting):
            if len(self._pool.running) >= self._pool.concurrency:
                return
            if self._pausing.holds(turn):
                continue
            admission = self._pool.admit(turn, programs)
            if admission is Admission.NO_ROOM:
                return
            if admission is Admission.ADMITTED:
                self._waiting.remove(turn)
                self._admitted(turn)

    def _admitted(self, turn: Turn) -> None:
        if turn.cached_tokens is None:
            turn.cached_tokens = turn.computed
            turn.admitted_s = time.monotonic()
            self._counters.cached_tokens += turn.computed

    def _advance_scores(self) -> None:
        if self._scores and self._scores[0].advance(self._model, self.adapters, self.weights.version):
            self._scores.pop(0)

    def _compute(self, planned: Plan) -> None:
        with self.adapters.serving((turn.adapter, count) for turn, count in planned.fed):
            logits = self._model.forward(planned.token_ids, planned.positions, planned.wanted, planned.step)
        version = self.weights.version
        for turn, count in planned.fed:
            turn.tags = tagged(turn.tags, version, turn.computed)
            turn.computed += count - turn.drafted
        self._counters.prefilled_tokens += sum(chunk.count for chunk in planned.step.chunks)
        self._sample(planned, logits)

    def _sample(self, planned: Plan, logits: torch.Tensor) -> None:
        turns = planned.sampling
        tokens = draw_next(logits, turns) if turns else []
        if self._speculator:
            self._speculator.observe(planned, [one.token for one in tokens])
        drawn = iter(tokens)
        now_s = time.monotonic()
        # All take before one ends: a row that closes up moves with the KV that is known to be right.
        endings = [self._take(turn, list(islice(drawn, turn.drafted + 1)), now_s) for turn in turns]
        for turn, ending in zip(turns, endings, strict=True):
            if ending is not None:
                self._finish(turn, *ending)
            elif turn.lane is not None and not turn.decodes:
                self._pool.lanes.start_decoding(turn)

    def _take(self, turn: Turn, drawn: list[Drawn], now_s: float) -> Ending | None:
        drafted, verified = turn.drafted, turn.take(drawn, self._version(turn.adapter))
        self._counters.generated_tokens += verified.taken
        if drafted and self._speculator:
            self._speculator.learn(turn, drafted, verified.tested, verified.accepted)
        if turn.first_token_s is None:
            turn.first_token_s = now_s
        return verified.ending

    def _finish(self, turn: Turn, reason: FinishReason, matched: int | str | None) -> None:
        self._note_experts(turn)
        if turn.lane is None:
            self._waiting.remove(turn)
            if not turn.hold:
                self._pool.kept.release(turn.request.program_id)
        elif turn.hold:
            self._pool.hold(turn)
        else:
            self._pool.let_go(turn)
        now_s = time.monotonic()
        self._pausing.add_s(turn, now_s)
        turn.answer(turn.outcome(reason, matched, now_s=now_s))
        self._pausing.settle(self._known)

    def _note_experts(self, turn: Turn) -> None:
        """Nothing is known of a turn that has no KV any more."""
        routes = self._model.routes
        if turn.request.routed_experts and routes is not None and turn.lane is not None:
            keys, _ = turn.lane.prefix(turn.row, turn.computed)
            start = min(turn.request.routed_experts_from, turn.computed)
            turn.routed_experts = routes.read(keys, start)

    def _fail_everything(self) -> None:
        """Nothing that half new weights computed may leave this engine."""
        refusal = self._broken(self.weights.broken or "")
        turns, self._waiting = self._known, []
        for turn in list(self._pool.running):
            self._pool.remove(turn)
        jobs, self._scores = self._scores, []
        self._pool.kept.clear()
        for asked in (*turns, *jobs):
            asked.answer(refusal)
        self._pausing.settle(())

    def _version(self, adapter: Adapter | None) -> Version:
        """Of what is sampled with `adapter`."""
        return (adapter and adapter.version) or self.weights.version

    def _refuse_when_broken(self) -> None:
        if self.weights.broken is not None:
            raise self._broken(self.weights.broken)

    def _broken(self, why: str) -> Refusal:
        return Refusal(503, "broken_weights", why, "publish a full version again, or start the engine again")


def _optional(lower: LowerTier | None) -> frozenset[Feature]:
    """What depends on settings and on what is installed."""
    present = {Feature.GRAMMAR: is_installed(), Feature.OFFLOAD: lower is not None}
    return frozenset(feature for feature, is_present in present.items() if is_present)
