"""The ladder of KV, from the pool to the lower tier and out of it: real scheduler, dispatcher and core."""

from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import pytest

from engine_models import TOKENIZER_SIZE, make_core, make_folder, prompt
from fakes import FakeRenderer, FakeTools, spec
from sostenuto.errors import EngineError
from sostenuto.records import Producer, Trajectory
from sostenuto.runtime.dispatcher import open_dispatcher
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.wire import (
    Capabilities,
    CommitReply,
    CommitRequest,
    GenerateReply,
    GenerateRequest,
    Load,
    PauseMode,
    ScoreReply,
    ScoreRequest,
    Spans,
    tell,
)
from sostenuto.runtime.rendering.renderer import Piece, Turn
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.tools.wire import EnvironmentRef, Prepared, ToolSchema
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import EngineId, Limits, Message, ProgramId, StopReason, ToolCall

pytestmark = pytest.mark.looptime

E0 = EngineId("e0")
PROMPT_TOKENS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("llama"))


class CoreEngine:
    """Implements `Engine` over a core in this process; a step takes a hundredth of a virtual second."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.cached: dict[str, list[int]] = {}
        """By program, of each of its turns."""
        self.calls: list[tuple[str, str]] = []

    async def capabilities(self) -> Capabilities:
        return self.core.capabilities()

    async def load(self) -> Load:
        return self.core.load()

    async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
        answers: list[GenerateReply | Refusal] = []
        self.core.submit(request, answers.append)
        await self._run_until(lambda: bool(answers))
        (reply,) = answers
        if isinstance(reply, Refusal):
            raise EngineError(str(reply))
        self.cached.setdefault(request.program_id, []).append(reply.cached_tokens)
        tell(reply, spans)
        return reply

    async def _run_until(self, over: Callable[[], bool]) -> None:
        while not over():
            self.core.step()
            await anyio.sleep(0.01)

    async def offload(self, program_id: ProgramId) -> None:
        self.calls.append(("offload", program_id))
        self.core.offload(program_id)

    async def restore(self, program_id: ProgramId) -> None:
        self.core.restore(program_id)

    async def release(self, program_id: ProgramId) -> None:
        self.calls.append(("release", program_id))
        self.core.release(program_id)

    async def abort(self, request_id: str) -> None:
        self.core.abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        self.core.pause(mode, lambda _: None)

    async def resume(self) -> None:
        self.core.resume()

    async def score(self, request: ScoreRequest) -> ScoreReply:
        raise NotImplementedError

    async def prepare_update(self, manifest: Manifest) -> None:
        raise NotImplementedError

    async def commit_update(self, request: CommitRequest) -> CommitReply:
        raise NotImplementedError

    async def abandon_update(self, version: str) -> None:
        raise NotImplementedError

    async def flush(self) -> None:
        self.core.flush()


class OneToken(FakeRenderer):
    """Every turn is over with its first token; the first `calling` turns of all call a tool."""

    stop_token_ids = tuple(range(TOKENIZER_SIZE))

    def __init__(self, calling: int) -> None:
        self.calling = calling

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        del tools
        return [Piece(Producer.USER, prompt(PROMPT_TOKENS, seed=ord(messages[0].content)))]

    def parse(self, token_ids: Sequence[int], *, finished: bool, tools: Sequence[ToolSchema] = ()) -> Turn:
        del token_ids, finished, tools
        self.calling -= 1
        return Turn(Message("assistant", "", (ToolCall("look", ""),) if self.calling >= 0 else ()))

    def extend(
        self, before: Sequence[Message], turn: Message, sampled_ids: Sequence[int], *,
        context_ids: Sequence[int], new: Sequence[Message], tools: Sequence[ToolSchema],
    ):  # fmt: skip
        del new
        result = (Message("tool", "\x05\x06"),)
        return super().extend(before, turn, sampled_ids, context_ids=context_ids, new=result, tools=tools)


class Named(FakeTools):
    """A program's prompt is its name."""

    async def prepare(
        self, program_id: ProgramId, environment: EnvironmentRef, task: object, *, seed: int, timeout_s: float
    ) -> Prepared:  # fmt: skip
        self.prompt = program_id
        return await super().prepare(program_id, environment, {}, seed=seed, timeout_s=timeout_s)


async def run(engine: CoreEngine, names: str, *, calling: int) -> dict[str, Trajectory]:
    """Run programs that begin five seconds apart, with tool calls of a hundred."""
    done: dict[str, Trajectory] = {}
    tools = Named(call_s=100.0)
    async with open_dispatcher(SchedulerSettings(), {E0: engine}, tools, OneToken(calling)) as dispatcher:

        async def drive(name: str) -> None:
            done[name] = await dispatcher.run(spec(name, limits=Limits(turn_tokens=5, wall_s=10_000)))

        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(drive, name)
                await anyio.sleep(5)
    return done


def engine_with(folder: Path, place: Path, *, lower_tokens: int) -> CoreEngine:
    """The pool has room for one program."""
    return CoreEngine(make_core(folder, kv_tokens=100, lower_tokens=lower_tokens, lower_folder=place))


async def test_a_program_that_acts_is_offloaded_for_another_and_finds_its_kv_again(
    folder: Path, tmp_path: Path
):
    engine = engine_with(folder, tmp_path, lower_tokens=160)
    done = await run(engine, "ab", calling=1)
    assert {t.stop_reason for t in done.values()} == {StopReason.ANSWERED}
    assert engine.calls[0] == ("offload", "a")
    assert engine.cached == {"a": [0, PROMPT_TOKENS], "b": [0]}
    assert engine.core.load().used_kv_tokens == engine.core.load().lower_kv_tokens == 0


async def test_who_was_offloaded_first_is_dropped_when_the_lower_tier_is_full(folder: Path, tmp_path: Path):
    engine = engine_with(folder, tmp_path, lower_tokens=80)
    done = await run(engine, "abc", calling=2)
    assert {t.stop_reason for t in done.values()} == {StopReason.ANSWERED}
    assert engine.calls[:3] == [("offload", "a"), ("release", "a"), ("offload", "b")]
    assert engine.cached == {"a": [0, 0], "b": [0, PROMPT_TOKENS], "c": [0]}


async def test_without_a_lower_tier_the_kv_is_dropped_at_once(folder: Path, tmp_path: Path):
    engine = engine_with(folder, tmp_path, lower_tokens=0)
    await run(engine, "ab", calling=1)
    assert not [call for call, _ in engine.calls if call == "offload"]
    assert engine.cached == {"a": [0, 0], "b": [0]}
