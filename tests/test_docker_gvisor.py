"""Containers that gVisor holds: everything that others do, and their memory goes to disk and comes back."""

import pytest

from dockers import IMAGE, backend_at, containers, docker_root, needs_docker, none_left, said
from sostenuto.errors import SandboxError, Unsupported
from sostenuto.sandbox.docker.address import find_socket
from sostenuto.sandbox.docker.backend import DockerBackend
from sostenuto.sandbox.docker.typed import Daemon
from sostenuto.sandbox.protocol import Blueprint
from sostenuto.tools.ladder import Ladder
from sostenuto.types import SandboxRung


def _knows_runsc() -> bool:
    return bool(IMAGE) and "runsc" in Daemon(find_socket(None)).runtimes()


pytestmark = [
    *needs_docker,
    pytest.mark.skipif(not _knows_runsc(), reason="the daemon does not know runsc"),
]


async def checkpointing(backend: DockerBackend) -> DockerBackend:
    """The backend when its probe has seen that memory can go to disk."""
    probe = await backend.probe()
    assert probe.works, probe
    assert probe.details["memory"] == "moved to disk, once for each sandbox"
    return backend


async def test_a_sandbox_in_gvisor_does_what_the_others_do():
    with docker_root() as root:
        backend = backend_at(root, runtime="runsc")
        sandbox = await backend.start("x", Blueprint(files={"given": b"1"}))
        assert (await said(sandbox, "dmesg | grep -c gVisor; X=5; cat given")).output == "1\n1"
        assert (await said(sandbox, "sleep 1000", timeout_s=1)).timed_out
        # A shell that takes too long to come back is replaced.
        assert (await said(sandbox, "echo $X")).output in {"5\n", "\n"}
        await sandbox.write("late", b"2")
        assert (await said(sandbox, "cat late; echo 3 >made")).output == "2"
        assert await sandbox.read("made") == b"3\n"
        assert (await sandbox.exec(["cat"], stdin=b"in", timeout_s=20)).output == "in"
        await sandbox.pause()
        await sandbox.resume()
        snapshot = await sandbox.snapshot()
        await sandbox.stop()
        fork = await backend.start("fork", Blueprint(), snapshot=snapshot)
        assert (await said(fork, "cat given late made")).output == "123\n"
        await fork.stop()
        await backend.forget(snapshot)
        await backend.close()


async def test_a_program_that_was_ended_leaves_the_shell_its_time():
    with docker_root() as root:
        sandbox = await backend_at(root, runtime="runsc").start("x", Blueprint())
        await said(sandbox, "X=5")
        assert (await sandbox.exec(["sleep", "1000"], timeout_s=0.5)).timed_out
        assert (await said(sandbox, "echo $X", timeout_s=60)).output == "5\n"
        await sandbox.stop()


async def test_memory_goes_to_disk_once_and_processes_go_on_where_they_were():
    with docker_root() as root:
        backend = await checkpointing(backend_at(root, runtime="runsc", checkpoints=True))
        sandbox = await backend.start("x", Blueprint())
        count = "(i=0; while :; do i=$((i + 1)); echo $i >n; sleep 0.1; done) & X=5; cd /tmp; sleep 1"
        await said(sandbox, count)
        await sandbox.reclaim()
        await sandbox.reclaim()
        reached = int(await sandbox.read("n"))
        assert (await sandbox.usage()).processes == 0
        with pytest.raises(SandboxError, match="paused"):
            await said(sandbox, "true")
        await sandbox.resume()
        assert (await said(sandbox, "sleep 1; echo $X; pwd")).output == "5\n/tmp\n"
        assert int(await sandbox.read("n")) > reached
        with pytest.raises(Unsupported):
            await sandbox.reclaim()
        assert (await said(sandbox, "echo on")).output == "on\n"
        await sandbox.stop()
        gone = await backend.start("y", Blueprint())
        await gone.reclaim()
        await gone.stop()
        assert containers(root) == []
        await backend.close()


async def test_the_rung_is_reached_by_disk_and_the_second_time_it_is_paused():
    with docker_root() as root:
        backend = await checkpointing(backend_at(root, runtime="runsc", checkpoints=True))
        ladder = await Ladder.start(backend, "x", Blueprint())
        await ladder.shell("X=5", timeout_s=20)
        for rung in (SandboxRung.RECLAIMED, SandboxRung.PAUSED):
            assert await ladder.move(SandboxRung.RECLAIMED) is rung
            assert (await ladder.shell("echo $X", timeout_s=20)).output == "5\n"
        await ladder.stop()
        assert await none_left(root)
        await backend.close()


async def test_doctor_says_how_gvisor_is_and_how_it_is_registered_where_it_is_not():
    with docker_root() as root:
        probe = await backend_at(root).examine()
        assert probe.details["gVisor"].startswith("works as runtime runsc; memory: moved to disk")
        unknown = await backend_at(root, runtime="nonesuch").probe()
        assert "runtimes, named runsc" in unknown.remedy
        without = backend_at(root, checkpoints=True)  # the default runtime, which needs CRIU
        if "moved to disk" not in (seen := (await without.probe()).details["memory"]):
            assert "experimental" in seen
            sandbox = await without.start("x", Blueprint())
            assert (await said(sandbox, "echo on")).output == "on\n"
            await sandbox.stop()
