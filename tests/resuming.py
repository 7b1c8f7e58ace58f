"""Environments that go on after the death of their tool server, or do not, and servers for them."""

import os
import sqlite3
import subprocess
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import anyio
from pydantic import BaseModel, JsonValue

from sandboxes import left_processes
from sostenuto.envs.environment import Environment
from sostenuto.envs.registry import environment_ref
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.decorator import tool
from sostenuto.tools.wire import Moved
from sostenuto.types import CallId, Episode, ProgramId, SandboxRung, StopReason, ToolCall
from test_tools_serve import TOKEN, VARIABLE, served

P = ProgramId("p")
EPISODE = Episode(messages=(), stop_reason=StopReason.ANSWERED)
TASK: dict[str, JsonValue] = {"word": "first"}
HERE = str(Path(__file__).parent)


class Note(BaseModel):
    word: str


class Notes(Environment[Note]):
    """Has all its state in its sandbox."""

    sandbox = SandboxSpec(files={"log": "begun\n"})

    async def reset(self, task: Note) -> str:
        await self.sandbox.shell(f"echo {task.word} >>log; mkdir sub; cd sub; export NAME=kept")
        return "go"

    @tool(timeout_s=20)
    async def add(self, line: str) -> str:
        """Add a line, and show them all."""
        return await self.sandbox.shell(f"echo {line} >>../log; tr '\\n' ' ' <../log; echo $NAME")

    @tool(timeout_s=20)
    async def wait(self, seconds: float) -> str:
        """Do not touch the sandbox."""
        await anyio.sleep(seconds)
        return "waited"

    async def reward(self, episode: Episode) -> float:
        """How many lines there are."""
        return float((await self.sandbox.read("log")).count("\n"))


class Counting(Notes):
    """Keeps something in its object, and says nothing of that."""

    async def reset(self, task: Note) -> str:
        self.count = 10
        return await super().reset(task)

    @tool(timeout_s=20)
    async def next(self) -> str:
        """Count."""
        self.count += 1
        return str(self.count)


class Saving(Counting):
    """Saves what it keeps."""

    def save(self) -> JsonValue:
        return {"count": self.count}

    async def resume(self, state: JsonValue) -> None:
        assert isinstance(state, dict)
        assert isinstance(state["count"], int)
        self.count = state["count"]
        await self.sandbox.write("resumed", self.task.word)


class Failing(Saving):
    """Cannot resume after all."""

    async def resume(self, state: JsonValue) -> None:
        raise RuntimeError("no way back")


NOTES, COUNTING, SAVING, FAILING = map(environment_ref, (Notes, Counting, Saving, Failing))


@contextmanager
def serving(folder: Path, *options: str, settings: str = "") -> Generator[tuple[subprocess.Popen[str], str]]:
    """`served` on the folder's state, with bubblewrap; its workers know this module.

    One that was not killed ends in order.  Leases are long unless `settings`, lines of TOML, say otherwise.
    """
    folder.mkdir(exist_ok=True)
    (folder / "server.toml").write_text(settings if "lease_s" in settings else f"lease_s = 600\n{settings}")
    options = ("--config", "server.toml", *options)
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    variables = {VARIABLE: TOKEN, "PYTHONPATH": path}
    with served(folder, "--sandbox", "bubblewrap", *options, **variables) as (process, url):
        yield process, url
        process.terminate()
        process.wait(30)


@asynccontextmanager
async def us(url: str, epoch: int, name: str = "us") -> AsyncGenerator[ToolServerClient]:
    async with ToolServerClient(url, TOKEN, f"{name}/{epoch}", repeat_s=0.2) as client:
        yield client


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def add(line: str) -> ToolCall:
    return ToolCall("add", f'{{"line": "{line}"}}')


async def said(client: ToolServerClient, call_id: str, call: ToolCall, program: ProgramId = P) -> str:
    return (await client.call(program, CallId(call_id), call, timeout_s=30)).content.strip()


async def laid_down(client: ToolServerClient, program: ProgramId = P) -> Moved:
    moved = await client.move(program, SandboxRung.SNAPSHOTTED)
    assert moved.rung is SandboxRung.SNAPSHOTTED
    return moved


def rows(folder: Path) -> dict[str, int]:
    """What the journal of the folder's server holds."""
    with closing(sqlite3.connect(folder / "tool-server" / "state" / "journal.sqlite")) as connection:
        tables = ("programs", "results", "sandboxes", "snapshots", "rests")
        return {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}


def sound_rests(folder: Path) -> int:
    return sound_rests_of(folder / "tool-server" / "state")


def sound_rests_of(state_dir: Path) -> int:
    """How many programs could go on."""
    with closing(sqlite3.connect(state_dir / "journal.sqlite")) as connection:
        return connection.execute("SELECT count(*) FROM rests WHERE why_not = ''").fetchone()[0]


def mounts_below(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line]


async def assert_nothing_left(folder: Path) -> None:
    """Of a server that has ended, or whose programs have been released: no row, folder, process, mount."""
    with anyio.fail_after(20):
        while any(rows(folder).values()):  # noqa: ASYNC110
            await anyio.sleep(0.05)
    sandboxes = folder / "tool-server" / "sandboxes"
    assert list(sandboxes.iterdir()) == []
    assert left_processes(sandboxes) == []
    assert mounts_below(folder) == []
