"""An agent that follows a script, on the real path: everything but the model is what production runs.

The engine speaks the quickstart's own tokens: what it answers is the scripted message, written by the
renderer as the policy would sample it.
"""

import base64
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
import psutil
from pydantic import BaseModel

from sostenuto.envs.declaration import declaration
from sostenuto.envs.registry import environment_ref
from sostenuto.envs.task import task_id
from sostenuto.errors import EngineError
from sostenuto.records import Trajectory
from sostenuto.runtime.config import ToolServerSettings
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.engines.http import HttpRefusal
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
    RoutedExperts,
    ScoreReply,
    ScoreRequest,
    Spans,
    WireSpan,
    WireVersionSpan,
    tell,
)
from sostenuto.runtime.journal import Journal, open_journal
from sostenuto.runtime.ledger import Ledger
from sostenuto.runtime.program import ProgramSpec
from sostenuto.runtime.quickstart.folder import write_folder
from sostenuto.runtime.quickstart.recipe import ModelShape
from sostenuto.runtime.quickstart.tokenizer import tokenizer_material, train_tokenizer
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.runtime.rollouts import Rollouts
from sostenuto.runtime.run_directory import RunDirectory, hold
from sostenuto.runtime.tool_process import launch_tool_server
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.tools.client import ToolServerClient
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import EngineId, GroupId, Limits, Message, ProgramId, Purpose, ToolCall

ENGINE = EngineId("scripted")
TINY = ModelShape(layers=2, hidden=32, heads=2, feed_forward=64, context_tokens=512)

Script = Callable[[str], Sequence[Message]]
"""The assistant's messages of a program, one for each turn; the last one is repeated when it is asked on."""


def calls(*pairs: tuple[str, str]) -> Message:
    """An assistant's message that asks for these tools, arguments as JSON."""
    return Message("assistant", "", tuple(ToolCall(name, arguments) for name, arguments in pairs))


def says(text: str) -> Message:
    return Message("assistant", text)


def experts_of(tokens: int) -> RoutedExperts:
    """Of a model with two layers and one expert a token: the token's position, and its double."""
    numbers = np.stack([np.arange(tokens), 2 * np.arange(tokens)], axis=1).astype("<i2")
    data = base64.b64encode(numbers.tobytes()).decode()
    return RoutedExperts(start=0, shape=(tokens, 2, 1), data=data)


def turns_of(conversation: Sequence[Message]) -> list[Message]:
    return [message for message in conversation if message.role == "assistant"]


def write_tokenizer_folder(folder: Path, shape: ModelShape = TINY) -> Path:
    """The quickstart's model folder without weights."""
    write_folder(folder, train_tokenizer(tokenizer_material(1)), shape)
    return folder


@dataclass
class ScriptedEngine:
    """Implements `Engine`.  `contexts` are the tokens that it saw and gave, by program; `held` is its KV."""

    renderer: Renderer
    script: Script
    decode_s: float = 0.0
    context_tokens: int = 512
    kv_tokens: int = 4096
    concurrency: int = 8
    contexts: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    held: dict[str, int] = field(default_factory=dict[str, int])
    turns: dict[str, int] = field(default_factory=dict[str, int])
    decoding: int = 0
    token_s: float = 0.0
    """Between the tokens of a turn, for whoever hears of them."""
    broken: str = ""
    may_rewrite: bool = False
    """Whether a program may go on with another history."""
    features: frozenset[Feature] = frozenset({Feature.GRAMMAR})
    """It follows its script, whatever it is asked for."""
    version: str = "0.0"
    refuses: int = 0
    """Status of an answer to each request; 0: none."""
    requests: list[GenerateRequest] = field(default_factory=list[GenerateRequest])

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            model="scripted",
            architecture="Script",
            vocabulary_size=768,
            context_tokens=self.context_tokens,
            kv_tokens=self.kv_tokens,
            concurrency=self.concurrency,
            shares_prefixes=False,
            version=self.version,
            dtype="float32",
            threads=1,
            features=self.features,
        )

    async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
        self.decoding += 1
        try:
            await anyio.sleep(self.decode_s)
        finally:
            self.decoding -= 1
        if self.broken:
            raise EngineError(self.broken)
        if self.refuses:
            raise HttpRefusal("refused", status=self.refuses, said="refused")
        reply = self._reply(request)
        if spans is None or not self.token_s:
            tell(reply, spans)
            return reply
        for id_, value in zip(reply.token_ids, reply.logprobs, strict=True):
            spans(WireSpan(token_ids=[id_], logprobs=[value], version=self.version))
            await anyio.sleep(self.token_s)
        return reply

    def _reply(self, request: GenerateRequest) -> GenerateReply:
        program = request.program_id
        self.requests.append(request)
        before = self.contexts.get(program, [])
        if not self.may_rewrite:
            assert request.token_ids[: len(before)] == before, "the context was encoded again"
        said = self.script(program)
        turn = self.turns.get(program, 0)
        message = said[min(turn, len(said) - 1)]
        whole = self.renderer.write([Message("user", "")], message, ())
        ids = whole[: request.max_new_tokens]
        self.turns[program] = turn + 1
        cached = self.held.get(program, 0)
        self.contexts[program] = [*request.token_ids, *ids]
        if request.hold:
            self.held[program] = len(self.contexts[program])
        else:
            self.held.pop(program, None)
        return GenerateReply(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            versions=[WireVersionSpan(version=self.version, start=0, end=len(ids))],
            finish_reason=FinishReason.STOP if ids == whole else FinishReason.LENGTH,
            matched=next((text for text in request.sampling.stop_strings if text in message.content), None),
            cached_tokens=cached,
            prefilled_tokens=len(request.token_ids) - cached,
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=self.decode_s,
            top_logprobs=[[(id_, -0.5), (0, -2.0)][: request.top_logprobs] for id_ in ids]
            if request.top_logprobs
            else None,
            routed_experts=experts_of(len(request.token_ids) + len(ids) - 1)
            if request.routed_experts
            else None,
        )

    async def release(self, program_id: ProgramId) -> None:
        await anyio.lowlevel.checkpoint()
        self.held.pop(program_id, None)

    async def offload(self, program_id: ProgramId) -> None:
        raise EngineError(f"a script has no lower tier for {program_id}")

    async def restore(self, program_id: ProgramId) -> None:
        raise EngineError(f"a script has no lower tier for {program_id}")

    async def pause(self, mode: PauseMode) -> None:
        raise EngineError(f"a script is not paused, with {mode} neither")

    async def resume(self) -> None:
        raise EngineError("a script is not paused")

    async def load(self) -> Load:
        raise EngineError("a script has no load")

    async def abort(self, request_id: str) -> None:
        raise EngineError(f"a script is not aborted, {request_id} neither")

    async def score(self, request: ScoreRequest) -> ScoreReply:
        raise EngineError(f"a script scores no {len(request.token_ids)} tokens")

    async def prepare_update(self, manifest: Manifest) -> None:
        raise EngineError(f"a script has no weights for {manifest.version}")

    async def commit_update(self, request: CommitRequest) -> CommitReply:
        raise EngineError(f"a script has no weights for {request.version}")

    async def abandon_update(self, version: str) -> None:
        raise EngineError(f"a script has no weights for {version}")

    async def flush(self) -> None:
        self.held.clear()


