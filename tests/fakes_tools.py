"""Fakes of what the tool server is given: backend and hosts.  Run as a script, a server on them.

The environment named `Plain` has no sandbox, `Broken` cannot be loaded, `Stuck` never comes out of its reset.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

import anyio

from sostenuto.errors import (
    ConfigError,
    EnvironmentFailure,
    PathError,
    SandboxError,
    ToolServerError,
    Unsupported,
)
from sostenuto.sandbox.protocol import (
    Blueprint,
    Probe,
    Sandbox,
    SandboxUsage,
    ShellResult,
    Snapshot,
)
from sostenuto.tools.config import ServerConfig
from sostenuto.tools.cut import cut_middle
from sostenuto.tools.host import EnvironmentFacts, Host
from sostenuto.tools.process import serve
from sostenuto.tools.wire import (
    CallRequest,
    EnvironmentRef,
    Prepared,
    PrepareRequest,
    Reward,
    RewardRequest,
    ToolSchema,
)
from sostenuto.types import Message, ProgramId, ToolResult, ToolStatus

TOKEN = "a-token-for-tests-only"
SECRET = 'sk-"0123456789\\äbcdef'
FORM = EnvironmentRef(name="Form", import_path="tests:Form")


@dataclass
class FakeSandbox:
    name: str
    live: dict[str, "FakeSandbox"]
    files: dict[str, bytes]
    snapshots: set[str] = field(default_factory=set[str])
    stop_s: float = 0.0
    paused: bool = False

    def _check(self) -> None:
        if self.name not in self.live:
            raise SandboxError(f"sandbox {self.name} is gone")

    async def shell(self, command: str, *, timeout_s: float, output_bytes: int = 65536) -> ShellResult:
        self._check()
        if command.startswith("sleep "):
            with anyio.move_on_after(timeout_s) as scope:
                await anyio.sleep(float(command.split()[1]))
            return ShellResult(None if scope.cancelled_caught else 0, "")
        cut = cut_middle(command, output_bytes)
        return ShellResult(0, cut.text, cut.cut_bytes)

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, output_bytes: int = 65536
    ) -> ShellResult:
        return await self.shell(" ".join(argv), timeout_s=timeout_s, output_bytes=output_bytes)

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        self._check()
        if path not in self.files:
            raise PathError(f"no file {path}")
        return self.files[path][:max_bytes]

    async def write(self, path: str, data: bytes) -> None:
        self._check()
        self.files[path] = data

    async def upload(self, archive: bytes | IO[bytes], path: str = ".") -> None:
        self._check()
        self.files[f"{path}.tar"] = archive if isinstance(archive, bytes) else archive.read()

    async def download(self, path: str = ".", *, max_bytes: int = 64 << 20) -> bytes:
        return await self.read(f"{path}.tar")

    async def download_to(self, target: IO[bytes], path: str = ".", *, max_bytes: int) -> None:
        target.write(await self.download(path))

    async def reclaim(self) -> None:
        self._check()
        self.paused = True

    async def pause(self) -> None:
        self._check()
        self.paused = True

    async def resume(self) -> None:
        self._check()
        self.paused = False

    async def snapshot(self) -> Snapshot:
        self._check()
        self.snapshots.add(self.name)
        return Snapshot("fake", self.name, sum(map(len, self.files.values())))

    async def usage(self) -> SandboxUsage:
        self._check()
        return SandboxUsage(1 << 20, 1 << 20, 0.0, 1, sum(map(len, self.files.values())))

    async def is_quiet(self) -> bool:
        self._check()
        return True

    async def stop(self) -> None:
        await anyio.sleep(self.stop_s)
        self.live.pop(self.name, None)


@dataclass
class FakeBackend:
    """`live` holds the sandboxes that were started and not stopped."""

    start_s: float = 0.0
    stop_s: float = 0.0
    refusal: str = ""
    starting: int = 0
    most_starting: int = 0
    live: dict[str, FakeSandbox] = field(default_factory=dict[str, FakeSandbox])
    snapshots: set[str] = field(default_factory=set[str])

    @property
    def name(self) -> str:
        return "fake"

    async def probe(self) -> Probe:
        return Probe("fake", works=True, isolation="none")

    async def start(self, name: str, blueprint: Blueprint, *, snapshot: Snapshot | None = None) -> Sandbox:
        if self.refusal:
            raise ConfigError(self.refusal)
        self.starting += 1
        self.most_starting = max(self.most_starting, self.starting)
        try:
            await anyio.sleep(self.start_s)
        finally:
            self.starting -= 1
        assert name not in self.live
        self.live[name] = self.make(name, dict(blueprint.files))
        return self.live[name]

    def make(self, name: str, files: dict[str, bytes]) -> FakeSandbox:
        return FakeSandbox(name, self.live, files, self.snapshots, self.stop_s)

    async def forget(self, snapshot: Snapshot) -> None:
        self.snapshots.discard(snapshot.reference)


@dataclass
class FakeHost:
    """Its tools are the cases of `_tool`; `runs` counts their runs by arguments."""

    programs: set[str] = field(default_factory=set[str])
    runs: Counter[str] = field(default_factory=Counter[str])
    ended_calls: int = 0
    release_s: float = 0.0
    score_s: float = 0.0
    seeds: dict[str, int] = field(default_factory=dict[str, int])
    state: str = "null"
    """What `save` returns; empty: it refuses."""
    resumed: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])

    @property
    def alive(self) -> bool:
        return True

    async def prepare(
        self,
        program_id: ProgramId,
        request: PrepareRequest,
        sandbox: Sandbox | None,
        *,
        state: bytes | None = None,
    ) -> Prepared:
        self.programs.add(program_id)
        self.resumed += [(program_id, state)] if state is not None else []
        self.seeds[program_id] = request.seed
        await hop()
        if request.environment.name == "Stuck":
            await anyio.sleep_forever()
        if request.task.get("fail"):
            raise EnvironmentFailure(f"reset raised ValueError: {request.task['fail']}")
        message = Message("user", str(request.task.get("question", "?")))
        return Prepared(messages=(message,), tools=TOOLS, elapsed_s=0.0)

    async def save(self, program_id: ProgramId) -> bytes:
        await hop()
        if not self.state:
            raise Unsupported("it keeps too much in its object")
        return self.state.encode()

    async def call(self, program_id: ProgramId, request: CallRequest) -> ToolResult:
        if program_id not in self.programs:
            raise ToolServerError(f"host does not know {program_id}")
        self.runs[request.arguments] += 1
        try:
            return await self._tool(request)
        finally:
            self.ended_calls += 1

    async def _tool(self, request: CallRequest) -> ToolResult:
        match request.name:
            case "sleep" | "again":
                await anyio.sleep(float(request.arguments))
            case "secret":
                return ToolResult(ToolStatus.OK, f"token={SECRET}.")
            case "flood" | "small_flood":
                return ToolResult(ToolStatus.OK, "x" * int(request.arguments), cut_bytes=7)
            case "crash":
                raise EnvironmentFailure(f"tool crash raised KeyError: {SECRET}")
            case "bug":
                raise RuntimeError("the host itself is at fault")
            case _:
                pass
        return ToolResult(ToolStatus.OK, request.arguments)

    async def reward(self, program_id: ProgramId, request: RewardRequest) -> Reward:
        self.runs["reward"] += 1
        await hop()
        await anyio.sleep(self.score_s)
        value = request.episode.metrics.get("value", 1.0)
        return Reward(value=float("nan") if value < 0 else value, metrics={SECRET: 1.0}, elapsed_s=0.0)

    async def release(self, program_id: ProgramId) -> None:
        await anyio.sleep(self.release_s)
        self.programs.discard(program_id)


@dataclass
class FakeHosts:
    host: FakeHost = field(default_factory=FakeHost)
    described: Counter[str] = field(default_factory=Counter[str])

    @property
    def count(self) -> int:
        return 1

    async def describe(self, environment: EnvironmentRef) -> EnvironmentFacts:
        self.described[environment.name] += 1
        await hop()
        if environment.name == "Broken":
            raise ConfigError("environment Broken: tests:Broken has no method `reward`")
        blueprint = None if environment.name == "Plain" else Blueprint(files={"a.txt": b"hello"})
        return EnvironmentFacts(blueprint, TOOLS)

    async def choose(self, environment: EnvironmentRef) -> Host:
        await hop()
        return self.host


async def hop() -> None:
    """One turn of the event loop on a future, as an answer from another process would take."""
    event = anyio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    await event.wait()


TOOLS = (
    ToolSchema(name="echo", description="Repeat.", parameters={"type": "object"}, timeout_s=10.0),
    ToolSchema(name="small_flood", description="", parameters={}, timeout_s=10.0, output_bytes=100),
    ToolSchema(name="again", description="Sleep.", parameters={}, timeout_s=10.0, idempotent=True),
)


def config(**changes: object) -> ServerConfig:
    return ServerConfig.model_validate({"token": TOKEN, **changes})


async def main() -> None:
    given = ServerConfig.model_validate_json(sys.argv[1])
    await serve(given, FakeBackend(), FakeHosts(), ready=lambda url: print(url, flush=True))  # noqa: T201


if __name__ == "__main__":
    anyio.run(main)
