"""Kill -9 of one of three embedded engines while multi-turn programs run on them.

The engines are processes and serve a published version; what they are asked goes through dispatcher,
scheduler and crew as in a job.  Tools are pauses.  What programs had at the kill is read off the engines'
sockets, and has to be the beginning of their records.
"""

import signal
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import anyio
import psutil
from pydantic import JsonValue

from benchmarks.figure import Tell
from sostenuto.records import Producer, Trajectory
from sostenuto.runtime.bench.live.model import random_model
from sostenuto.runtime.config import EngineEntry, EngineSettings
from sostenuto.runtime.crew import Crew, open_crew
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.engines.opened import Ground, Opened, Source, source_of
from sostenuto.runtime.engines.suits import Requirements
from sostenuto.runtime.engines.wire import GenerateReply, GenerateRequest
from sostenuto.runtime.keeper import Keeper, Standing
from sostenuto.runtime.program import ProgramSpec
from sostenuto.runtime.rendering.renderer import Extension, Piece, Turn
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.tools.wire import EnvironmentRef, Moved, Prepared, Reward, ToolSchema
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.types import (
    CallId,
    EngineId,
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

_PROMPT, _OBSERVED = 64, 16
"""Tokens of a prompt, and of what a tool answers."""
_STOPS = tuple(range(32))
"""A sixteenth of the vocabulary: turns have 16 tokens on average."""
_TURNS = 8
_GAP_S = 0.2
_V0, _V1 = Version(0, 0), Version(0, 1)
_PACKAGE = "sostenuto.runtime.engines.embedded"


class _Words:
    """Every turn asks for the tool."""

    stop_token_ids = _STOPS

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        del tools
        return [Piece(Producer.USER, [int(m.content) % 50 + i for i in range(_PROMPT)]) for m in messages]

    def parse(self, token_ids: Sequence[int], *, finished: bool, tools: Sequence[ToolSchema] = ()) -> Turn:
        del token_ids, finished, tools
        return Turn(Message("assistant", "", (ToolCall("pause", "{}"),)))

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
        return Extension(tuple(Piece(Producer.ENVIRONMENT, list(range(_OBSERVED))) for _ in new))

    def write(self, before: Sequence[Message], turn: Message, tools: Sequence[ToolSchema]) -> list[int]:
        del before, turn, tools
        return list(range(_OBSERVED))


class _Pauses:
    """A tool server whose one tool takes a while."""

    async def prepare(
        self,
        program_id: ProgramId,
        environment: EnvironmentRef,
        task: dict[str, JsonValue],
        *,
        seed: int,
        timeout_s: float,
    ) -> Prepared:
        del environment, task, timeout_s, program_id
        tool = ToolSchema(name="pause", description="", parameters={}, timeout_s=10)
        return Prepared(messages=(Message("user", str(seed)),), tools=(tool,), elapsed_s=0)

    async def call(
        self, program_id: ProgramId, call_id: CallId, call: ToolCall, *, timeout_s: float, priority: int = 0
    ) -> ToolResult:
        del program_id, call_id, call, timeout_s, priority
        await anyio.sleep(_GAP_S)
        return ToolResult(ToolStatus.OK, "", elapsed_s=_GAP_S)

    async def reward(
        self, program_id: ProgramId, call_id: CallId, episode: Episode, *, timeout_s: float
    ) -> Reward:
        del program_id, call_id, episode, timeout_s
        return Reward(value=1.0, elapsed_s=0)

    async def move(self, program_id: ProgramId, rung: SandboxRung) -> Moved:
        del program_id
        return Moved(rung=rung, elapsed_s=0)

    async def release(self, program_id: ProgramId) -> None:
        del program_id


@dataclass
class _Scene:
    """What is seen of the run."""

    crew: Crew
    dispatcher: Dispatcher
    contexts: dict[str, list[int]]
    """What each program had sent and got, by the engines' sockets."""
    answers_s: dict[EngineId, float]
    """When each engine began to answer, the last time."""
    comes: bool = True
    """Whether programs follow those that have ended."""
    done: list[Trajectory] = field(default_factory=list[Trajectory])


@dataclass(frozen=True)
class _Kill:
    """What came of a kill.  Times by the loop's clock."""

    killed_s: float
    answers_s: float
    """When the process that was started in its place answered."""
    used_s: float
    """When the first program decoded there."""
    had: dict[str, list[int]]
    """Tokens that each program had when the engine was lost."""
    version: Version | None


def measure_fleet(tell: Tell, *, quick: bool) -> None:
    """Kill one of three engines under load, and see what is lost."""
    anyio.run(partial(_measure, tell, quick=quick))


async def _measure(tell: Tell, *, quick: bool) -> None:
    """Programs lost, tokens kept, and how soon the engine that was killed is used again."""
    with tempfile.TemporaryDirectory(prefix="sostenuto-fleet-") as place:
        model = await random_model(Path(place) / "model")
        async with TrainerClient() as trainer:
            await trainer.open(model, LearnerSettings(), seed=0, version=_V0)
            async with _manned(model, Path(place)) as scene:
                await scene.dispatcher.publish(await trainer.publish(_V1))
                await _killed_under_load(scene, tell, programs=12 if quick else 32)


async def _killed_under_load(scene: _Scene, tell: Tell, *, programs: int) -> None:
    seen: list[_Kill] = []
    async with anyio.create_task_group() as group:
        for number in range(programs):
            group.start_soon(_one_after_the_other, scene, number)
        while len(scene.contexts) < programs:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        seen.append(await _kill_and_wait(scene))
        scene.comes = False
    (kill,) = seen
    lost = sum(trajectory.outcome is not None for trajectory in scene.done)
    tell("engine_kill_programs", len(scene.done), "programs")
    tell("engine_kill_programs_lost", lost, "programs", "== 0")
    tell("engine_kill_tokens_kept", _share_kept(scene.done, kill.had), "share", "== 1")
    tell("engine_kill_back_after", kill.answers_s - kill.killed_s, "s")
    tell("engine_kill_used_after_return", kill.used_s - kill.answers_s, "s", "<= 2")
    right = kill.version == _V1 and _all_of(scene.done, _V1)
    tell("engine_kill_version_right", float(right), "bool", "== 1")


async def _kill_and_wait(scene: _Scene) -> _Kill:
    """Kill an engine, and wait until a program decodes there again."""
    killed_s, keeper = anyio.current_time(), await _kill_one(scene)
    had = {name: list(ids) for name, ids in scene.contexts.items()}
    while not _decoding(scene, keeper.source.id):  # noqa: ASYNC110
        await anyio.sleep(0.005)
    used_s, answers_s = anyio.current_time(), scene.answers_s[keeper.source.id]
    return _Kill(killed_s, answers_s, used_s, had, scene.dispatcher.serves(keeper.source.id))


async def _kill_one(scene: _Scene) -> Keeper:
    """Kill the process of an engine; the keeper of that engine, once it has seen it."""
    below = psutil.Process().children(recursive=True)
    process = next(process for process in below if _PACKAGE in process.cmdline())
    process.send_signal(signal.SIGKILL)
    while True:
        for keeper in scene.crew.keepers:
            if keeper.standing is not Standing.MEMBER:
                return keeper
        await anyio.sleep(0.001)


def _decoding(scene: _Scene, engine_id: EngineId) -> int:
    return scene.dispatcher.scheduler.snapshot().engines.get(engine_id, (0, 0))[1]


def _share_kept(done: list[Trajectory], had: dict[str, list[int]]) -> float:
    """Of the tokens that programs had: how many are where they were in the records."""
    records = {t.program_id: [id_ for span in t.spans() for id_ in span.token_ids.tolist()] for t in done}
    same = sum(
        sum(a == b for a, b in zip(ids, records[ProgramId(name)], strict=False)) for name, ids in had.items()
    )
    return same / sum(map(len, had.values()))


def _all_of(done: list[Trajectory], version: Version) -> bool:
    return all(v.version == version for t in done for span in t.spans() for v in span.versions or ())


async def _one_after_the_other(scene: _Scene, number: int) -> None:
    count = 0
    while scene.comes or not count:
        name = ProgramId(f"{number}.{count}")
        spec = ProgramSpec(
            id=name,
            group_id=GroupId(name),
            task_id=name,
            purpose=Purpose.EVALUATE,
            environment=EnvironmentRef(name="pauses", import_path="benchmarks.engines_fleet:_Pauses"),
            task={},
            limits=Limits(turns=_TURNS, turn_tokens=256, wall_s=600),
            seed=number * 1000 + count,
            environment_seed=number,
        )
        scene.done.append(await scene.dispatcher.run(spec))
        count += 1


@asynccontextmanager
async def _manned(model: Path, place: Path) -> AsyncGenerator[_Scene]:
    contexts, answers_s = dict[str, list[int]](), dict[EngineId, float]()

    def tap(request_id: str, sent: bytes, received: bytes) -> None:
        reply = GenerateReply.model_validate_json(received)
        asked = GenerateRequest.model_validate_json(sent).token_ids
        contexts[request_id.rpartition("/")[0]] = [*asked, *reply.token_ids]

    ground = Ground("fleet", model, _V0, EngineSettings(kv_tokens=16384, concurrency=16), place, place, tap)
    needs = Requirements("random", 512, 512, (), _V0)
    async with (
        open_crew(needs) as crew,
        open_dispatcher(SchedulerSettings(), {}, _Pauses(), _Words()) as dispatcher,
    ):
        sources = [source_of(EngineEntry(id=f"engine-{number}"), ground) for number in range(3)]
        await crew.begin(dispatcher, [_timed(source, answers_s) for source in sources])
        yield _Scene(crew, dispatcher, contexts, answers_s)


def _timed(source: Source, answers_s: dict[EngineId, float]) -> Source:
    """The source, noting when its engine begins to answer."""

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Opened]:
        async with source.open() as engine:
            answers_s[source.id] = anyio.current_time()
            yield engine

    return replace(source, open=opened)
