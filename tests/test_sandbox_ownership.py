"""Nothing of a sandbox outlives its owner: through cancellation at every await, kill -9 and restarts."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from sandboxes import (
    ALL,
    ISOLATING,
    CancelledAt,
    backend_of,
    cancelled_at,
    entries,
    left_processes,
    nothing_left,
    output_of,
    running,
    sandbox_root,
    supervisor_below,
)
from sostenuto.errors import SandboxError
from sostenuto.sandbox import processes
from sostenuto.sandbox.folders import reclaim
from sostenuto.sandbox.protocol import Blueprint, Sandbox, SandboxLimits

each_backend = pytest.mark.parametrize("kind", ALL)
_MANY = 60
"""More awaits than any of the operations has; the test fails if that is no longer so."""


def template_of(folder: Path) -> Blueprint:
    for number in range(20):
        (folder / str(number)).write_text("x" * 1000)
    return Blueprint(str(folder), {"file": b"content"})


@each_backend
async def test_a_start_cancelled_at_any_await_leaves_nothing(kind: str, tmp_path: Path):
    blueprint = template_of(tmp_path)
    with sandbox_root() as root:
        backend = backend_of(kind, root)
        for n in range(_MANY):
            driven = CancelledAt(backend.start("x", blueprint), n)
            try:
                started = await driven
            except asyncio.CancelledError:
                assert left_processes(root) == []
                assert entries(root) == []
            else:
                await cast("Any", started).stop()
                break
        else:
            pytest.fail("start has more awaits than are tried")
        assert n >= 2


@each_backend
async def test_a_command_cancelled_at_any_await_ends_and_the_sandbox_goes_on(kind: str):
    async with running(kind) as (sandbox, _):
        for n in range(_MANY):
            command = "touch begun; /bin/true; sleep 0.02; echo done"
            if not await cancelled_at(sandbox.shell(command, timeout_s=20), n):
                break
            assert await output_of(sandbox, "echo alive") == "alive"
        else:
            pytest.fail("shell has more awaits than are tried")


@each_backend
async def test_a_command_cancelled_again_and_again_is_ended_before_the_next(kind: str):
    async with running(kind) as (sandbox, _):
        for again in ((1,), (2,), (3,), (1, 2), (1, 3), (2, 3), (1, 2, 3)):
            work = sandbox.shell("sleep 0.05; sleep 1000; touch late", timeout_s=20)
            assert await cancelled_at(work, 0, *again)
            assert "late" not in await output_of(sandbox, "ls")


async def test_a_command_cancelled_again_while_a_new_shell_comes_up_does_not_end_that():
    async with running("bubblewrap") as (sandbox, _):
        for n in range(9, 16):  # the shell is given up after ten attempts
            work = sandbox.shell("trap '' USR1; while :; do :; done", timeout_s=20)
            await cancelled_at(work, 0, n)
            await anyio.sleep(0.02)
            assert await output_of(sandbox, "X=kept; echo alive") == "alive"
            assert await output_of(sandbox, "echo $X") == "kept"


@each_backend
async def test_a_stop_cancelled_at_any_await_leaves_nothing(kind: str):
    with sandbox_root() as root:
        backend = backend_of(kind, root)
        for n in range(_MANY):
            sandbox = await backend.start("x", Blueprint(files={"file": b"content"}))
            await sandbox.shell("mkdir shut; umask 777; mkdir shut/in; setsid sleep 1000 &", timeout_s=20)
            was_cancelled = await cancelled_at(sandbox.stop(), n)
            assert left_processes(root) == []
            assert entries(root) == []
            await sandbox.stop()
            if not was_cancelled:
                break
        else:
            pytest.fail("stop has more awaits than are tried")


@each_backend
async def test_a_start_in_a_cancelled_scope_leaves_nothing(kind: str, tmp_path: Path):
    blueprint = template_of(tmp_path)
    with sandbox_root() as root:
        for ticks in range(12):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(_start_and_stop, kind, root, blueprint)
                    for _ in range(ticks):
                        await anyio.sleep(0.002)
                    scope.cancel()
            assert left_processes(root) == []
            assert entries(root) == []


async def _start_and_stop(kind: str, root: Path, blueprint: Blueprint):
    sandbox = await backend_of(kind, root).start("x", blueprint)
    try:
        await sandbox.shell("sleep 1000", timeout_s=60)
    finally:
        await sandbox.stop()


@each_backend
async def test_a_start_that_fails_says_why_and_leaves_nothing(kind: str):
    with sandbox_root() as root:
        backend = backend_of(kind, root)
        with pytest.raises(SandboxError, match=r"the shell ended with code|memory was used up"):
            await backend.start("x", Blueprint(limits=SandboxLimits(memory_bytes=4096)))
        assert left_processes(root) == []
        assert entries(root) == []


_OWNER = """
import sys, time, anyio
from pathlib import Path
from sandboxes import backend_of
from sostenuto.sandbox.protocol import Blueprint, Sandbox, SandboxLimits

