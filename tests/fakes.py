"""Fakes that implement the Protocols; nothing in this suite is patched.

The fake policy speaks bytes: a token is one byte, 0 ends a turn, and `!name args` on a line is a tool call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
from pydantic import JsonValue

from sostenuto.errors import EngineError
from sostenuto.records import Producer
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
    WireVersionSpan,
    tell,
)
from sostenuto.runtime.program import ProgramSpec
from sostenuto.runtime.rendering.renderer import Extension, Piece, Turn
from sostenuto.tools.wire import EnvironmentRef, Moved, Prepared, Reward, ToolSchema
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import (
    CallId,
    Episode,
    GroupId,
    Limits,
    Message,
    ProgramId,
    Purpose,
    SandboxRung,
    ToolCall,
    ToolResult,
    ToolStatus,
    Version,
)

END = 0


def spec(
    name: str,
    *,
    purpose: Purpose = Purpose.TRAIN,
    limits: Limits | None = None,
    group_size: int = 1,
    trainable_until: Version | None = None,
    priority: int = 0,
) -> ProgramSpec:
    return ProgramSpec(
        id=ProgramId(name),
        group_id=GroupId("g"),
        task_id="task",
        purpose=purpose,
        environment=EnvironmentRef(name="fake", import_path="fake:Fake"),
        task={},
        limits=limits or Limits(wall_s=10_000),
        group_size=group_size,
        priority=priority,
        trainable_until=trainable_until,
    )


class FakeRenderer:
    """Bytes are tokens."""

    stop_token_ids = (END,)

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        del tools
        return [Piece(Producer.USER, list(message.content.encode())) for message in messages]

    def parse(self, token_ids: Sequence[int], *, finished: bool, tools: Sequence[ToolSchema] = ()) -> Turn:
        del finished, tools
        text = bytes(id_ for id_ in token_ids if id_ != END).decode()
        calls = [line[1:].partition(" ") for line in text.splitlines() if line.startswith("!")]
        if any(not name for name, _, _ in calls):
            return Turn(Message("assistant", text), "a call needs a name")
        return Turn(Message("assistant", text, tuple(ToolCall(name, rest) for name, _, rest in calls)))

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
        return Extension(tuple(Piece(Producer.ENVIRONMENT, list(m.content.encode())) for m in new))

    def write(self, before: Sequence[Message], turn: Message, tools: Sequence[ToolSchema]) -> list[int]:
        del before, tools
        return [*turn.content.encode(), END]


@dataclass
class FakeEngine:
    """Says what its script says, one virtual second a turn; `log` is (time, program, cached tokens)."""

    script: tuple[str, ...] = ("done",)
    decode_s: float = 1.0
    kv_tokens: int = 1000
    concurrency: int = 8
    version: str = "0.0"
    broken_update: str = ""
    fail_on_turn: int = -1
    log: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    held: dict[str, int] = field(default_factory=dict[str, int])
    lower_tokens: int = 0
    lower: dict[str, int] = field(default_factory=dict[str, int])
    """What lies in the lower tier."""
    paused: PauseMode | None = None
    turns: dict[str, int] = field(default_factory=dict[str, int])
    decoding: int = 0
    most_decoding: int = 0
    most_held: int = 0
    is_dead: bool = False
    """Answers nothing; what it decodes fails when it is done."""
    requests: list[GenerateRequest] = field(default_factory=list[GenerateRequest])
    loads: int = 0

    async def capabilities(self) -> Capabilities:
        self._check_alive()
        return Capabilities(
            model="fake",
            architecture="Fake",
            vocabulary_size=256,
            tokenizer_size=256,
            context_tokens=self.kv_tokens,
            kv_tokens=self.kv_tokens,
            concurrency=self.concurrency,
            shares_prefixes=False,
            version=self.version,
            dtype="float32",
            threads=1,
            lower_tokens=self.lower_tokens,
            lower_tokens_s=1000.0 if self.lower_tokens else 0.0,
        )

    def dies(self) -> None:
        self.is_dead = True
        self.held.clear()
        self.lower.clear()

    def starts_again(self) -> None:
        self.is_dead = False

    def _check_alive(self) -> None:
        if self.is_dead:
            raise EngineError("engine: connection refused")

    async def load(self) -> Load:
        self._check_alive()
        self.loads += 1
        return Load(
            running=self.decoding,
            waiting=3,
            used_kv_tokens=500,
            held_kv_tokens=100,
            held_programs=len(self.held),
            prefilled_tokens=30 * self.loads,
            cached_tokens=10 * self.loads,
            generated_tokens=0,
            updates=0,
            busy_s=0.0,
            pause_s=0.0,
        )

    async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
        program = request.program_id
        self._check_alive()
        turn = self.turns.get(program, 0)
        self.log.append((anyio.current_time(), program))
        self.requests.append(request)
        self.decoding += 1
        self.most_decoding = max(self.most_decoding, self.decoding)
        try:
            await anyio.sleep(self.decode_s)
        finally:
            self.decoding -= 1
        self._check_alive()
        if turn == self.fail_on_turn:
            raise EngineError(f"engine e0: generate of turn {turn} broke")
        reply = self.reply(request, turn)
        tell(reply, spans)
        return reply

    def reply(self, request: GenerateRequest, turn: int) -> GenerateReply:
        program = request.program_id
        cached = self.lower.pop(program, 0) or self.held.get(program, 0)
        whole = [*self.script[min(turn, len(self.script) - 1)].encode(), END]
        ids = whole[: request.max_new_tokens]
        self.turns[program] = turn + 1
        self.held[program] = len(request.token_ids) + len(ids)
        self.most_held = max(self.most_held, sum(self.held.values()))
        return GenerateReply(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            versions=[WireVersionSpan(version=self.version, start=0, end=len(ids))],
            finish_reason=FinishReason.STOP if ids == whole else FinishReason.LENGTH,
            cached_tokens=cached,
            prefilled_tokens=len(request.token_ids) - cached,
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=self.decode_s,
        )

    async def abort(self, request_id: str) -> None:
        del request_id

    async def release(self, program_id: ProgramId) -> None:
        await anyio.lowlevel.checkpoint()
        self._check_alive()
        self.held.pop(program_id, None)
        self.lower.pop(program_id, None)

    async def offload(self, program_id: ProgramId) -> None:
        await anyio.lowlevel.checkpoint()
        self._check_alive()
        if program_id in self.held:
            self.lower[program_id] = self.held.pop(program_id)

    async def restore(self, program_id: ProgramId) -> None:
        await anyio.lowlevel.checkpoint()
        self._check_alive()
        if program_id in self.lower:
            self.held[program_id] = self.lower.pop(program_id)

    async def pause(self, mode: PauseMode) -> None:
        self.paused = mode

    async def resume(self) -> None:
        self.paused = None

    async def score(self, request: ScoreRequest) -> ScoreReply:
        return ScoreReply(logprobs=[-1.0] * (len(request.token_ids) - request.start), version=self.version)

    async def prepare_update(self, manifest: Manifest) -> None:
        del manifest
        await anyio.sleep(1)
        if self.broken_update:
            raise EngineError(self.broken_update)

    async def commit_update(self, request: CommitRequest) -> CommitReply:
        self.version = request.version
        return CommitReply(version=request.version, pause_s=0.25, recomputed_requests=0, dropped_programs=0)

    async def abandon_update(self, version: str) -> None:
        del version

    async def flush(self) -> None:
        self.held.clear()


@dataclass
class FakeTools:
    """A tool server whose environments live in a set; a call takes `call_s` virtual seconds."""

    call_s: float = 10.0
    prepare_s: float = 0.0
    prompt: str = "hello"
    status: ToolStatus = ToolStatus.OK
    broken: Exception | None = None
    slow: dict[str, float] = field(default_factory=dict[str, float])
    """Tools beside `look`, and what a call of each takes."""
    queued: dict[str, float] = field(default_factory=dict[str, float])
    """How long calls of a tool wait for their turn."""
    live: set[str] = field(default_factory=set[str])
    priorities: list[int] = field(default_factory=list[int])
    calls: list[tuple[str, str, ToolCall]] = field(default_factory=list[tuple[str, str, ToolCall]])
    moves: list[tuple[str, SandboxRung]] = field(default_factory=list[tuple[str, SandboxRung]])
    move_s: float = 0.5
    episodes: list[Episode] = field(default_factory=list[Episode])

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
        self.live.add(program_id)
        await anyio.sleep(self.prepare_s)
        tools = tuple(
            ToolSchema(name=name, description="", parameters={}, timeout_s=60)
            for name in ("look", *self.slow)
        )
        return Prepared(messages=(Message("user", self.prompt),), tools=tools, elapsed_s=0)

    async def call(
        self, program_id: ProgramId, call_id: CallId, call: ToolCall, *, timeout_s: float, priority: int = 0
    ) -> ToolResult:
        del timeout_s
        self.calls.append((program_id, call_id, call))
        self.priorities.append(priority)
        run_s, queued_s = self.slow.get(call.name, self.call_s), self.queued.get(call.name, 0.0)
        await anyio.sleep(queued_s + run_s)
        if self.broken:
            raise self.broken
        done = call.name == "finish"
        return ToolResult(self.status, f"[{call.arguments}]", done=done, elapsed_s=run_s, queued_s=queued_s)

    async def reward(
        self, program_id: ProgramId, call_id: CallId, episode: Episode, *, timeout_s: float
    ) -> Reward:
        del program_id, call_id, timeout_s
        await anyio.lowlevel.checkpoint()
        self.episodes.append(episode)
        return Reward(value=1.0, metrics={"seen": float(len(episode.messages))}, elapsed_s=0)

    async def move(self, program_id: ProgramId, rung: SandboxRung) -> Moved:
        await anyio.sleep(self.move_s)
        self.moves.append((program_id, rung))
        return Moved(rung=rung, elapsed_s=self.move_s)

    async def release(self, program_id: ProgramId) -> None:
        await anyio.lowlevel.checkpoint()
        self.live.discard(program_id)