@dataclass(frozen=True)
class Stage:
    """The real path, with a script in the engine's place."""

    run: RunDirectory
    engine: ScriptedEngine
    dispatcher: Dispatcher
    rollouts: Rollouts
    ledger: Ledger
    journal: Journal
    client: ToolServerClient
    server_pid: int

    async def play(self, specs: Sequence[ProgramSpec]) -> dict[str, Trajectory]:
        """Run the programs together."""
        done: dict[str, Trajectory] = {}

        async def run(spec: ProgramSpec) -> None:
            done[spec.id] = await self.rollouts.run(spec)

        async with anyio.create_task_group() as group:
            for spec in specs:
                group.start_soon(run, spec)
        return done

    @property
    def sandboxes(self) -> list[str]:
        folder = self.run.path / "sandboxes"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    async def assert_nothing_is_held(self) -> None:
        statistics = self.ledger.statistics()
        assert statistics.closes
        assert statistics.running == 0
        assert (await self.client.state()).programs == ()
        assert self.sandboxes == []
        assert self.engine.held == {}
        assert self.engine.decoding == 0


@asynccontextmanager
async def staged(
    directory: Path,
    model: Path,
    script: Script,
    *,
    tools: ToolServerSettings | None = None,
    engine: Mapping[str, float] | None = None,
    scheduler: SchedulerSettings | None = None,
) -> AsyncGenerator[Stage]:
    """Everything of one run but its jobs; no process of it is left afterwards."""
    before = children()
    renderer = open_renderer(ModelFolder.open(model))
    ledger, scripted = Ledger(), ScriptedEngine(renderer, script)
    for name, value in (engine or {}).items():
        setattr(scripted, name, value)
    settings = scheduler or SchedulerSettings()
    with hold(directory) as run:
        async with (
            open_journal(run.journal) as journal,
            launch_tool_server(
                tools or ToolServerSettings(),
                sandbox_root=run.path / "sandboxes",
                log=run.logs / "tool_server.log",
            ) as launched,
            open_dispatcher(settings, {ENGINE: scripted}, launched.client, renderer) as dispatcher,
        ):
            rollouts = Rollouts(dispatcher, ledger, journal)
            yield Stage(run, scripted, dispatcher, rollouts, ledger, journal, launched.client, launched.pid)
    assert children() - before == set()


def specs_of(
    environment: type,
    tasks: Mapping[str, BaseModel],
    *,
    limits: Limits | None = None,
    purpose: Purpose = Purpose.TRAIN,
) -> list[ProgramSpec]:
    """One program for each task, under the name that it is given."""
    declaration(environment)
    ref = environment_ref(environment)
    return [
        ProgramSpec(
            id=ProgramId(name),
            group_id=GroupId(name),
            task_id=task_id(task),
            purpose=purpose,
            environment=ref,
            task=task.model_dump(mode="json"),
            limits=limits or Limits(turn_tokens=200, wall_s=60),
        )
        for name, task in tasks.items()
    ]


def children() -> set[int]:
    """Pids below this process, zombies included."""
    return {child.pid for child in psutil.Process().children(recursive=True)}