async def main():
    for number, kind in enumerate(sys.argv[2:]):
        sandbox = await backend_of(kind, Path(sys.argv[1])).start(f"{kind}-{number}", Blueprint())
        await sandbox.shell("setsid nohup sleep 1000 & (sleep 1000 &) ; sleep 1000 &", timeout_s=20)
        if number == 0:
            await sandbox.pause()
        kept.append(sandbox)
    print("up", flush=True)
    time.sleep(1000)

kept = []
anyio.run(main)
"""


def start_owner(root: Path, *kinds: str) -> "subprocess.Popen[str]":
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(root), *kinds], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    return owner


def end_owner(owner: "subprocess.Popen[str]"):
    owner.kill()
    owner.communicate()


async def test_an_owner_killed_outright_leaves_no_process_and_its_folders_are_reclaimed():
    with sandbox_root() as root:
        owner = start_owner(root, *ISOLATING, *ALL)
        end_owner(owner)
        assert await nothing_left(root)
        assert len(entries(root)) == 5
        assert sorted(reclaim(root)) == sorted(
            ["bubblewrap-0", "landlock-1", "bubblewrap-2", "landlock-3", "process-4"]
        )
        assert entries(root) == []
        assert reclaim(root) == []


async def test_reclaiming_touches_nothing_of_a_living_owner():
    with sandbox_root() as root:
        other = start_owner(root, "bubblewrap")
        dead = start_owner(root, "landlock")
        mine = await backend_of("bubblewrap", root).start("mine", Blueprint(files={"kept": b"kept"}))
        (root / "notes").write_text("not a sandbox")
        (root / "folder").mkdir()
        end_owner(dead)
        assert reclaim(root) == ["landlock-0"]
        assert await output_of(mine, "cat kept") == "kept"
        assert len(entries(root)) == 4
        await mine.stop()
        end_owner(other)
        assert reclaim(root) == ["bubblewrap-0"]
        assert sorted(path.name for path in root.iterdir()) == ["folder", "notes"]


async def _use_until_it_ends(sandbox: Sandbox):
    with anyio.fail_after(20):
        while True:
            await sandbox.shell("true", timeout_s=20)


async def test_stopping_ends_what_a_dead_supervisor_left():
    async with running("landlock") as (sandbox, root):
        await sandbox.shell("setsid sleep 1000 & sleep 1000 &", timeout_s=20)
        os.kill(supervisor_below(os.getpid(), root), signal.SIGKILL)
        with pytest.raises(SandboxError):
            await _use_until_it_ends(sandbox)
        assert left_processes(root)


async def test_reclaiming_ends_what_a_dead_supervisor_left():
    with sandbox_root() as root:
        owner = start_owner(root, "landlock")
        os.kill(supervisor_below(owner.pid, root), signal.SIGKILL)
        end_owner(owner)
        assert left_processes(root)  # setsid, and nobody to adopt it
        assert reclaim(root) == ["landlock-0"]
        assert await nothing_left(root)
        assert entries(root) == []


def test_a_pid_given_out_again_or_a_reboot_makes_an_owner_dead():
    with sandbox_root() as root:
        me, started = os.getpid(), processes.start_ticks(os.getpid())
        again = root / f"{me}.{(started or 0) - 1}.{'a' * 16}"
        rebooted = root / f"{me}.{started}.{'b' * 16}"
        alive = root / f"{me}.{started}.{'c' * 16}"
        for folder in (again, rebooted, alive):
            folder.mkdir()
        (rebooted / "owner.json").write_text(json.dumps({"name": "rebooted", "boot_id": "another"}))
        assert reclaim(root) == [again.name, "rebooted"]
        assert list(root.iterdir()) == [alive]


@each_backend
async def test_many_sandboxes_start_and_stop_together(kind: str):
    with sandbox_root() as root:
        backend = backend_of(kind, root)

        async def use(number: int):
            sandbox = await backend.start(f"s{number}", Blueprint())
            await sandbox.shell("setsid sleep 1000 & sleep 1000 &", timeout_s=20)
            assert await output_of(sandbox, f"echo {number}") == str(number)
            await sandbox.stop()

        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(use, number)
        assert left_processes(root) == []
        assert entries(root) == []
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
