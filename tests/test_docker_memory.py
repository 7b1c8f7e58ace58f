"""The rung below pause: the memory of a container is moved out, and its processes know nothing of it."""

import os
from pathlib import Path

import pytest

from dockers import backend_at, containers, docker_root, needs_docker, running, said
from sostenuto.errors import Unsupported
from sostenuto.sandbox.cgroup_tree import Tree
from sostenuto.sandbox.docker.address import find_socket
from sostenuto.sandbox.docker.memory import find_memory
from sostenuto.sandbox.docker.typed import Daemon
from sostenuto.sandbox.protocol import Blueprint, SandboxLimits
from sostenuto.tools.ladder import Ladder
from sostenuto.types import SandboxRung

pytestmark = needs_docker
_FEW = Blueprint(limits=SandboxLimits(memory_bytes=128 << 20))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="cgroups of the daemon are root's")


def has_swap() -> bool:
    return len(Path("/proc/swaps").read_text().splitlines()) > 1


@needs_root
async def test_what_is_moved_out_of_a_paused_container_comes_back_when_it_is_used():
    with docker_root() as root:
        sandbox = await backend_at(root).start("x", _FEW)
        await said(sandbox, "X=5; head -c 40000000 /dev/urandom >file; sync; md5sum file >sum")
        before = (await sandbox.usage()).memory_bytes
        assert before > 35 << 20
        await sandbox.pause()
        (container,) = containers(root)
        memory = find_memory(Tree(Daemon(find_socket(None)).main_pid(container)), container, 128 << 20)
        memory.move_out()
        assert (await sandbox.usage()).memory_bytes < before - (30 << 20)
        memory.let_back()
        await sandbox.resume()
        assert (await said(sandbox, "md5sum -c sum; echo $X")).output == "file: OK\n5\n"
        await sandbox.stop()


async def test_a_container_reaches_the_rung_where_there_is_swap_and_is_paused_elsewhere():
    with docker_root() as root:
        backend = backend_at(root)
        ladder = await Ladder.start(backend, "x", _FEW)
        await ladder.shell("X=5; Y=$(head -c 20000000 /dev/zero | tr '\\0' a)", timeout_s=60)
        before = (await ladder.usage()).memory_bytes
        reached = await ladder.move(SandboxRung.RECLAIMED)
        out = os.geteuid() == 0 and has_swap()
        assert reached is (SandboxRung.RECLAIMED if out else SandboxRung.PAUSED)
        if out:
            assert (await ladder.usage()).memory_bytes < before - (10 << 20)
        assert (await ladder.shell("echo $X ${#Y}", timeout_s=60)).output == "5 20000000\n"
        await ladder.stop()


async def test_without_swap_or_rights_nothing_is_paused_and_the_remedy_is_told():
    if os.geteuid() == 0 and has_swap():
        pytest.skip("it is possible here")
    async with running() as sandbox:
        with pytest.raises(Unsupported, match=r"memory cannot be moved out: .*(swapon|root)"):
            await sandbox.reclaim()
        assert (await said(sandbox, "echo on")).output == "on\n"
