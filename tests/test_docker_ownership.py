"""Nothing of a container outlives its owner: through cancellation at every await, kill -9 and restarts."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import anyio
import pytest

from dockers import IMAGE, backend_at, containers, docker_root, needs_docker, none_left, said
from sandboxes import CancelledAt, cancelled_at
from sostenuto.errors import SandboxError
from sostenuto.sandbox.docker.address import find_socket
from sostenuto.sandbox.docker.container import DockerSandbox
from sostenuto.sandbox.docker.labels import OWNER, ROOT
from sostenuto.sandbox.docker.typed import Daemon
from sostenuto.sandbox.protocol import Blueprint, SandboxLimits

pytestmark = needs_docker
_MANY = 60
"""More awaits than any of the operations has; the test fails if that is no longer so."""


async def test_a_start_cancelled_at_any_await_leaves_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    blueprint = Blueprint(str(tmp_path), {"other": b"content"})
    with docker_root() as root:
        backend = backend_at(root)
        for n in range(_MANY):
            driven = CancelledAt(backend.start("x", blueprint), n)
            try:
                started = await driven
            except BaseException as exc:
                if not isinstance(exc, anyio.get_cancelled_exc_class()):
                    raise
                assert await none_left(root), n
            else:
                await cast("DockerSandbox", started).stop()
                break
        else:
            pytest.fail("start has more awaits than are tried")
        assert n >= 5


async def test_a_start_in_a_cancelled_scope_leaves_nothing_when_it_returns():
    with docker_root() as root:
        backend = backend_at(root)
        await backend.prepare(Blueprint())
        for delay_s in (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4):
            with anyio.move_on_after(delay_s) as scope:
                sandbox = await backend.start("x", Blueprint())
                await sandbox.stop()
            assert containers(root) == [], delay_s
            if not scope.cancelled_caught:
                break


async def test_a_command_cancelled_at_any_await_ends_and_the_sandbox_goes_on():
    with docker_root() as root:
        sandbox = await backend_at(root).start("x", Blueprint())
        for n in range(_MANY):
            if not await cancelled_at(sandbox.shell("sleep 0.02; echo done", timeout_s=20), n):
                break
            assert (await said(sandbox, "echo alive")).output == "alive\n", n
        else:
            pytest.fail("shell has more awaits than are tried")
        for n in range(1, 4):
            await cancelled_at(sandbox.shell("sleep 0.05; sleep 1000; touch late", timeout_s=20), 1, 1 + n)
            assert "late" not in (await said(sandbox, "ls")).output
        await sandbox.stop()


async def test_a_stop_cancelled_at_any_await_leaves_nothing():
    with docker_root() as root:
        backend = backend_at(root)
        for n in range(_MANY):
            sandbox = await backend.start("x", Blueprint())
            was_cancelled = await cancelled_at(sandbox.stop(), n)
            assert await none_left(root), n
            await sandbox.stop()
            if not was_cancelled:
                break
        else:
            pytest.fail("stop has more awaits than are tried")


async def test_a_start_that_fails_says_why_and_leaves_nothing():
    with docker_root() as root:
        with pytest.raises(SandboxError, match="too many open files"):
            await backend_at(root).start("x", Blueprint(limits=SandboxLimits(open_files=3)))
        with pytest.raises(SandboxError, match="nonesuch"):
            await backend_at(root, runtime="nonesuch").start("x", Blueprint())
        with pytest.raises(SandboxError, match="pull image"):
            await backend_at(root, image="127.0.0.1:9/none:x").start("x", Blueprint())
        assert containers(root) == []


async def test_a_container_that_dies_is_an_error_and_is_not_replaced():
    with docker_root() as root:
        backend = backend_at(root)
        sandbox = await backend.start("x", Blueprint())
        (container,) = containers(root)
        Daemon(find_socket(None)).remove(container)
        with pytest.raises(SandboxError, match="ended"):
            await said(sandbox, "true")
        with pytest.raises(SandboxError, match="ended"):
            await sandbox.read("x")
        assert containers(root) == []
        await sandbox.stop()
        await sandbox.stop()


_OWNER = """
import sys, time, anyio
from pathlib import Path
from dockers import backend_at
from sostenuto.sandbox.protocol import Blueprint

async def main():
    backend = backend_at(Path(sys.argv[1]))
    for number, how in enumerate(sys.argv[2:]):
        sandbox = await backend.start(f"{how}-{number}", Blueprint())
        await sandbox.shell("setsid nohup sleep 1000 & sleep 1000 &", timeout_s=20)
        if how == "paused":
            await sandbox.pause()
        if how == "snapshot":
            await sandbox.snapshot()
        kept.append(sandbox)
    print("up", flush=True)
    time.sleep(1000)

kept = []
anyio.run(main)
"""


def start_owner(root: Path, *how: str) -> "subprocess.Popen[str]":
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(root), *how], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    return owner


def end_owner(owner: "subprocess.Popen[str]"):
    owner.send_signal(signal.SIGKILL)
    owner.communicate()


async def test_the_containers_of_an_owner_that_was_killed_end_by_themselves():
    with docker_root() as root:
        owner = start_owner(root, "busy", "busy")
        assert len(containers(root)) == 2
        end_owner(owner)
        assert await none_left(root)
        await backend_at(root).reclaim()  # its images


async def test_what_a_killed_owner_left_is_reclaimed_and_what_is_the_living_s_is_not():
    with docker_root() as root, docker_root() as elsewhere:
        dead, living = start_owner(root, "paused", "snapshot"), start_owner(root, "paused")
        other_root = start_owner(elsewhere, "paused")
        mine = await backend_at(root).start("mine", Blueprint())
        end_owner(dead)
        end_owner(other_root)
        assert len(containers(root)) >= 3
        await backend_at(root).reclaim()
        assert len(containers(root)) == 2
        assert (await said(mine, "echo alive")).output == "alive\n"
        assert len(containers(elsewhere)) == 0  # another root, but the same pids
        end_owner(living)
        await mine.stop()
        await backend_at(root).reclaim()
        assert containers(root) == []


async def test_a_pid_given_out_again_or_a_reboot_makes_an_owner_dead():
    with docker_root() as root:
        backend = backend_at(root)
        sandbox = await backend.start("x", Blueprint())
        daemon = Daemon(find_socket(None))
        (found,) = daemon.containers(f"{ROOT}={root}")
        pid, ticks, boot = found.labels[OWNER].split(".")
        for owner in (f"{pid}.{int(ticks) - 1}.{boot}", f"{pid}.{ticks}.another"):
            client = daemon._client  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
            client.create_container(IMAGE, ["true"], labels={ROOT: str(root), OWNER: owner})
        assert len(containers(root)) == 3
        assert len(await backend.reclaim()) == 2
        assert containers(root) == [found.identity]
        await sandbox.stop()


async def test_many_start_and_stop_together_and_leave_no_descriptor():
    with docker_root() as root:
        backend = backend_at(root)
        await backend.prepare(Blueprint())

        async def use(number: int):
            sandbox = await backend.start(f"s{number}", Blueprint())
            assert (await said(sandbox, f"sleep 1000 & echo {number}")).output == f"{number}\n"
            await sandbox.stop()

        open_files: list[int] = []
        for _ in range(3):  # the first ones open connections that are kept
            async with anyio.create_task_group() as group:
                for number in range(12):
                    group.start_soon(use, number)
            assert containers(root) == []
            open_files.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208
        assert open_files[2] < open_files[1] + 12
