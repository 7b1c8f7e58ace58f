"""The tool server under kill -9: programs that start, call and end while clients vanish, requests are
cancelled, and workers and the server itself are killed in their midst.

Afterwards nothing may be left: no process, mount, cgroup, workspace or result without owner; and no call may
have run twice.  Each server follows the one that was killed on the same state.  A program whose server was
killed goes on with the next one where it can, and its sandbox then has what each of its calls did, once.
"""

import json
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import anyio
import psutil
from anyio.abc import Process, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream
from pydantic import BaseModel, JsonValue

from benchmarks.outside import command_of, is_running, orphan_groups
from benchmarks.tools_journal import rows_of
from sostenuto.envs.environment import Environment
from sostenuto.envs.registry import environment_ref
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.errors import SostenutoError
from sostenuto.sandbox.docker.address import find_socket
from sostenuto.sandbox.docker.labels import ROOT
from sostenuto.sandbox.docker.typed import Daemon
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.config import ServerConfig
from sostenuto.tools.decorator import tool
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.types import CallId, Episode, ProgramId, SandboxRung, StopReason, ToolCall, ToolResult

Tell = Callable[[str, float, str, str | None], None]

TOKEN = "token-of-the-torture"
CLIENTS = 4
"""Cycles under way at the same time."""
LEASE_S = 1.0
IDLE_S = 0.1
"""After which a sandbox is snapshotted."""
KEPT_S = 5.0
"""Results and snapshots of a server that was killed."""
_TURNS = 4
_RUNGS = (*SandboxRung, SandboxRung.SNAPSHOTTED, SandboxRung.SNAPSHOTTED)
_RESTS = 0.3
"""How often a program waits for a while between two calls."""
_LIVES = 4
"""Servers that one program goes on with."""
_EPISODE = Episode(messages=(), stop_reason=StopReason.ANSWERED)


class Background(BaseModel):
    seconds: float
    """How long processes sleep that it leaves in its sandbox, and are found by; 0: it leaves none."""


class Torn(Environment[Background]):
    """Starts what has to be ended with it, and leaves a mark outside for each call that runs."""

    sandbox = SandboxSpec()

    async def reset(self, task: Background) -> str:
        """Leave processes in the sandbox, one of them in a session of its own; or none."""
        if task.seconds:
            await self.sandbox.shell(f"sleep {task.seconds} & setsid sleep {task.seconds} & echo started")
        return "go"

    @tool(timeout_s=10)
    async def mark(self, path: str, command: str) -> str:
        """Add a line to a file outside of the sandbox and run a command."""
        _mark(Path(path))
        return await self.sandbox.shell(command)

    async def reward(self, episode: Episode) -> float:
        """Anything."""
        return 1.0


def _mark(path: Path) -> None:
    with path.open("a") as file:
        file.write("x\n")


