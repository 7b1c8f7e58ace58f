"""Images of templates and snapshots on a real daemon."""

import json
import os
from pathlib import Path

import anyio
import pytest

from dockers import IMAGE, backend_at, docker_root, images, needs_docker, running, said
from sandboxes import cancelled_at
from sostenuto.errors import SandboxError
from sostenuto.sandbox.choose import choose_backend
from sostenuto.sandbox.docker.address import find_socket
from sostenuto.sandbox.docker.backend import DockerSettings
from sostenuto.sandbox.docker.typed import Daemon
from sostenuto.sandbox.protocol import Blueprint

pytestmark = needs_docker
_MANY = 20
"""More awaits than preparing has."""


@pytest.fixture
def template(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "run").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "bin" / "run").chmod(0o755)
    (tmp_path / "link").symlink_to("bin/run")
    (tmp_path / "kept").write_text("template")
    return tmp_path


async def test_a_workspace_starts_with_its_template_and_files(template: Path):
    blueprint = Blueprint(str(template), {"kept": b"file", "deep/x": b""}, environment={"GREETING": "hello"})
    async with running(blueprint) as sandbox:
        seen = await said(sandbox, "./link; cat kept; touch deep/y bin/z && echo $GREETING")
        assert seen.output == "ran\nfilehello\n"
    assert (template / "kept").read_text() == "template"


async def test_one_layer_serves_all_and_a_changed_template_gets_another(template: Path):
    with docker_root() as root:
        backend = backend_at(root)
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(backend.prepare, Blueprint(str(template)))
        assert len(images(root)) == 1
        (template / "kept").write_text("changed!")
        sandbox = await backend.start("x", Blueprint(str(template)))
        assert (await said(sandbox, "cat kept")).output == "changed!"
        assert len(images(root)) == 2
        assert (await sandbox.usage()).disk_bytes < 1000
        await sandbox.stop()


async def test_a_layer_that_nobody_waits_for_any_more_is_made_once(template: Path):
    with docker_root() as root:
        backend = backend_at(root)
        for n in range(_MANY):
            if not await cancelled_at(backend.prepare(Blueprint(str(template))), n):
                break
        else:
            pytest.fail("prepare has more awaits than are tried")
        assert len(images(root)) == 1


async def test_a_layer_that_was_removed_is_made_again(template: Path):
    with docker_root() as root:
        backend = backend_at(root)
        await backend.prepare(Blueprint(str(template)))
        for image in images(root):
            Daemon(find_socket(None)).remove_image(image)
        sandbox = await backend.start("x", Blueprint(str(template)))
        assert (await said(sandbox, "cat kept")).output == "template"
        await sandbox.stop()


async def test_a_template_that_cannot_be_copied_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with docker_root() as root:
        with pytest.raises(SandboxError, match="only files, folders and links"):
            await backend_at(root).start("x", Blueprint(str(tmp_path)))
        assert images(root) == []


async def test_a_blueprint_s_own_image_is_used():
    with docker_root() as root:
        sandbox = await backend_at(root, image="nonesuch").start("x", Blueprint(image=IMAGE))
        assert (await said(sandbox, "echo alive")).output == "alive\n"
        await sandbox.stop()


async def test_a_snapshot_starts_any_number_of_sandboxes_and_the_first_goes_on():
    with docker_root() as root:
        backend = backend_at(root)
        first = await backend.start("first", Blueprint(files={"kept": b"kept"}))
        await said(first, "echo 1 > number; mkdir d; rm kept; X=5; (while :; do sleep 1; done) &")
        snapshot = await first.snapshot()
        assert snapshot.backend == "docker"
        await said(first, "echo 2 > number")
        assert (await said(first, "echo $X; cat number")).output == "5\n2\n"
        forks = [await backend.start(f"fork {n}", Blueprint(), snapshot=snapshot) for n in range(2)]
        for fork in forks:
            assert (
                await said(fork, "cat number; ls -p; touch d/x mine; echo [$X]")
            ).output == "1\nd/\nnumber\n[]\n"
        second = await forks[0].snapshot()
        await backend.forget(snapshot)
        await backend.forget(snapshot)
        with pytest.raises(SandboxError):
            await backend.start("late", Blueprint(), snapshot=snapshot)
        assert (await said(forks[1], "ls d")).output == "x\n"
        for fork in forks:
            await fork.stop()
        grandchild = await backend.start("grandchild", Blueprint(), snapshot=second)
        assert (await said(grandchild, "ls d; cat number")).output == "x\n1\n"
        await grandchild.stop()
        await backend.forget(second)
        await first.stop()
        assert len(images(root)) == 1  # the empty workspace's


async def test_a_paused_sandbox_can_be_snapshotted_and_stays_paused():
    with docker_root() as root:
        backend = backend_at(root)
        sandbox = await backend.start("x", Blueprint(files={"kept": b"kept"}))
        await sandbox.pause()
        snapshot = await sandbox.snapshot()
        with pytest.raises(SandboxError, match="paused"):
            await said(sandbox, "true")
        await sandbox.resume()
        assert (await said(sandbox, "cat kept")).output == "kept"
        await sandbox.stop()
        await backend.forget(snapshot)


async def test_usage_is_told():
    async with running() as sandbox:
        await said(sandbox, "head -c 1000000 /dev/urandom > big; sleep 1000 &")
        usage = await sandbox.usage()
        assert usage.disk_bytes >= 1_000_000
        assert 0 < usage.memory_bytes <= usage.peak_memory_bytes
        assert usage.processes >= 6
        assert usage.cpu_s > 0


async def test_probing_names_the_isolation_or_the_image_that_is_missing():
    with docker_root() as root:
        probe = await backend_at(root).probe()
        assert probe.works, probe
        assert "no capabilities" in probe.isolation
        probe = await backend_at(root, image="nonesuch:x").probe()
        assert not probe.works
        assert "docker pull nonesuch:x" in probe.remedy
        assert json.dumps(probe.details)


async def test_it_is_chosen_when_it_is_preferred():
    with docker_root() as root:
        backend = await choose_backend(root, preferred="docker", docker=DockerSettings(image=IMAGE))
        assert backend.name == "docker"
