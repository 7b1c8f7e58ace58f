"""The simulated tool server as the dispatcher reaches one: the ToolServer protocol."""

import asyncio
from collections.abc import Callable

from pydantic import JsonValue

from sostenuto.runtime.simulation.clock import Clock
from sostenuto.runtime.simulation.dispatched.renderer import content_of
from sostenuto.runtime.simulation.dispatched.script import Script, Stage
from sostenuto.scheduler.frame import Frame
from sostenuto.tools.wire import EnvironmentRef, Moved, Prepared, Reward, ToolSchema
from sostenuto.types import (
    CallId,
    Episode,
    Message,
    ProgramId,
    SandboxRung,
    ToolCall,
    ToolResult,
    ToolStatus,
)

_NO_REWARD = Reward(value=0.0, elapsed_s=0.0)


class DispatchedTools:
    """Deadlines are the caller's affair: what a plan says is taken as long as it takes.

    The last that it hears of a program is its release, when the policy still knows it.
    """

    def __init__(self, stage: Stage, clock: Clock, policy: Frame) -> None:
        self._stage = stage
        self._clock = clock
        self._policy = policy
        self._schemas = tuple(
            ToolSchema(name=name, description="", parameters={}, timeout_s=0.0) for name in stage.tool_names
        )

    async def prepare(
        self,
        program_id: ProgramId,
        environment: EnvironmentRef,
        task: dict[str, JsonValue],
        *,
        seed: int,
        timeout_s: float,
    ) -> Prepared:
        del environment, task, seed, timeout_s
        script = self._stage.scripts[program_id]
        queue_s = await self._asked(script, lambda answer: self._stage.tools.prepare(script.plan, answer))
        prompt = content_of(script.prepared(queue_s, self._clock.now_s()))
        return Prepared(
            messages=(Message("user", prompt),), tools=self._schemas, elapsed_s=script.result.prepare_s
        )

    async def call(
        self, program_id: ProgramId, call_id: CallId, call: ToolCall, *, timeout_s: float, priority: int = 0
    ) -> ToolResult:
        del call_id, call, timeout_s, priority
        script, tools = self._stage.scripts[program_id], self._stage.tools
        turn = script.turn
        queue_s = await self._asked(script, lambda answer: tools.call(script.plan, turn, answer))
        added = script.returned(queue_s, self._clock.now_s())
        content = content_of([(added, script.own_id)])
        return ToolResult(ToolStatus.OK, content, elapsed_s=turn.tool_s)

    async def reward(
        self, program_id: ProgramId, call_id: CallId, episode: Episode, *, timeout_s: float
    ) -> Reward:
        del program_id, call_id, episode, timeout_s
        return _NO_REWARD

    async def move(self, program_id: ProgramId, rung: SandboxRung) -> Moved:
        script = self._stage.scripts[program_id]
        took_s = await self._asked(script, lambda answer: self._stage.tools.move(program_id, rung, answer))
        return Moved(rung=rung, elapsed_s=took_s)

    async def release(self, program_id: ProgramId) -> None:
        if (script := self._stage.scripts.get(program_id)) is not None:
            script.result.sandbox_s = self._stage.tools.release(program_id)
            waits = self._policy.waits_of(program_id)
            script.result.waits_by_reason_s = {reason.value: s for reason, s in waits.items()}

    async def _asked(self, script: Script, ask: Callable[[Callable[[float], None]], None]) -> float:
        try:
            return await self._stage.answered(ask)
        except asyncio.CancelledError:
            self._stage.tools.cancel(script.plan.id)
            raise
