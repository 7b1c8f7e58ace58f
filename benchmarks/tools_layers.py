"""What environments with set-up commands cost: disk of many programs over few environments, and a start."""

import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import anyio
from anyio import to_thread
from pydantic import BaseModel

from benchmarks.figure import Tell
from sostenuto.envs.environment import Environment
from sostenuto.envs.registry import environment_ref
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.runtime.config import ToolServerSettings
from sostenuto.runtime.tool_process import LaunchedToolServer, launch_tool_server
from sostenuto.sandbox.folders import SNAPSHOT, read_record
from sostenuto.sandbox.usage import disk_bytes
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.types import Episode, ProgramId

_PROGRAMS = 500
_ENVIRONMENTS = 20
_AT_ONCE = 25
_ROUNDS = 30
_SETUP = ("head -c 4194304 /dev/urandom >made",)
_USE = "head -c 262144 /dev/urandom >own; cat made >/dev/null; sleep 0.2"
_SAMPLE_S = 0.05


class Nothing(BaseModel):
    pass


class Bare(Environment[Nothing]):
    """Base of what is measured; each has a template and, or not, set-up commands."""

    async def reset(self, task: Nothing) -> str:
        return "go"

    async def reward(self, episode: Episode) -> float:
        return 0.0


def measure_layers(tell: Tell, *, quick: bool) -> None:
    """With bubblewrap, or what else works here; templates of 100 files, set-ups that make 4 MiB."""
    anyio.run(_measure, tell, quick)


async def _measure(tell: Tell, quick: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="sostenuto-bench-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # noqa: ASYNC240 - at once
        count = 4 if quick else _ENVIRONMENTS
        templates = [_template(folder / f"template{number}") for number in range(count)]
        root = folder / "sandboxes"
        async with launch_tool_server(ToolServerSettings(), sandbox_root=root, log=folder / "log") as server:
            programs = 40 if quick else _PROGRAMS
            await _disk(tell, server, root, [_environment(one, _SETUP) for one in templates], programs)
            await _starts(tell, server, templates[0], rounds=5 if quick else _ROUNDS)


def _template(folder: Path) -> Path:
    folder.mkdir()
    for number in range(100):
        (folder / f"f{number}").write_text("x" * 4000)
    return folder


def _environment(template: Path, setup: tuple[str, ...]) -> EnvironmentRef:
    spec = SandboxSpec(template=str(template), setup=setup, health="test -f f0")
    return environment_ref(type(f"Over{template.name}", (Bare,), {"sandbox": spec, "__module__": "__main__"}))


async def _disk(
    tell: Tell, server: LaunchedToolServer, root: Path, environments: list[EnvironmentRef], programs: int
) -> None:
    places = anyio.CapacityLimiter(_AT_ONCE)

    async def live(number: int) -> None:
        program = ProgramId(f"p{number}")
        async with places:
            await server.client.prepare(program, environments[number % len(environments)], {})
            await server.client.shell(program, _USE)
            await server.client.release(program)

    async with _sampled(root) as disk, anyio.create_task_group() as group:
        for number in range(programs):
            group.start_soon(live, number)
    state = await server.client.state()
    what = f"{programs} programs over {len(environments)} environments"
    # Few environments are all built at once, and then there is as much of builders as of layers.
    target = "<= 1.3" if len(environments) == _ENVIRONMENTS else None
    tell(f"{what}: peak disk, by layers and live workspaces", disk.ratio, "", target)
    tell(f"{what}: peak disk", disk.all_bytes / (1 << 20), "MiB")
    tell(f"{what}: set-ups that ran", state.counters["layers_built"], "", f"== {len(environments)}")


class _Disk:
    """The most that was seen, and the most of it that had to be."""

    all_bytes = 0
    needed_bytes = 0

    @property
    def ratio(self) -> float:
        return self.all_bytes / self.needed_bytes

    def look(self, root: Path) -> None:
        everything = needed = 0
        for path in root.iterdir():
            size = disk_bytes(path)
            everything += size
            is_live = str(read_record(path).get("name", "")).startswith("p")
            needed += size if SNAPSHOT.fullmatch(path.name) else disk_bytes(path / "workspace") * is_live
        self.all_bytes = max(self.all_bytes, everything)
        self.needed_bytes = max(self.needed_bytes, needed)


@asynccontextmanager
async def _sampled(root: Path) -> AsyncGenerator[_Disk]:
    disk = _Disk()

    async def watch() -> None:
        while True:
            await to_thread.run_sync(disk.look, root)
            await anyio.sleep(_SAMPLE_S)

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        yield disk
        group.cancel_scope.cancel()


async def _starts(tell: Tell, server: LaunchedToolServer, template: Path, rounds: int) -> None:
    """One at a time; the first of each kind is not counted."""
    for what, setup in (("without set-up commands", ()), ("over the layer of its set-up", _SETUP)):
        environment = _environment(template, setup)
        took_ms: list[float] = []
        for number in range(rounds + 1):
            program = ProgramId(f"{len(setup)}-{number}")
            began_s = time.perf_counter()
            await server.client.prepare(program, environment, {})
            took_ms.append((time.perf_counter() - began_s) * 1e3)
            await server.client.release(program)
        tell(f"prepare {what}, p50", median(took_ms[1:]), "ms")
