"""A sandbox goes down its rungs and comes back as it was, or does not go down."""

import os
import signal

import anyio
import pytest

from sandboxes import backend_of, entries, left_processes, output_of, sandbox_root, supervisor_below
from sostenuto.errors import SandboxError
from sostenuto.sandbox.bubblewrap import BubblewrapBackend
from sostenuto.sandbox.local import LocalSandbox
from sostenuto.sandbox.protocol import Blueprint, Snapshot
from sostenuto.tools.ladder import Ladder
from sostenuto.types import SandboxRung

RUNNING, PAUSED = SandboxRung.RUNNING, SandboxRung.PAUSED
RECLAIMED, SNAPSHOTTED = SandboxRung.RECLAIMED, SandboxRung.SNAPSHOTTED
_CHANGES = "mkdir 'a b' && cd 'a b' && export NAME=\"it's\nhere\" && echo 2 >new; rm ../kept"


class RefusingBackend(BubblewrapBackend):
    """Starts nothing while it has a reason not to."""

    refusal = ""

    async def start(
        self, name: str, blueprint: Blueprint, *, snapshot: Snapshot | None = None
    ) -> LocalSandbox:
        if self.refusal:
            raise SandboxError(self.refusal)
        return await super().start(name, blueprint, snapshot=snapshot)


async def _use_until_it_ends(ladder: Ladder) -> None:
    with anyio.fail_after(20):
        while True:
            await output_of(ladder, "true")


@pytest.mark.parametrize(
    ("kind", "rung"), [("bubblewrap", PAUSED), ("bubblewrap", SNAPSHOTTED), ("landlock", PAUSED)]
)
async def test_it_comes_back_with_its_files_directory_and_exported_variables(kind: str, rung: SandboxRung):
    with sandbox_root() as root:
        ladder = await Ladder.start(backend_of(kind, root), "a", Blueprint(files={"kept": b"1"}))
        await output_of(ladder, _CHANGES)
        assert await ladder.move(rung) is rung
        assert bool(left_processes(root)) is (rung is PAUSED)
        assert await output_of(ladder, 'echo "$NAME"; cat new; ls -A .. | wc -l') == "it's\nhere\n2\n1"
        assert ladder.rung is RUNNING
        await ladder.stop()
        assert entries(root) == []
        assert left_processes(root) == []


async def test_where_the_workspace_would_come_back_at_another_path_it_is_not_snapshotted():
    with sandbox_root() as root:
        ladder = await Ladder.start(backend_of("landlock", root), "a", Blueprint())
        assert await ladder.move(SNAPSHOTTED) in {PAUSED, RECLAIMED}
        await ladder.stop()


async def test_what_a_snapshot_would_lose_keeps_it_from_being_snapshotted():
    with sandbox_root() as root:
        ladder = await Ladder.start(backend_of("bubblewrap", root), "a", Blueprint())
        await output_of(ladder, "sleep 1000 & echo $! >pid")
        assert await ladder.move(SNAPSHOTTED) in {PAUSED, RECLAIMED}
        assert await output_of(ladder, "kill -0 $(cat pid) && echo lives") == "lives"
        await output_of(ladder, "kill $(cat pid); wait; echo 1 >${TMPDIR:-/tmp}/file")
        assert await ladder.move(SNAPSHOTTED) in {PAUSED, RECLAIMED}
        assert await output_of(ladder, "cat ${TMPDIR:-/tmp}/file; rm ${TMPDIR:-/tmp}/file") == "1"
        assert await ladder.move(SNAPSHOTTED) is SNAPSHOTTED
        await ladder.stop()
        assert entries(root) == []


async def test_a_sandbox_in_use_stays_as_it_is():
    with sandbox_root() as root:
        ladder = await Ladder.start(backend_of("bubblewrap", root), "a", Blueprint())
        async with anyio.create_task_group() as group:
            said = ladder.shell("sleep 0.3; echo done", timeout_s=20)

            async def use() -> None:
                assert (await said).output == "done\n"

            group.start_soon(use)
            await anyio.wait_all_tasks_blocked()
            for rung in (PAUSED, RECLAIMED, SNAPSHOTTED):
                assert await ladder.move(rung) is RUNNING
        assert await ladder.move(SNAPSHOTTED) is SNAPSHOTTED
        await ladder.stop()


async def test_one_that_died_is_not_replaced_by_a_fresh_one():
    with sandbox_root() as root:
        ladder = await Ladder.start(backend_of("bubblewrap", root), "a", Blueprint(files={"kept": b"1"}))
        os.kill(supervisor_below(os.getpid(), root), signal.SIGKILL)
        with pytest.raises(SandboxError):
            await _use_until_it_ends(ladder)
        with pytest.raises(SandboxError):
            await ladder.move(SNAPSHOTTED)
        await ladder.stop()


async def test_stopping_a_resting_one_forgets_its_snapshot():
    with sandbox_root() as root:
        ladder = await Ladder.start(backend_of("bubblewrap", root), "a", Blueprint())
        assert await ladder.move(SNAPSHOTTED) is SNAPSHOTTED
        assert len(entries(root)) == 1
        assert (await ladder.usage()).memory_bytes == 0
        await ladder.stop()
        assert entries(root) == []
        with pytest.raises(SandboxError):
            await ladder.read("x")


async def test_a_restore_that_fails_is_tried_again_from_the_same_snapshot():
    with sandbox_root() as root:
        backend = RefusingBackend(root)
        ladder = await Ladder.start(backend, "a", Blueprint(files={"x": b"1"}))
        await ladder.move(SNAPSHOTTED)
        backend.refusal = "no room"
        with pytest.raises(SandboxError, match="no room"):
            await ladder.read("x")
        backend.refusal = ""
        assert await ladder.read("x") == b"1"
        await ladder.stop()
        assert entries(root) == []
