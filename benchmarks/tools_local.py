"""What the sandboxes of this machine cost, beside what bwrap alone costs when it is started by hand."""

import os
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import anyio
import anyio.to_thread

from benchmarks.figure import Tell
from sostenuto.sandbox import processes, usage
from sostenuto.sandbox.bubblewrap import BubblewrapBackend, find_bwrap
from sostenuto.sandbox.protocol import Blueprint, Sandbox
from sostenuto.sandbox.removal import remove_tree

_FILES = 2000
_TOGETHER = 100
_COMMAND = "cat d0/f0"
_TIMEOUT_S = 60.0


def measure_local(tell: Tell, *, quick: bool) -> None:
    """Over a template of 2,000 files, where nothing else is said."""
    with _folder() as folder:
        template = _template(folder / "template")
        root = folder / "root"
        root.mkdir(mode=0o711)
        anyio.run(_measure, tell, BubblewrapBackend(root), Blueprint(str(template)), folder, quick)


@contextmanager
def _folder() -> Generator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="sostenuto-bench-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        remove_tree(folder)


def _template(folder: Path) -> Path:
    for number in range(_FILES // 100):
        (folder / f"d{number}").mkdir(parents=True)
        for file in range(100):
            (folder / f"d{number}" / f"f{file}").write_text("x" * 1000)
    return folder


async def _measure(
    tell: Tell, backend: BubblewrapBackend, blueprint: Blueprint, folder: Path, quick: bool
) -> None:
    rounds = 5 if quick else 30
    floor_ms = await _each(rounds, lambda: _by_hand(Path(blueprint.template or ""), folder))
    tell("bwrap by hand, overlay of 2,000 files, ready to the first command, p50", floor_ms, "ms")
    target = f"<= {max(60.0, 1.5 * floor_ms):.4g}"
    ready_ms = await _each(rounds, lambda: _start_and_stop(backend, blueprint))
    tell("bubblewrap, ready to the first command over 2,000 files, p50", ready_ms, "ms", target)
    empty_ms = await _each(rounds, lambda: _start_and_stop(backend, Blueprint()))
    tell("bubblewrap, ready to the first command in an empty workspace, p50", empty_ms, "ms")
    await _measure_many(tell, backend, blueprint, 10 if quick else _TOGETHER)
    await _measure_one(tell, backend, blueprint, rounds)


async def _each(rounds: int, use: Callable[[], Awaitable[float]]) -> float:
    """The median of what `use` says, in ms; the first of all is not counted."""
    await use()
    return median([await use() for _ in range(rounds)]) * 1e3


async def _start_and_stop(backend: BubblewrapBackend, blueprint: Blueprint) -> float:
    began_s = time.perf_counter()
    sandbox = await backend.start("measured", blueprint)
    await sandbox.shell(_COMMAND, timeout_s=_TIMEOUT_S)
    took_s = time.perf_counter() - began_s
    await sandbox.stop()
    return took_s


async def _by_hand(template: Path, folder: Path) -> float:
    return await anyio.to_thread.run_sync(_bare, template, folder)


def _bare(template: Path, folder: Path) -> float:
    """What is measured of ours, done by bwrap and a shell alone."""
    upper, work = (Path(tempfile.mkdtemp(dir=folder)) for _ in range(2))
    argv = [
        find_bwrap(), "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr",
        "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64",
        "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp",
        "--overlay-src", str(template), "--overlay", str(upper), str(work), "/workspace",
        "--chdir", "/workspace", "/bin/sh", "-c", f"{_COMMAND}; exec cat",
    ]  # fmt: skip
    began_s = time.perf_counter()
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        return time.perf_counter() - began_s


async def _measure_many(tell: Tell, backend: BubblewrapBackend, blueprint: Blueprint, count: int) -> None:
    running: list[Sandbox] = []

    async def start(number: int) -> None:
        sandbox = await backend.start(f"one of many {number}", blueprint)
        running.append(sandbox)
        await sandbox.shell(_COMMAND, timeout_s=_TIMEOUT_S)

    began_s = time.perf_counter()
    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(start, number)
    target = "<= 1.5" if count == _TOGETHER else None
    tell(
        f"bubblewrap, {count} at once over 2,000 files, all with a first command",
        time.perf_counter() - began_s,
        "s",
        target,
    )
    idle_bytes = usage.memory_bytes(processes.descendants(os.getpid())) / count
    tell("bubblewrap, idle memory of each (PSS)", idle_bytes / (1 << 20), "MiB", "<= 1")
    began_s = time.perf_counter()
    async with anyio.create_task_group() as group:
        for sandbox in running:
            group.start_soon(sandbox.stop)
    tell(f"bubblewrap, {count} stopped at once", time.perf_counter() - began_s, "s")


async def _measure_one(tell: Tell, backend: BubblewrapBackend, blueprint: Blueprint, rounds: int) -> None:
    sandbox = await backend.start("measured", blueprint)
    try:
        for command in (
            "for i in 1 2 3 4 5 6 7 8; do sleep 1000 & done",
            "for i in $(seq 200); do head -c 50000 /dev/zero > $i; done",
        ):
            await sandbox.shell(command, timeout_s=_TIMEOUT_S)
        shell_ms = await _each(rounds, lambda: _timed(lambda: sandbox.shell(":", timeout_s=_TIMEOUT_S)))
        tell("bubblewrap, a shell command that does nothing, p50", shell_ms, "ms")
        exec_ms = await _each(rounds, lambda: _timed(lambda: sandbox.exec(["true"], timeout_s=_TIMEOUT_S)))
        tell("bubblewrap, a program beside the shell, p50", exec_ms, "ms")
        pause_ms = await _each(rounds, lambda: _pause(sandbox))
        tell("bubblewrap, pause of 12 processes, p50", pause_ms, "ms", "<= 5")
        fork_ms = await _each(rounds, lambda: _fork(backend, sandbox))
        tell("bubblewrap, snapshot of 200 files (10 MB) and fork, p50", fork_ms, "ms", "<= 100")
    finally:
        await sandbox.stop()


async def _timed(use: Callable[[], Awaitable[object]]) -> float:
    began_s = time.perf_counter()
    await use()
    return time.perf_counter() - began_s


async def _pause(sandbox: Sandbox) -> float:
    took_s = await _timed(sandbox.pause)
    await sandbox.resume()
    return took_s


async def _fork(backend: BubblewrapBackend, sandbox: Sandbox) -> float:
    began_s = time.perf_counter()
    snapshot = await sandbox.snapshot()
    fork = await backend.start("fork", Blueprint(), snapshot=snapshot)
    await fork.shell(_COMMAND, timeout_s=_TIMEOUT_S)
    took_s = time.perf_counter() - began_s
    await fork.stop()
    await backend.forget(snapshot)
    return took_s
