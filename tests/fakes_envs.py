"""A sandbox and environments for the tests of `envs`; workers import this module by name."""

import asyncio
import contextlib
import os
import random
import re
import sys
import time

import anyio
from pydantic import BaseModel

from fakes_sandbox import Unused
from sostenuto.envs.environment import Environment
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.errors import PathError, SandboxError, ToolError
from sostenuto.sandbox.protocol import ShellResult
from sostenuto.tools.decorator import tool
from sostenuto.types import Episode, Message


class FakeSandbox(Unused):
    """Files in a dict, and a shell that knows `cat`, `sleep`, `fail` and `break`."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cancelled: list[str] = []
        self.started = anyio.Event()

    async def shell(self, command: str, *, timeout_s: float, output_bytes: int = 65536) -> ShellResult:
        word, _, rest = command.partition(" ")
        self.started.set()
        if word == "sleep":
            return await self._sleep(float(rest), timeout_s, command)
        if word == "break":
            raise SandboxError("the sandbox is gone")
        if word == "fail":
            return ShellResult(int(rest), "failing\n")
        return ShellResult(0, self.files[rest].decode())

    async def _sleep(self, wanted_s: float, timeout_s: float, command: str) -> ShellResult:
        try:
            await anyio.sleep(min(wanted_s, timeout_s))
        except anyio.get_cancelled_exc_class():
            self.cancelled.append(command)
            raise
        return ShellResult(0 if wanted_s <= timeout_s else None, "slept")

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        if path not in self.files:
            raise PathError(f"{path!r}: No such file or directory")
        return self.files[path][:max_bytes]

    async def write(self, path: str, data: bytes) -> None:
        self.files[path] = data

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def stop(self) -> None: ...


class LedgerTask(BaseModel):
    csv: str
    question: str
    answer: str


class Ledger(Environment):
    """Answer questions about a ledger with a shell."""

    sandbox = SandboxSpec(memory_bytes=512 << 20)

    async def reset(self, task: LedgerTask) -> str:
        await self.sandbox.write("ledger.csv", task.csv)
        return task.question

    @tool(timeout_s=10)
    async def bash(self, command: str) -> str:
        """Run a shell command in the task's workspace."""
        return await self.sandbox.shell(command)

    @tool(timeout_s=0.4)
    async def hasty(self, command: str) -> str:
        """Run a shell command that must be quick."""
        return await self.sandbox.shell(command)

    @tool
    async def read(self, path: str) -> str:
        """Read a file."""
        return await self.sandbox.read(path)

    async def reward(self, episode: Episode) -> float:
        return float(episode.answer == self.task.answer)

    @classmethod
    def demonstrate(cls, task: LedgerTask, rng: random.Random) -> list[Message]:
        return [Message("user", task.question), Message("assistant", task.answer)]


class Plain(BaseModel):
    how: str = ""


class Zoo(Environment[Plain]):
    """Everything that can go wrong in an environment."""

    system = "Be careful."

    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting
        self.inside = 0

    def reset(self, task: Plain) -> str:
        if task.how == "reset raises":
            raise KeyError("no such world")
        if task.how == "reset hangs":
            time.sleep(60)
        if task.how == "reset exits":
            sys.exit(3)
        return f"{self.greeting} {self.seed}"

    @tool
    async def echo(self, text: str) -> str:
        """Say it again."""
        return text

    @tool
    def secret(self) -> str:
        """Tell whether the secret is there."""
        print("the secret is", self.secrets["TOKEN"])  # noqa: T201 - what authors do
        return f"{len(self.secrets['TOKEN'])} {self.secrets!r}"

    @tool
    async def refuse(self) -> str:
        """Refuse on purpose."""
        raise ToolError("not today")

    @tool
    async def crash(self) -> str:
        """Divide by zero."""
        return str(1 // 0)  # the line that the report names

    @tool
    async def invent_cancellation(self) -> str:
        """Raise a cancellation that nobody asked for."""
        raise asyncio.CancelledError

    @tool
    def exit(self) -> str:
        """Try to end the process."""
        sys.exit(1)

    @tool
    def die(self) -> str:
        """End the process."""
        os._exit(7)

    @tool(output_bytes=200)
    def flood(self) -> str:
        """Say too much."""
        return "a" * 5_000_000 + "z"

    @tool(timeout_s=0.2)
    async def slow(self) -> str:
        """Take too long, politely."""
        await anyio.sleep(60)
        return "never"

    @tool(timeout_s=0.2)
    def hang_in_thread(self) -> str:
        """Take too long in a thread."""
        time.sleep(60)
        return "never"

    @tool(timeout_s=0.2)
    async def hang_the_loop(self) -> str:
        """Take too long, and nobody else gets a turn."""
        time.sleep(60)  # noqa: ASYNC251
        return "never"

    @tool(timeout_s=0.2)
    def hang_with_the_lock(self) -> str:
        """Take too long in C code that lets no thread run."""
        return str(re.match(r"(a+)+$", "a" * 64 + "b"))

    @tool(timeout_s=0.2)
    async def stubborn(self) -> str:
        """Refuse to be cancelled."""
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    @tool(timeout_s=5)
    async def wait(self) -> str:
        """Wait a while."""
        await anyio.sleep(4)
        return "waited"

    @tool(serial=True)
    async def alone(self) -> str:
        """Never twice at once."""
        return await self._count()

    @tool
    async def together(self) -> str:
        """As often as wanted."""
        return await self._count()

    async def _count(self) -> str:
        self.inside += 1
        seen = self.inside
        await anyio.sleep(0.02)
        self.inside -= 1
        return str(seen)

    @tool
    async def stop(self) -> str:
        """End the task."""
        self.finish()
        return "over"

    @tool
    async def surrogate(self) -> str:
        """Say what UTF-8 cannot carry."""
        return "a\ud800b"

    @tool
    async def structure(self) -> dict[str, list[int]]:
        """Return more than text."""
        return {"a": [1, 2]}

    @tool
    async def unfit(self) -> object:
        """Return what JSON cannot carry."""
        return object()

    def reward(self, episode: Episode) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        match self.task.how:
            case "reward raises":
                raise ValueError("cannot score")
            case "reward hangs":
                time.sleep(60)
            case "reward is nan":
                return float("nan")
            case "reward is text":
                return "1.0"
            case "reward has metrics":
                return {"reward": 0.5, "length": 3}
            case _:
                pass
        return 1.0

    async def close(self) -> None:
        if self.task.how == "close raises":
            raise RuntimeError("cannot close")
