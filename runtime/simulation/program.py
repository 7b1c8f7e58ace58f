"""One simulated program: it does what its plan says, when the policy lets it, and keeps the record."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sostenuto.runtime.simulation.clock import Clock
from sostenuto.runtime.simulation.engine import Request, Served
from sostenuto.runtime.simulation.fleet import Fleet
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn
from sostenuto.runtime.simulation.results import ProgramResult, Stretch
from sostenuto.runtime.simulation.tools import SimulatedTools
from sostenuto.runtime.simulation.waits import Waits
from sostenuto.scheduler.actions import Decode
from sostenuto.scheduler.events import (
    Answered,
    Event,
    Finished,
    Prepared,
    Submitted,
    ToolReturned,
    TurnCost,
    TurnEnded,
)
from sostenuto.scheduler.kv import Footprint
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.types import EngineId

TURN_LIMIT_TOKENS = 4096
_IN_MOTION = (Phase.REASONING, Phase.ACTING, Phase.PARKED, Phase.PREPARING)
_RUNNABLE = (Phase.READY, Phase.WAITING)


def turn_limit_tokens(output_tokens: int) -> int:
    """The most that a turn may add, as a runtime states it before it knows the turn's length.

    A power of two no greater than 4,096: close to what callers ask for, without giving the length away.
    An output beyond it is taken as asked for exactly.
    """
    return max(output_tokens, min(TURN_LIMIT_TOKENS, 1 << (output_tokens - 1).bit_length()))


class Closing(Protocol):
    def __call__(self, program: "SimulatedProgram") -> None: ...


@dataclass(slots=True)
class Scene:
    """What all programs of a run have in common.  `in_motion`, `seen` are written by the programs alone."""

    feed: Callable[[Event], None]
    clock: Clock
    fleet: Fleet
    tools: SimulatedTools
    waits: Waits
    is_over: Closing
    timeline: bool = False
    in_motion: int = 0
    """Programs that go on whatever the policy does next: an engine or the tool server works for them."""
    seen: set[str] = field(default_factory=set[str])
    """Shared segments that some program has sent before."""


class SimulatedProgram:
    __slots__ = (
        "_engine_id", "_generated", "_request_id", "_runnable_s", "_scene", "_since_s", "_spare_s", "_turn",
        "_turn_number", "is_silent", "lease_s", "phase", "plan", "private_tokens", "result",
    )  # fmt: skip

    def __init__(self, plan: Plan, scene: Scene, lease_s: float) -> None:
        now_s = scene.clock.now_s()
        self.plan = plan
        self.lease_s = lease_s
        self.phase = Phase.QUEUED
        self.is_silent = False
        """Its client is gone: nothing is heard of it any more."""
        self.private_tokens = plan.prompt_tokens
        self.result = ProgramResult(plan.id, plan.group, plan.group_size, now_s)
        self.result.prompt_tokens = plan.shared_tokens + plan.prompt_tokens
        self._scene = scene
        self._turn = 0
        self._turn_number = 0
        """As the scheduler counts: a turn that was lost with its engine has a number, too."""
        self._generated = 0
        """Of the present turn, on an engine that died."""
        self._engine_id: EngineId | None = None
        self._request_id = ""
        self._since_s = self._runnable_s = now_s
        self._spare_s = scene.waits.spare_s(now_s)

    def __repr__(self) -> str:
        return f"<SimulatedProgram {self.plan.id} {self.phase} turn={self._turn}>"

    @property
    def footprint(self) -> Footprint:
        return Footprint(self.private_tokens + self._generated, self.plan.shared)

    @property
    def turn(self) -> PlannedTurn:
        return self.plan.turns[self._turn]

    @property
    def turn_tokens(self) -> int:
        return turn_limit_tokens(self.turn.output_tokens - self._generated)

    def submit(self) -> None:
        plan = self.plan
        self._scene.feed(
            Submitted(
                plan.id, self.lease_s, group=plan.group, group_size=plan.group_size, sandbox=plan.sandbox
            )
        )

    # ---- what the policy decides ----

    def prepare(self) -> None:
        self._enter(Phase.PREPARING)
        self._scene.tools.prepare(self.plan, self._prepared)

    def decode(self, action: Decode) -> None:
        scene, result = self._scene, self.result
        engine_id, before = action.engine_id, self._engine_id
        if before is not None and before != engine_id:
            result.moves += 1
            scene.fleet.release(before, self.plan.id)
        result.admission_waits_s.append(scene.clock.now_s() - self._runnable_s)
        self._engine_id, self._turn_number = engine_id, action.turn
        self._enter(Phase.REASONING)
        self._request_id = f"{self.plan.id}/{action.turn}"
        shared = self.plan.shared
        context = result.prompt_tokens - self.plan.prompt_tokens + self.private_tokens + self._generated
        output = self.turn.output_tokens - self._generated
        result.context_tokens += context
        result.turn_contexts.append(context)
        if not self.is_silent:
            request = Request(self._request_id, self.plan.id, shared, context, output)
            scene.fleet.generate(engine_id, request, self._served)

    def evicted(self) -> None:
        self.result.evictions += 1
        if self.phase is Phase.ACTING:
            self._enter(Phase.PARKED)
        elif self.phase is Phase.READY:
            self._enter(Phase.WAITING)

    def end(self, failed: str) -> None:
        """Over before its plan: nothing of it runs on."""
        if self.phase is not Phase.DONE:
            self.go_silent()
            self._close(failed)

    def go_silent(self) -> None:
        """Its client dies: what ran for it ends, and nobody is told."""
        if self.phase is not Phase.DONE and not self.is_silent:
            self._scene.in_motion -= self.phase in _IN_MOTION
            self.is_silent = True
            self._scene.tools.cancel(self.plan.id)
            if self.phase is Phase.REASONING and self._engine_id is not None:
                self._scene.fleet.abort(self._engine_id, self._request_id)

    # ---- what becomes of it ----

    def _prepared(self, queue_s: float) -> None:
        scene, result = self._scene, self.result
        now_s = scene.clock.now_s()
        result.prepare_s = queue_s + self.plan.prepare_s
        result.environment_wait_s = scene.waits.spare_s(now_s) - self._spare_s
        result.needed_tokens += self.plan.prompt_tokens
        for segment in self.plan.shared:
            if segment.key not in scene.seen:
                scene.seen.add(segment.key)
                result.needed_tokens += segment.tokens
        self._enter(Phase.WAITING)
        scene.feed(Prepared(self.plan.id, self.footprint, self.turn_tokens))

    def _served(self, served: Served) -> None:
        assert self._engine_id is not None
        self._scene.fleet.left(self._engine_id)
        self._record(served)
        if self.phase is not Phase.REASONING or self.is_silent:
            return
        if served.failed:
            self._lost(served)
        else:
            self._turn_over(served)

    def _lost(self, served: Served) -> None:
        """Lost with its engine: what it generated is kept.  Otherwise no engine could ever serve it."""
        engine = self._scene.fleet.engine(self._engine_id) if self._engine_id else None
        if engine is not None and not engine.is_dead:
            self._close(served.failed)
            return
        self._generated += served.generated_tokens
        self._engine_id = None
        self._enter(Phase.WAITING)

    def _turn_over(self, served: Served) -> None:
        scene, turn = self._scene, self.turn
        self.result.turns += 1
        self.private_tokens += turn.output_tokens
        self._generated = 0
        if turn.tool is None:
            self._release_kv()
            scene.feed(Answered(self.plan.id))
            self._close("")
            return
        self._turn += 1
        self._enter(Phase.ACTING)
        cost = TurnCost(
            served.prefilled_tokens,
            served.prefill_s,
            served.generated_tokens,
            served.decode_s,
            served.queue_s,
        )
        scene.feed(TurnEnded(self.plan.id, self._turn_number, self.footprint, (turn.tool,), cost))
        scene.tools.call(self.plan, turn, self._returned)

    def _returned(self, queue_s: float) -> None:
        turn, result = self.plan.turns[self._turn - 1], self.result
        result.tool_s += turn.tool_s
        result.tool_queue_s += queue_s
        result.needed_tokens += turn.result_tokens
        self.private_tokens += turn.result_tokens
        self._enter(Phase.READY if self.phase is Phase.ACTING else Phase.WAITING)
        self._scene.feed(ToolReturned(self.plan.id, self._turn_number, self.footprint, self.turn_tokens))

    def _close(self, failed: str) -> None:
        scene, result = self._scene, self.result
        result.failed = failed
        self._enter(Phase.DONE)
        result.finished_s = scene.clock.now_s()
        result.sandbox_s = scene.tools.release(self.plan.id)
        if failed:
            self._release_kv()
        scene.feed(Finished(self.plan.id))
        scene.is_over(self)

    def _release_kv(self) -> None:
        if self._engine_id is not None:
            self._scene.fleet.release(self._engine_id, self.plan.id)

    def _record(self, served: Served) -> None:
        result = self.result
        result.generated_tokens += served.generated_tokens
        result.prefilled_tokens += served.prefilled_tokens
        result.cached_tokens += served.cached_tokens + served.restored_tokens
        result.decode_s += served.decode_s
        result.prefill_s += served.prefill_s
        result.turn_waits_s.append(result.admission_waits_s[-1] + served.queue_s)

    def _enter(self, phase: Phase) -> None:
        scene, before = self._scene, self.phase
        now_s = scene.clock.now_s()
        self.phase = phase
        if not self.is_silent:
            scene.in_motion += (phase in _IN_MOTION) - (before in _IN_MOTION)
        change = (phase in _RUNNABLE) - (before in _RUNNABLE)
        if change:
            scene.waits.change(now_s, programs=change)
            self._runnable_s = now_s
        if scene.timeline:
            engine_id = self._engine_id or ""
            self.result.stretches.append(Stretch(before, self._since_s, now_s, engine_id))
        self._since_s = now_s
