"""Planned programs behind the protocols of the runtime, so that nothing but the tokens is made up.

They pass the same dispatcher, scheduler and engines as any program.  Prompts and tool results are
random tokens by seed, a turn is as long as its plan says, and a tool call sleeps.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import anyio
import anyio.lowlevel
import numpy as np
from pydantic import JsonValue

from sostenuto.errors import EngineError
from sostenuto.records import Producer
from sostenuto.runtime.bench.live.program import Course
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.wire import (
    Capabilities,
    CommitReply,
    CommitRequest,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Load,
    PauseMode,
    ScoreReply,
    ScoreRequest,
    Spans,
)
from sostenuto.runtime.rendering.renderer import Extension, Piece, Turn
from sostenuto.runtime.simulation.plan import Plan
from sostenuto.runtime.simulation.results import EngineResult
from sostenuto.scheduler.frame import Frame
from sostenuto.tools.wire import EnvironmentRef, Moved, Prepared, Reward, ToolSchema
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import (
    CallId,
    EngineId,
    Episode,
    Message,
    ProgramId,
    SandboxRung,
    ToolCall,
    ToolResult,
    ToolStatus,
)

_CALL_TIMEOUT_S = 3600.0


class ReplayRenderer:
    """A message says how many tokens it is, and which; a turn calls the tool of its plan."""

    stop_token_ids = ()

    def __init__(self, course: Course, vocabulary: int) -> None:
        self._course = course
        self._vocabulary = vocabulary

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        del tools
        return [Piece(Producer.USER, self._tokens(message)) for message in messages]

    def parse(self, token_ids: Sequence[int], *, finished: bool, tools: Sequence[ToolSchema] = ()) -> Turn:
        """The tools are the program's own: their description is its id."""
        del token_ids, finished
        planned = self._course.program(tools[0].description).last_turn if tools else None
        if planned is None or planned.tool is None:
            return Turn(Message("assistant", ""))
        return Turn(Message("assistant", "", (ToolCall(planned.tool, ""),)))

    def extend(
        self,
        before: Sequence[Message],
        turn: Message,
        sampled_ids: Sequence[int],
        *,
        context_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> Extension:
        del before, turn, sampled_ids, context_ids, tools
        return Extension(tuple(Piece(Producer.ENVIRONMENT, self._tokens(message)) for message in new))

    def write(self, before: Sequence[Message], turn: Message, tools: Sequence[ToolSchema]) -> list[int]:
        del before, tools
        return self._tokens(turn)

    def _tokens(self, message: Message) -> list[int]:
        count, _, key = message.content.partition(" ")
        rng = np.random.default_rng(list(blake2b(key.encode(), digest_size=16).digest()))
        return rng.integers(0, self._vocabulary, int(count)).tolist()


def _said(tokens: int, key: str) -> str:
    return f"{tokens} {key}"


class ReplayTools:
    """A tool server that only takes time: `time_scale` seconds for each second of the plan."""

    def __init__(
        self, course: Course, policy: Frame, concurrency: Mapping[str, int], *, time_scale: float
    ) -> None:
        self._course = course
        self._policy = policy
        self._time_scale = time_scale
        self._places = {tool: anyio.Semaphore(places) for tool, places in concurrency.items()}

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
        program = self._course.program(program_id)
        program.prepares()
        plan = program.plan
        await anyio.sleep(plan.prepare_s * self._time_scale)
        program.is_prepared()
        return Prepared(messages=_prompt(plan), tools=_schemas(plan), elapsed_s=plan.prepare_s)

    async def call(
        self, program_id: ProgramId, call_id: CallId, call: ToolCall, *, timeout_s: float, priority: int = 0
    ) -> ToolResult:
        del timeout_s, priority
        program = self._course.program(program_id)
        planned, began_s = program.last_turn, self._course.now_s()
        place = self._places.get(call.name)
        if place is not None:
            await place.acquire()
        queue_s = self._course.now_s() - began_s
        try:
            await anyio.sleep(planned.tool_s * self._time_scale)
        finally:
            if place is not None:
                place.release()
        program.tool_returned(self._course.now_s() - began_s - queue_s, queue_s)
        return ToolResult(ToolStatus.OK, _said(planned.result_tokens, f"{program_id}/{call_id}"))

    async def reward(
        self, program_id: ProgramId, call_id: CallId, episode: Episode, *, timeout_s: float
    ) -> Reward:
        del program_id, call_id, episode, timeout_s
        await anyio.lowlevel.checkpoint()
        return Reward(value=0.0, elapsed_s=0.0)

    async def move(self, program_id: ProgramId, rung: SandboxRung) -> Moved:
        del program_id
        await anyio.lowlevel.checkpoint()
        return Moved(rung=rung, elapsed_s=0.0)

    async def release(self, program_id: ProgramId) -> None:
        """The last moment at which the policy knows the program."""
        waits_s = self._policy.waits_of(program_id)
        self._course.program(program_id).result.waits_by_reason_s = {r.value: s for r, s in waits_s.items()}
        await anyio.lowlevel.checkpoint()


def _prompt(plan: Plan) -> tuple[Message, ...]:
    common = [Message("system", _said(segment.tokens, segment.key)) for segment in plan.shared]
    return (*common, Message("user", _said(plan.prompt_tokens, plan.id)))


def _schemas(plan: Plan) -> tuple[ToolSchema, ...]:
    names = dict.fromkeys(turn.tool for turn in plan.turns if turn.tool is not None)
    return tuple(
        ToolSchema(name=name, description=plan.id, parameters={}, timeout_s=_CALL_TIMEOUT_S) for name in names
    )


class ReplayEngine:
    """A real engine that is asked for turns of planned lengths, and what it had to do; an `Engine`."""

    def __init__(self, engine_id: EngineId, engine: Engine, course: Course, *, kv_tokens: int) -> None:
        self.result = EngineResult(engine_id, kv_tokens)
        self._id = engine_id
        self._engine = engine
        self._course = course
        self._in_flight = 0
        self._waited_before_s = 0.0
        """Time in which programs waited, when the engine had nothing to do any more."""

    async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
        program = self._course.program(request.program_id)
        tokens = program.turn.output_tokens
        if tokens > request.max_new_tokens:
            raise EngineError(
                f"{program.plan.id}: its turn of {tokens} tokens does not fit, {request.max_new_tokens} do"
            )
        program.is_sent(self._id, len(request.token_ids))
        self._enters()
        try:
            exact = request.model_copy(update={"max_new_tokens": tokens})
            reply = await self._engine.generate(exact, spans=spans)
        finally:
            self._leaves()
        program.is_answered(reply)
        return reply.model_copy(update={"finish_reason": FinishReason.STOP})

    async def release(self, program_id: ProgramId) -> None:
        self._course.program(program_id).is_evicted()
        await self._engine.release(program_id)

    async def load(self) -> Load:
        load, now_s = await self._engine.load(), self._course.now_s()
        self.result.used_tokens.append((now_s, load.used_kv_tokens))
        self.result.decoding.append((now_s, load.running))
        return load

    async def close(self) -> None:
        """Note what the engine says it has done; it has done nothing else since it was started."""
        load = await self.load()
        if not self._in_flight:
            self._note_idle()
        self.result.busy_s = load.busy_s
        self.result.prefilled_tokens = load.prefilled_tokens
        self.result.cached_tokens = load.cached_tokens
        self.result.generated_tokens = load.generated_tokens

    def _enters(self) -> None:
        if not self._in_flight:
            self._note_idle()
        self._in_flight += 1

    def _leaves(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._waited_before_s = self._course.waits.waiting_s(self._course.now_s())

    def _note_idle(self) -> None:
        waited_s = self._course.waits.waiting_s(self._course.now_s())
        self.result.idle_with_work_waiting_s += waited_s - self._waited_before_s
        self._waited_before_s = waited_s

    # ---- as the engine does it ----

    async def capabilities(self) -> Capabilities:
        return await self._engine.capabilities()

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        return await self._engine.score(request)

    async def prepare_update(self, manifest: Manifest) -> None:
        await self._engine.prepare_update(manifest)

    async def commit_update(self, request: CommitRequest) -> CommitReply:
        return await self._engine.commit_update(request)

    async def offload(self, program_id: ProgramId) -> None:
        await self._engine.offload(program_id)

    async def restore(self, program_id: ProgramId) -> None:
        await self._engine.restore(program_id)

    async def pause(self, mode: PauseMode) -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def abandon_update(self, version: str) -> None:
        await self._engine.abandon_update(version)

    async def flush(self) -> None:
        await self._engine.flush()
