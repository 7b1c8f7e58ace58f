"""What the tool server adds to a command, and what a flood of output costs it."""

import shlex
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import anyio
import psutil
from pydantic import BaseModel

from benchmarks.figure import Tell
from sostenuto.envs.environment import Environment
from sostenuto.envs.registry import environment_ref
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.runtime.config import ToolServerSettings
from sostenuto.runtime.tool_process import LaunchedToolServer, launch_tool_server
from sostenuto.sandbox.bubblewrap import BubblewrapBackend
from sostenuto.sandbox.protocol import Blueprint
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.types import Episode, ProgramId

_TOGETHER = 100
_CALLS_EACH = 60
_ONE_BY_ONE = 300
_FLOOD_BYTES = 10 << 30


class Nothing(BaseModel):
    pass


class Bare(Environment[Nothing]):
    """A sandbox and nothing else."""

    sandbox = SandboxSpec(memory_bytes=256 << 20)

    async def reset(self, task: Nothing) -> str:
        return "go"

    async def reward(self, episode: Episode) -> float:
        return 0.0


def measure_http(tell: Tell, *, quick: bool) -> None:
    """With bubblewrap, or what else works here."""
    anyio.run(_measure, tell, quick)


@asynccontextmanager
async def _server() -> AsyncGenerator[tuple[LaunchedToolServer, Path]]:
    with tempfile.TemporaryDirectory(prefix="sostenuto-bench-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # noqa: ASYNC240 - at once
        root = folder / "sandboxes"
        async with launch_tool_server(ToolServerSettings(), sandbox_root=root, log=folder / "log") as server:
            yield server, folder


async def _measure(tell: Tell, quick: bool) -> None:
    count = 10 if quick else _TOGETHER
    programs = [ProgramId(f"p{number}") for number in range(count)]
    ref = environment_ref(Bare)
    async with _server() as (server, folder):
        await _prepare(server, ref, programs)
        await _one_by_one(tell, server, programs[0], folder)
        await _together(tell, server, programs)
        await _flood(tell, server, programs[0], _FLOOD_BYTES >> 5 if quick else _FLOOD_BYTES)


async def _prepare(server: LaunchedToolServer, ref: EnvironmentRef, programs: list[ProgramId]) -> None:
    async with anyio.create_task_group() as group:
        for program in programs:
            group.start_soon(_prepare_one, server, ref, program)


async def _prepare_one(server: LaunchedToolServer, ref: EnvironmentRef, program: ProgramId) -> None:
    await server.client.prepare(program, ref, {})


async def _one_by_one(tell: Tell, server: LaunchedToolServer, program: ProgramId, folder: Path) -> None:
    root = folder / "bare"
    root.mkdir(mode=0o711)
    sandbox = await BubblewrapBackend(root).start("bare", Blueprint())
    bare: list[float] = []
    through: list[float] = []
    try:
        for _ in range(_ONE_BY_ONE):
            began_s = time.perf_counter()
            await sandbox.shell("true", timeout_s=10)
            bare.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            await server.client.shell(program, "true")
            through.append(time.perf_counter() - began_s)
    finally:
        await sandbox.stop()
    tell("a trivial command in a sandbox without the server, p50", median(bare) * 1e3, "ms")
    tell("a trivial command through HTTP, p50", median(through) * 1e3, "ms", "<= 2")


async def _together(tell: Tell, server: LaunchedToolServer, programs: list[ProgramId]) -> None:
    async def use(program: ProgramId) -> None:
        for _ in range(_CALLS_EACH):
            await server.client.shell(program, "true")

    began_s = time.perf_counter()
    async with anyio.create_task_group() as group:
        for program in programs:
            group.start_soon(use, program)
    rate = len(programs) * _CALLS_EACH / (time.perf_counter() - began_s)
    tell(f"commands a second through HTTP over {len(programs)} sandboxes", rate, "1/s", ">= 1500")


async def _flood(tell: Tell, server: LaunchedToolServer, program: ProgramId, size: int) -> None:
    process = psutil.Process(server.pid)
    before = process.memory_info().rss
    peak, answered = before, 0
    command = f"head -c {size} /dev/zero | tr '\\0' {shlex.quote('x')}"
    began_s = time.perf_counter()
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            nonlocal peak
            while True:
                peak = max(peak, process.memory_info().rss)
                await anyio.sleep(0.02)

        group.start_soon(watch)
        answered = len((await server.client.shell(program, command, timeout_s=300)).output)
        group.cancel_scope.cancel()
    gib = size / (1 << 30)
    tell(f"memory that a flood of {gib:g} GiB costs the server", (peak - before) / (1 << 20), "MiB", "<= 64")
    tell(f"seconds until a flood of {gib:g} GiB is answered", time.perf_counter() - began_s, "s", "<= 300")
    tell("of it in the answer", answered / 1024, "KiB", "<= 65")
