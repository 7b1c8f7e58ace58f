"""Training jobs under kill -9: the whole tree, the runtime alone, its trainer, engine or tool server.

Each job is killed at random moments and taken up again with `sostenuto resume`, until it has come to its end.
Then its books are read, and whatever it has left is looked for.
"""

import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import anyio
import psutil
from anyio.abc import Process

from benchmarks.figure import Tell
from benchmarks.outside import ENGINE, TOOL_SERVER, command_of, is_running, orphan_groups, reap_orphans
from benchmarks.recovery_audit import Audit, audit, events

TRAINER = "sostenuto.trainer.process"
PARTS = ("all", "runtime", "trainer", "engine", "tool_server")
_MODULES = {"trainer": TRAINER, "engine": ENGINE, "tool_server": TOOL_SERVER}
_CLI = [sys.executable, "-c", "from sostenuto.runtime.cli import main; main()"]
_JOB = """
directory = "{run}"
environment = "{environment}"
model = "{model}"
steps = {steps}
save_every = {save_every}
groups_per_step = {groups}
max_staleness = 1
tasks = {{ factory = "{tasks}", arguments = {{ count = {count} }} }}
limits = {{ turns = {turns}, turn_tokens = {turn_tokens} }}
algorithm = {{ group_size = 2, zero_spread = "keep" }}
engine = {{ restarts = 100 }}
tool_server = {{ restarts = 100, unsafe = {unsafe} }}
trainer = {{ restarts = 100 }}
trackers = []
"""
_GONE_S = 30.0
_END_S = 1800.0


