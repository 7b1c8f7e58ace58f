"""What a tool server finds at its start, and whom it leaves alone."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from fakes_tools import FORM, TOKEN, FakeBackend, FakeHosts, config
from sandboxes import entries, left_processes, nothing_left, sandbox_root
from sostenuto.errors import ConfigError, SandboxError, ToolServerError
from sostenuto.sandbox.plain import ProcessBackend
from sostenuto.sandbox.protocol import Backend, Blueprint, Snapshot
from sostenuto.sandbox.snapshots import seal_of
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.journal import RestRow, open_journal
from sostenuto.tools.metrics import Metrics
from sostenuto.tools.recorded import RecordedBackend
from sostenuto.tools.rests import Rest
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.server import listen
from sostenuto.types import ProgramId

NONE = Secrets({})


async def counters(backend: Backend, **changes: object) -> dict[str, int]:
    """What a server counts that has just started."""
    async with (
        listen(config(**changes), backend, FakeHosts(), NONE) as url,
        ToolServerClient(url, TOKEN, "me") as client,
    ):
        return (await client.state()).counters


async def test_sandboxes_of_a_dead_server_are_reclaimed_and_those_of_a_living_one_are_not(tmp_path: Path):
    with sandbox_root() as root:
        backend = ProcessBackend(root, unsafe=True)
        mine = await backend.start("mine", Blueprint())
        code = (
            "import anyio, os, signal, sys\n"
            "from pathlib import Path\n"
            "from sostenuto.sandbox.plain import ProcessBackend\n"
            "from sostenuto.sandbox.protocol import Blueprint\n"
            "async def main():\n"
            "    await ProcessBackend(Path(sys.argv[1]), unsafe=True).start('orphan', Blueprint())\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
            "anyio.run(main)\n"
        )
        await anyio.run_process([sys.executable, "-c", code, str(root)], check=False)
        assert len(entries(root)) == 2
        counted = await counters(FakeBackend(), sandbox_root=str(root), state_dir=tmp_path / "state")
        # Groups that other dead processes of this machine have left count, too.
        assert counted["reclaimed_orphans"] >= 1
        assert (await mine.shell("echo alive", timeout_s=20)).output == "alive\n"
        assert len(entries(root)) == 1
        await mine.stop()
        assert await nothing_left(root), left_processes(root)


class DaemonBackend(FakeBackend):
    """Its sandboxes outlive the process, as those of a daemon do."""

    def __init__(self, orphans: Sequence[str], *, broken: bool = False) -> None:
        super().__init__()
        self.orphans = list(orphans)
        self.broken = broken

    async def reclaim(self) -> Sequence[str]:
        if self.broken:
            raise SandboxError("the daemon does not answer")
        found, self.orphans = self.orphans, []
        return found


async def test_a_backend_that_outlives_the_server_tells_its_orphans(caplog: pytest.LogCaptureFixture):
    backend = DaemonBackend(["p-1", "p-2"])
    assert (await counters(backend))["reclaimed_orphans"] == 2
    assert not backend.orphans
    assert "reclaimed what a tool server before had left: p-2" in caplog.text


async def test_a_backend_that_cannot_reclaim_does_not_keep_the_server_from_starting():
    assert (await counters(DaemonBackend(["p-1"], broken=True)))["reclaimed_orphans"] == 0


async def left_by_a_dead_server(state_dir: Path, backend: FakeBackend) -> Snapshot:
    """A journal with two sandboxes and the snapshot of one of them."""
    async with open_journal(state_dir / "journal.sqlite") as journal:
        recorded = RecordedBackend(backend, journal, Metrics(None))
        snapshot = await (await recorded.start("p-1", Blueprint())).snapshot()
        forgotten = await (await recorded.start("p-2", Blueprint())).snapshot()
        await recorded.forget(forgotten)
        journal.snapshot_came(Snapshot("another", "x", 1))
    assert backend.snapshots == {"p-1"}
    return snapshot


async def test_names_and_ownerless_snapshots_of_a_dead_server_leave_the_journal(tmp_path: Path):
    backend = FakeBackend()
    await left_by_a_dead_server(tmp_path, backend)
    async with open_journal(tmp_path / "journal.sqlite") as journal:
        assert set(journal.left.sandboxes) == {"p-1", "p-2"}
    async with listen(config(state_dir=tmp_path), backend, FakeHosts(), NONE):
        assert not backend.snapshots
    async with open_journal(tmp_path / "journal.sqlite") as journal:
        assert not journal.left.sandboxes
        assert [snapshot.backend for snapshot in journal.left.snapshots] == ["another"]


async def test_of_snapshots_on_disk_only_those_are_kept_that_a_program_can_go_on_from(tmp_path: Path):
    with sandbox_root() as root:
        code = (
            "import anyio, os, signal, sys\n"
            "from pathlib import Path\n"
            "from sostenuto.sandbox.plain import ProcessBackend\n"
            "from sostenuto.sandbox.protocol import Blueprint\n"
            "async def main():\n"
            "    blueprint = Blueprint(files={'a.txt': b'kept'})\n"
            "    sandbox = await ProcessBackend(Path(sys.argv[1]), unsafe=True).start('p', blueprint)\n"
            "    for _ in range(4):\n"
            "        print((await sandbox.snapshot()).reference, flush=True)\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
            "anyio.run(main)\n"
        )
        ran = await anyio.run_process([sys.executable, "-c", code, str(root)], check=False)
        backend = ProcessBackend(root, unsafe=True)
        kept, used, stray, _ = (Snapshot(backend.name, line, 4) for line in ran.stdout.decode().split())
        async with open_journal(tmp_path / "journal.sqlite") as journal:
            journal.program_came("p", "us/1")
            journal.program_came("q", "us/1")
            for snapshot in (kept, used, stray):
                journal.snapshot_came(snapshot)
            await journal.rest_comes("p", resting_on(kept))
            await journal.rest_comes("q", resting_on(used))
            await journal.rest_ends("q", "it was used")
        changes = {"state_dir": tmp_path, "sandbox_root": str(root)}
        async with listen(config(**changes), backend, FakeHosts(), NONE) as url:
            assert [str(root / name) for name in entries(root)] == [kept.reference]
            async with ToolServerClient(url, TOKEN, "us/2") as client:
                await client.resume(ProgramId("p"), FORM, {})
                assert await client.read(ProgramId("p"), "a.txt") == b"kept"
                with pytest.raises(ToolServerError, match="q cannot go on: it was used"):
                    await client.resume(ProgramId("q"), FORM, {})
        assert entries(root) == []


def resting_on(snapshot: Snapshot) -> RestRow:
    rest = Rest(snapshot=snapshot, seal=seal_of(snapshot), shell="true", state=b"null")
    return RestRow("", rest.model_dump_json().encode())


async def test_a_start_that_fails_and_a_sandbox_that_stops_leave_no_name(tmp_path: Path):
    backend = FakeBackend(refusal="no such shell")
    async with open_journal(tmp_path / "journal") as journal:
        recorded = RecordedBackend(backend, journal, Metrics(None))
        with pytest.raises(ConfigError):
            await recorded.start("p-1", Blueprint())
        backend.refusal = ""
        await (await recorded.start("p-2", Blueprint())).stop()
    async with open_journal(tmp_path / "journal") as journal:
        assert not journal.left.sandboxes


async def test_a_second_server_on_the_same_state_is_refused_while_the_first_lives(tmp_path: Path):
    changes = {"state_dir": tmp_path, "takeover_s": 0.1}
    async with listen(config(**changes), FakeBackend(), FakeHosts(), NONE):
        with pytest.raises(ConfigError, match=f"in use by the tool server with pid {os.getpid()}"):
            async with listen(config(**changes), FakeBackend(), FakeHosts(), NONE):
                pass
    assert (await counters(FakeBackend(), **changes))["prepared"] == 0


async def test_a_server_waits_for_one_that_is_just_ending(tmp_path: Path):
    changes = {"state_dir": tmp_path, "takeover_s": 10}
    first_is_there = anyio.Event()

    async def first() -> None:
        async with listen(config(**changes), FakeBackend(), FakeHosts(), NONE):
            first_is_there.set()
            await anyio.sleep(0.2)

    async with anyio.create_task_group() as group:
        group.start_soon(first)
        await first_is_there.wait()
        assert (await counters(FakeBackend(), **changes))["prepared"] == 0


async def test_a_state_folder_that_cannot_be_made_is_a_configuration_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"state_dir: .*cannot be used"):
        await counters(FakeBackend(), state_dir=tmp_path / "file" / "below")


async def test_an_epoch_is_fenced_by_a_newer_one_over_the_servers_death(tmp_path: Path):
    async with (
        listen(config(state_dir=tmp_path), FakeBackend(), FakeHosts(), NONE) as url,
        ToolServerClient(url, TOKEN, "run/2") as client,
    ):
        await client.prepare(ProgramId("a"), FORM, {})
    async with (
        listen(config(state_dir=tmp_path), FakeBackend(), FakeHosts(), NONE) as url,
        ToolServerClient(url, TOKEN, "run/1") as old,
    ):
        with pytest.raises(Exception, match="came back with epoch 2"):
            await old.state()
