"""Containers that wait to be taken."""

from pathlib import Path

import anyio
import pytest

from dockers import backend_at, containers, docker_root, needs_docker, said
from sostenuto.sandbox.docker.address import find_socket
from sostenuto.sandbox.docker.pool import WarmPool
from sostenuto.sandbox.docker.typed import Daemon
from sostenuto.sandbox.protocol import Blueprint

pytestmark = needs_docker


async def waiting(pool: WarmPool, count: int):
    with anyio.fail_after(30):
        while pool.waiting != count:  # noqa: ASYNC110 - the pool tells nobody
            await anyio.sleep(0.02)


async def test_what_is_taken_is_filled_up_and_nothing_is_used_twice(tmp_path: Path):
    (tmp_path / "template").write_text("template")
    blueprint = Blueprint(str(tmp_path))
    with docker_root() as root:
        async with WarmPool(backend_at(root), warm=2) as pool:
            await pool.prepare(blueprint)
            await waiting(pool, 2)
            ready = containers(root)
            sandbox = await pool.start("first", Blueprint(str(tmp_path), {"a/own": b"own"}))
            assert sandbox.name == "first"
            seen = await said(sandbox, "cat template a/own; touch a/x; echo mine > template; hostname")
            assert seen.output.startswith("templateown")
            await sandbox.stop()
            await waiting(pool, 2)
            assert len(set(containers(root)) & set(ready)) == 1
            for _ in range(2):
                other = await pool.start("other", blueprint)
                assert (await said(other, "cat template; ls")).output == "templatetemplate\n"
                await other.stop()
        assert containers(root) == []


async def test_a_changed_template_or_another_kind_is_not_served_by_what_waits(tmp_path: Path):
    (tmp_path / "file").write_text("old")
    with docker_root() as root:
        async with WarmPool(backend_at(root), warm=1, kinds=2) as pool:
            await pool.prepare(Blueprint(str(tmp_path)))
            await waiting(pool, 1)
            (tmp_path / "file").write_text("changed")
            changed = await pool.start("x", Blueprint(str(tmp_path)))
            assert (await said(changed, "cat file")).output == "changed"
            await waiting(pool, 2)
            other = await pool.start("x", Blueprint(shell="bash"))  # a third kind: the oldest goes
            assert (await said(other, "[[ a == a ]] && echo bash")).output == "bash\n"
            await waiting(pool, 2)
            await changed.stop()
            await other.stop()
        assert containers(root) == []


async def test_one_that_died_waiting_is_not_handed_out():
    with docker_root() as root:
        async with WarmPool(backend_at(root), warm=1) as pool:
            await pool.prepare(Blueprint())
            await waiting(pool, 1)
            for container in containers(root):
                Daemon(find_socket(None)).remove(container)
            sandbox = await pool.start("x", Blueprint())
            assert (await said(sandbox, "echo alive")).output == "alive\n"
            await sandbox.stop()


async def test_a_pool_that_ends_while_it_fills_leaves_nothing():
    with docker_root() as root:
        backend = backend_at(root)
        for delay_s in (0.0, 0.1, 0.3):
            async with WarmPool(backend, warm=3) as pool:
                await pool.prepare(Blueprint())
                await anyio.sleep(delay_s)
            assert containers(root) == []


async def test_a_pool_is_entered_before_it_is_used(tmp_path: Path):
    with docker_root() as root, pytest.raises(RuntimeError, match="enter the pool"):
        await WarmPool(backend_at(root), warm=1).start("x", Blueprint())