@contextmanager
def open_folder() -> Generator[Path]:
    """One that sandboxes can enter, which may have a user of their own."""
    with tempfile.TemporaryDirectory(prefix="sostenuto-recovery-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        yield folder


@dataclass(frozen=True, slots=True)
class Small:
    """A small job of many short steps."""

    model: Path
    environment: str = "storeroom"
    tasks: str = "benchmarks.recovery_tasks:training"
    steps: int = 24
    groups: int = 4
    save_every: int = 3
    turns: int = 5
    turn_tokens: int = 40
    unsafe: bool = False

    @property
    def root(self) -> str:
        return "job"

    @property
    def whole_batches(self) -> int | None:
        return self.groups

    def begin(self, folder: Path) -> list[str]:
        """Write its file; the arguments that start it."""
        self.write(folder / "job.toml", folder / "run")
        return ["train", str(folder / "job.toml")]

    def write(self, file: Path, run: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self._content(run))

    def _content(self, run: Path) -> str:
        return _JOB.format(
            run=run, environment=self.environment, model=self.model.absolute(), steps=self.steps,
            save_every=self.save_every, groups=self.groups, tasks=self.tasks,
            count=4 * self.steps * self.groups, turns=self.turns, turn_tokens=self.turn_tokens,
            unsafe=str(self.unsafe).lower(),
        )  # fmt: skip


class Job(Protocol):
    """What is killed."""

    @property
    def root(self) -> str: ...

    @property
    def steps(self) -> int: ...

    @property
    def whole_batches(self) -> int | None:
        """Groups that each step learns from; None: as many as teach something."""
        ...

    def begin(self, folder: Path) -> list[str]:
        """Prepare it in a folder; the arguments that start it in `folder`/run."""
        ...


@dataclass(slots=True)
class Torture:
    """All jobs of one call."""

    job: Job
    dice: random.Random
    longest_s: float = 12.0
    """From one kill to the next, at most."""
    parts: tuple[str, ...] = PARTS
    kills: Counter[str] = field(default_factory=Counter[str])
    resumes: int = 0
    stopped: int = 0
    """Times that a job has ended with an error because of a part that was killed."""
    audits: list[Audit] = field(default_factory=list[Audit])
    walls_s: list[float] = field(default_factory=list[float])
    seen: set[psutil.Process] = field(default_factory=set[psutil.Process])
    resumed: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    async def run_job(self, folder: Path, kills: int) -> None:
        """From its beginning to its end, with so many kills on the way, if it lasts that long."""
        run, job = folder / "run", self.job
        began_s, arguments = anyio.current_time(), job.begin(folder)
        goal = self.kills.total() + kills
        while not await self._lives(arguments, folder / "log", goal):
            # Where it died before it had begun, there is nothing to go on with.
            if (run / "journal.db").is_file():
                arguments = ["resume", str(run)]
                self.resumes += 1
        self.walls_s.append(anyio.current_time() - began_s)
        self.audits.append(audit(run, job.root, steps=job.steps, groups_per_step=job.whole_batches))
        self.resumed += [event for event in events(run) if event["event"] == "Resumed"]

    async def _lives(self, arguments: list[str], log: Path, goal: int) -> bool:
        """One life of the runtime; whether the job came to its end in it."""
        hit = False
        async with _started(arguments, log) as process:
            while self.kills.total() < goal:
                with anyio.move_on_after(self.dice.uniform(0.2, self.longest_s)):
                    return self._came_to_its_end(await process.wait(), log, hit=hit)
                tree = self._look(process)
                part = self.dice.choice(self.parts)
                self.kills[part] += _kill(part, tree)
                hit = True
                if part in {"all", "runtime"}:
                    await process.wait()
                    await _until_gone(tree)
                    return False
            with anyio.fail_after(_END_S):
                return self._came_to_its_end(await process.wait(), log, hit=hit)

    def _came_to_its_end(self, code: int, log: Path, *, hit: bool) -> bool:
        if code and not hit:
            raise RuntimeError(f"it ended with {code}: {log.read_text()[-2000:]}")
        self.stopped += bool(code)
        return code == 0

    def _look(self, process: Process) -> list[psutil.Process]:
        """The runtime and all below it; remembered for the end."""
        tree: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            tree = [(runtime := psutil.Process(process.pid)), *runtime.children(recursive=True)]
        self.seen |= set(tree)
        return tree

    def tell(self, say: Tell, prefix: str = "") -> None:
        """What became of all jobs, and what they have left."""

        def tell(name: str, value: float, unit: str, target: str | None = None) -> None:
            say(f"{prefix}{name}", value, unit, target)

        for part in self.parts:
            tell(f"kills_{part}", self.kills[part], "times")
        tell("kills", self.kills.total(), "times")
        tell("jobs", len(self.audits), "jobs")
        tell("resumes", self.resumes, "times")
        tell("stopped_by_a_part", self.stopped, "times")
        tell("lost_steps", sum(event["lost_steps"] for event in self.resumed), "steps")
        tell("groups_kept", sum(event["kept"] for event in self.resumed), "groups")
        tell("groups_dropped", sum(event["dropped"] for event in self.resumed), "groups")
        for name in Audit.__slots__:
            tell(name, sum(getattr(found, name) for found in self.audits), _UNITS.get(name, "faults"), "== 0")
        reap_orphans()
        pids = {str(process.pid) for process in self.seen}
        tell("left_processes", sum(is_running(process) for process in self.seen), "processes", "== 0")
        tell("left_shared_memory", len(_shared(pids)), "files", "== 0")
        tell("left_cgroups", len(orphan_groups(pids)), "groups", "== 0")


_UNITS = {"doubled": "tasks", "lost": "tasks", "missing_groups": "groups", "sandboxes": "sandboxes"}


@asynccontextmanager
async def _started(arguments: list[str], log: Path) -> AsyncGenerator[Process]:
    with log.open("ab") as output:
        process = await anyio.open_process(
            [*_CLI, *arguments],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.aclose()


def _kill(part: str, tree: list[psutil.Process]) -> int:
    """How many blows were dealt: none where the part is not there now."""
    if part in _MODULES:
        victims = [process for process in tree if _MODULES[part] in command_of(process)]
    else:
        victims = tree if part == "all" else tree[:1]
    for process in victims:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return int(bool(victims))


async def _until_gone(tree: list[psutil.Process]) -> None:
    """What the runtime leaves behind notices its death and ends, or is told as left at the end."""
    with anyio.move_on_after(_GONE_S):
        while any(is_running(process) for process in tree):  # noqa: ASYNC110
            await anyio.sleep(0.05)


def _shared(pids: set[str]) -> list[str]:
    """Weights in shared memory that trainers of these ids have published."""
    return [path.name for path in Path("/dev/shm").glob("sostenuto-*") if pids & set(path.name.split("-"))]