@dataclass(slots=True)
class Torture:
    """One run: its folder, its servers, and what was seen."""

    folder: Path
    settings: Mapping[str, JsonValue]
    dice: random.Random
    seen: Counter[str] = field(default_factory=Counter[str])
    processes: set[psutil.Process] = field(default_factory=set[psutil.Process])
    """Everything that was seen below a server."""
    server: psutil.Process | None = None
    url: str = ""
    up: anyio.Event = field(default_factory=anyio.Event)
    ending: bool = False

    @property
    def sleep_s(self) -> float:
        return 50_000 + int.from_bytes(self.folder.name.encode()[-4:]) % 1_000_000_007 / 1000

    async def serve(self) -> None:
        """One server after the other, until one ends because it was asked to."""
        while not self.ending:
            async with self._started() as process:
                code = await process.wait()
            self.up = anyio.Event()
            self.seen["servers"] += 1
            if code not in {0, -signal.SIGKILL}:
                raise RuntimeError(f"a tool server ended with {code}: {self._log.read_text()[-2000:]}")

    @property
    def _log(self) -> Path:
        return self.folder / "log"

    @asynccontextmanager
    async def _started(self) -> AsyncGenerator[Process]:
        server = ServerConfig(
            token=TOKEN, lease_s=LEASE_S, results_kept_s=KEPT_S, log_level="warning",
            snapshot_idle_s=IDLE_S,
            sandbox_root=str(self.folder / "sandboxes"), state_dir=self.folder / "state",
        )  # fmt: skip
        orders = {
            "server": server.model_dump(mode="json"),
            "settings": dict(self.settings),
            "import_paths": [str(Path(__file__).parent.parent), *filter(None, sys.path)],
        }
        with self._log.open("ab") as log:
            process = await anyio.open_process(
                [sys.executable, "-m", "sostenuto.runtime.tool_process"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip
        async with process:
            assert process.stdin is not None
            assert process.stdout is not None
            await process.stdin.send(json.dumps(orders).encode())
            await process.stdin.aclose()
            word = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 1 << 16)
            self.url = json.loads(word)["url"]
            self.server = psutil.Process(process.pid)
            self.up.set()
            yield process

    def look(self) -> list[psutil.Process]:
        """What lives below the server now; remembered for the end."""
        if self.server is None:
            return []
        with suppress(psutil.NoSuchProcess):
            below = self.server.children(recursive=True)
            self.processes |= {self.server, *below}
            return below
        return []

    async def kill_server(self) -> None:
        await self.up.wait()
        self.look()
        assert self.server is not None
        self.seen["server_kills"] += 1
        with suppress(psutil.NoSuchProcess):
            self.server.kill()

    async def kill_worker(self) -> None:
        while not (workers := self._workers()):  # noqa: ASYNC110
            await anyio.sleep(0.01)
        self.seen["worker_kills"] += 1
        with suppress(psutil.NoSuchProcess):
            self.dice.choice(workers).kill()

    def _workers(self) -> list[psutil.Process]:
        return [process for process in self.look() if "sostenuto.envs.worker" in command_of(process)]


_BLOWS = {5: Torture.kill_server, 1: Torture.kill_worker, 9: Torture.kill_worker}
"""What is killed in which of sixteen cycles; their programs stay for it."""


async def torture(
    tell: Tell, *, cycles: int, settings: Mapping[str, JsonValue] = MappingProxyType({}), seed: int = 7
) -> None:
    """Run the cycles against servers with these settings, and tell what is left of them."""
    with _folder() as folder:
        run = Torture(folder, {"hosts": 2, **settings}, random.Random(seed))
        started_s = anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(run.serve)
            await _all_cycles(run, cycles)
            await _settle(run)
        tell("torture_s", anyio.current_time() - started_s, "s", None)
        _tell_all(tell, run)


@contextmanager
def _folder() -> Generator[Path]:
    """One that sandboxes can enter, which may have a user of their own."""
    with tempfile.TemporaryDirectory(prefix="sostenuto-torture-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        (folder / "marks").mkdir()
        yield folder


async def _all_cycles(run: Torture, cycles: int) -> None:
    numbers = iter(range(cycles))

    async def client() -> None:
        for number in numbers:
            await _cycle(run, number)

    async with anyio.create_task_group() as group:
        for _ in range(CLIENTS):
            group.start_soon(client)


async def _cycle(run: Torture, number: int) -> None:
    """One program, of an owner of its own, which half of the times fences the one before it."""
    await run.up.wait()
    program = _Program(run, number, f"fencing/{number}" if number % 8 == 0 else f"client-{number}")
    fate = "finish" if number % 16 in _BLOWS else run.dice.choice(("finish", "finish", "vanish", "cancel"))
    life_s = 30.0 if fate == "finish" else run.dice.uniform(0.0, 1.0)
    with anyio.move_on_after(life_s):
        for _ in range(_LIVES):
            await run.up.wait()
            if await program.lives():
                break
    if fate == "cancel":
        async with program.client() as client:
            await _quietly(run, lambda: client.release(program.id))
    run.seen[fate] += 1


async def _blow(run: Torture, number: int, moment: int) -> None:
    """Kill what it is this cycle's turn to kill: while it is prepared, or in one of its calls."""
    blow = _BLOWS.get(number % 16)
    if blow is not None and moment == number // 16 % 5:
        # One that has begun falls, whatever becomes of the program.
        with anyio.move_on_after(10, shield=True):
            await anyio.sleep(run.dice.uniform(0.0, 0.3))
            await blow(run)


async def _quietly(run: Torture, work: Callable[[], Awaitable[None]]) -> bool:
    """Whether it was done.  What dies here is expected to; errors that are none of ours are not."""
    try:
        await work()
    except SostenutoError as error:
        run.seen[type(error).__name__] += 1
        return False
    return True


class _Program:
    """From its preparation to its release, over the deaths of its servers."""

    def __init__(self, run: Torture, number: int, owner: str) -> None:
        self.id = ProgramId(f"p{number}")
        self._run = run
        self._number = number
        self._owner = owner
        # Only a sandbox in which nothing runs is snapshotted.
        self._task: dict[str, JsonValue] = {"seconds": run.sleep_s if number % 2 else 0.0}
        self._seen: list[str] = []
        self._server: psutil.Process | None = None
        """Where it was prepared, or went on."""

    def client(self) -> ToolServerClient:
        """Of the server that runs now; more than a connection's loss is waited for."""
        return ToolServerClient(self._run.url, TOKEN, self._owner, lease_s=LEASE_S, repeat_s=0.2, slack_s=15)

    async def lives(self) -> bool:
        """With one server, from where the last one left it; whether it is over."""
        over = True
        async with self.client() as client, anyio.create_task_group() as group:
            group.start_soon(_quietly, self._run, client.heartbeats)
            over = not await _quietly(self._run, lambda: self._begins(client, group))
            over = over or await _quietly(self._run, lambda: self._goes_on(client, group))
            group.cancel_scope.cancel()
        return over

    async def _begins(self, client: ToolServerClient, group: TaskGroup) -> None:
        ref: EnvironmentRef = environment_ref(Torn)
        before, self._server = self._server, self._run.server
        if before is None:
            group.start_soon(_blow, self._run, self._number, 0)
            await client.prepare(self.id, ref, self._task, timeout_s=20)
        else:
            await client.resume(self.id, ref, self._task, seen=self._seen, timeout_s=20)
        self._run.look()
        if before not in {None, self._server}:
            self._run.seen["went_on"] += 1
            self._compare((await client.read(self.id, "log")).decode().split() if self._marks() else [])

    def _marks(self) -> dict[str, int]:
        """How often each call has run, as it left outside of the sandbox."""
        folder = self._run.folder / "marks"
        return {path.suffix[1:]: path.read_text().count("x") for path in folder.glob(f"{self._number}.*")}

    def _compare(self, lines: list[str]) -> None:
        """Its sandbox has what each call did, once."""
        self._run.seen["effects_wrong"] += Counter(lines) != Counter(self._marks())

    async def _goes_on(self, client: ToolServerClient, group: TaskGroup) -> None:
        run = self._run
        for turn in range(len(self._seen), _TURNS):
            group.start_soon(_blow, run, self._number, turn + 1)
            path = run.folder / "marks" / f"{self._number}.{turn}"
            command = f"echo {turn} >>log; sleep {run.dice.uniform(0.0, 0.3):.3f}; echo done"
            call = ToolCall("mark", json.dumps({"path": str(path), "command": command}))
            await _call(run, client, self.id, CallId(str(turn)), call)
            self._seen.append(str(turn))
            moved = await client.move(self.id, run.dice.choice(_RUNGS))
            run.seen[moved.rung.value] += 1
            if moved.rung is SandboxRung.SNAPSHOTTED or run.dice.random() < _RESTS:
                await anyio.sleep(run.dice.uniform(0.0, 1.0))
        await client.reward(self.id, CallId("reward"), _EPISODE, timeout_s=10)
        await client.release(self.id)
        run.seen["completed"] += 1


async def _call(
    run: Torture, client: ToolServerClient, program: ProgramId, call_id: CallId, call: ToolCall
) -> None:
    """Call, and ask again for what it came to: under the same id nothing runs twice, whoever answers."""
    first: ToolResult | None = None
    try:
        first = await client.call(program, call_id, call, timeout_s=10)
    finally:
        if first is None and run.dice.random() < 0.5:
            with anyio.move_on_after(5, shield=True):
                await run.up.wait()
                await _quietly(run, lambda: _ask_again(run, program, call_id, call))
    again = await client.call(program, call_id, call, timeout_s=10)
    if again != first:
        run.seen["answers_changed"] += 1


async def _ask_again(run: Torture, program: ProgramId, call_id: CallId, call: ToolCall) -> None:
    async with ToolServerClient(run.url, TOKEN, "anyone", repeat_s=0.2, slack_s=3) as client:
        await client.call(program, call_id, call, timeout_s=3)
        run.seen["answered_later"] += 1


async def _settle(run: Torture) -> None:
    """Let every lease end, wait until the living server's journal holds nothing, and end it."""
    with anyio.fail_after(60):
        await run.up.wait()
        async with ToolServerClient(run.url, TOKEN, "watcher") as client:
            while rows_of(run.folder) or (await client.state()).programs:  # noqa: ASYNC110
                await anyio.sleep(0.1)
    run.look()
    run.ending = True
    assert run.server is not None
    run.server.terminate()


def _tell_all(tell: Tell, run: Torture) -> None:
    sleep = str(run.sleep_s)
    below = [process for process in run.processes if is_running(process)]
    strays = [process for process in psutil.process_iter() if sleep in command_of(process)]
    marks = [path.read_text().count("x") for path in (run.folder / "marks").iterdir()]
    servers = {str(process.pid) for process in run.processes}
    for name in (
        "completed",
        "server_kills",
        "worker_kills",
        "answered_later",
        "OutcomeUnknown",
        "snapshotted",
        "went_on",
    ):
        tell(f"torture_{name.lower()}", run.seen[name], "times", None)
    tell("torture_calls", len(marks), "calls", None)
    tell("torture_ran_twice", sum(mark > 1 for mark in marks), "calls", "== 0")
    tell("torture_effects_wrong", run.seen["effects_wrong"], "programs", "== 0")
    tell("torture_answers_changed", run.seen["answers_changed"], "calls", "== 0")
    tell("left_processes", len({*below, *strays}), "processes", "== 0")
    tell("left_mounts", Path("/proc/self/mounts").read_text().count(str(run.folder)), "mounts", "== 0")
    tell("left_cgroups", len(orphan_groups(servers)), "groups", "== 0")
    tell("left_workspaces", len(list((run.folder / "sandboxes").iterdir())), "folders", "== 0")
    tell("left_rows", rows_of(run.folder), "rows", "== 0")
    if run.settings.get("sandbox") == "docker":
        daemon, label = Daemon(find_socket(None)), f"{ROOT}={run.folder / 'sandboxes'}"
        tell("left_containers", len(daemon.containers(label)), "containers", "== 0")
        tell("left_images", len(daemon.images(label)), "images", "== 0")
