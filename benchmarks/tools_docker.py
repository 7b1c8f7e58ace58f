"""What the docker backend costs, beside the docker command by hand.

Needs a daemon and SOSTENUTO_DOCKER_IMAGE, as `.ci/docker` provides; without, it says so and measures nothing.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.to_thread
import psutil

from benchmarks.figure import Tell
from benchmarks.tools_http import Nothing
from sostenuto.envs.environment import Environment
from sostenuto.envs.registry import environment_ref
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.runtime.config import DockerSection, ToolServerSettings
from sostenuto.runtime.tool_process import launch_tool_server
from sostenuto.sandbox.docker.backend import DockerBackend, DockerSettings
from sostenuto.sandbox.protocol import Blueprint, Sandbox
from sostenuto.types import Episode, ProgramId

_RUN = (
    "docker", "run", "--init", "--network", "none", "--memory", "1g", "--memory-swap", "1g",
    "--pids-limit", "136", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
    "--log-driver", "none", "--tmpfs", "/tmp",
)  # fmt: skip
_TEMPLATE_FILES = 2000
_MIB = 1 << 20


def measure_docker(tell: Tell, *, quick: bool) -> None:
    """Starts, commands, pauses and memory of containers."""
    image = os.environ.get("SOSTENUTO_DOCKER_IMAGE")
    if image is None:
        print("docker: SOSTENUTO_DOCKER_IMAGE names no image; not measured", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(_measure, tell, Path(folder), image, 3 if quick else 15)


async def _measure(tell: Tell, folder: Path, image: str, count: int) -> None:
    template = folder / "template"
    template.mkdir()
    for number in range(_TEMPLATE_FILES):
        (template / str(number)).write_text("x" * 100)
    backend = DockerBackend(folder / "root", DockerSettings(image=image))
    blueprint = Blueprint(str(template))
    await backend.prepare(blueprint)
    await _cold(tell, backend, image, count)
    await _warm(tell, folder, template, image, count)
    await _commands(tell, backend, image, count)
    await _together(tell, backend)


async def _cold(tell: Tell, backend: DockerBackend, image: str, count: int) -> None:
    await backend.prepare(Blueprint())
    ours: list[float] = []
    by_hand: list[float] = []
    for _ in range(count):  # in turns, so that both meet the same load
        by_hand.append(await anyio.to_thread.run_sync(_run_by_hand, image))
        began_s = time.perf_counter()
        sandbox = await backend.start("cold", Blueprint())
        await _echo(sandbox)
        ours.append(time.perf_counter() - began_s)
        await sandbox.stop()
    tell("docker run by hand, first output, p50", _ms(by_hand), "ms")
    tell("docker, cold start to the first command's result, p50", _ms(ours), "ms")
    tell("docker, cold start against docker run", _ms(ours) / _ms(by_hand), "x", "<= 1.2")


def _run_by_hand(image: str) -> float:
    began_s = time.perf_counter()
    words = [*_RUN, "--rm", "-i", image, "sh", "-c", "echo up; exec cat >/dev/null"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return time.perf_counter() - began_s


async def _warm(tell: Tell, folder: Path, template: Path, image: str, count: int) -> None:
    """Through a tool server, whose pool it is."""

    class Templated(Environment[Nothing]):
        sandbox = SandboxSpec(template=str(template))

        async def reset(self, task: Nothing) -> str:
            return await self.sandbox.shell("echo up")

        async def reward(self, episode: Episode) -> float:
            return 0.0

    taken: list[float] = []
    settings = ToolServerSettings(sandbox="docker", docker=DockerSection(image=image), warm=2)
    root = folder / "served"
    async with launch_tool_server(settings, sandbox_root=root, log=folder / "log") as server:
        client, ref = server.client, environment_ref(Templated)
        for number in range(count + 1):
            program = ProgramId(f"p{number}")
            began_s = time.perf_counter()
            await client.prepare(program, ref, {}, timeout_s=120)
            taken.append(time.perf_counter() - began_s)
            await client.release(program)
            while len((await client.state()).warm) < 2:  # noqa: ASYNC110 - the pool tells nobody
                await anyio.sleep(0.05)
    name = "docker, warm, a program prepared over 2,000 files through HTTP, p50"
    tell(name, _ms(taken[1:]), "ms", "<= 60")


async def _commands(tell: Tell, backend: DockerBackend, image: str, count: int) -> None:
    sandbox = await backend.start("measured", Blueprint(files={"file": b"x" * 1000}))
    name = f"sostenuto-bench-{os.getpid()}"
    await _docker(*_RUN, "-d", "--name", name, image, "sleep", "1000")
    try:
        shell = await _p50(count * 10, lambda: _echo(sandbox))
        by_hand = await _p50(count, lambda: _docker("docker", "exec", name, "echo", "up"))
        tell("docker, a shell command, p50", shell, "ms")
        tell("docker exec by hand, p50", by_hand, "ms")
        tell("docker exec against a shell command", by_hand / shell, "x", ">= 20")
        program = await _p50(count, lambda: sandbox.exec(["true"], timeout_s=20))
        tell("docker, a program beside the shell, p50", program, "ms")
        tell("docker, a file of 1 kB read, p50", await _p50(count, lambda: sandbox.read("file")), "ms")
        await _pauses(tell, sandbox, count)
        await _flood(tell, sandbox)
    finally:
        await _docker("docker", "rm", "-f", name)
        await sandbox.stop()


async def _pauses(tell: Tell, sandbox: Sandbox, count: int) -> None:
    paused: list[float] = []
    resumed: list[float] = []
    for _ in range(count):
        began_s = time.perf_counter()
        await sandbox.pause()
        paused.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        await sandbox.resume()
        resumed.append(time.perf_counter() - began_s)
    tell("docker, pause, p50", _ms(paused), "ms", "<= 60")
    tell("docker, resume, p50", _ms(resumed), "ms")


async def _flood(tell: Tell, sandbox: Sandbox) -> None:
    process = psutil.Process()
    before, began_s = process.memory_info().rss, time.perf_counter()
    await sandbox.shell("dd if=/dev/zero bs=1M count=10240", timeout_s=5)
    grown = max(0, process.memory_info().rss - before)
    tell("docker, memory that a flood of 10 GB costs", grown / _MIB, "MiB", "<= 64")
    tell("docker, a flood of 10 GB with a deadline of 5 s", time.perf_counter() - began_s, "s", "<= 6")


async def _together(tell: Tell, backend: DockerBackend) -> None:
    before = psutil.virtual_memory().available
    async with AsyncExitStack() as stack:
        began_s = time.perf_counter()
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(_start, backend, f"s{number}", stack)
        tell("docker, 20 started at once", time.perf_counter() - began_s, "s")
        grown = before - psutil.virtual_memory().available
        tell("docker, memory of an idle container with its shim", grown / 20 / _MIB, "MiB")


async def _start(backend: DockerBackend, name: str, stack: AsyncExitStack) -> None:
    sandbox = await backend.start(name, Blueprint())
    stack.push_async_callback(sandbox.stop)
    await _echo(sandbox)


async def _echo(sandbox: Sandbox) -> None:
    result = await sandbox.shell("echo up", timeout_s=20)
    assert result.output == "up\n", result


async def _docker(*words: str) -> None:
    await anyio.run_process(words)


async def _p50(count: int, use: Callable[[], Awaitable[object]]) -> float:
    taken: list[float] = []
    for _ in range(count):
        began_s = time.perf_counter()
        await use()
        taken.append(time.perf_counter() - began_s)
    return _ms(taken)


def _ms(taken_s: list[float]) -> float:
    return statistics.median(taken_s) * 1e3
