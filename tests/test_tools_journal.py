"""At most once: what calls came to outlives the server, on real files."""

import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import anyio
import pytest
from typing_extensions import override

from fakes_tools import SECRET, FakeBackend, FakeHosts, config
from serving import A, calling, preparing, scoring
from sostenuto.errors import ConfigError, EnvironmentFailure, ToolServerError
from sostenuto.tools.edge import Edge
from sostenuto.tools.journal import Journal, Kind, Left, Ran, RestRow, open_journal
from sostenuto.tools.programs import Programs, open_programs
from sostenuto.tools.refused import Interrupted, OutcomeUnknown, Refused
from sostenuto.tools.rests import Standing
from sostenuto.tools.secrets import Secrets
from sostenuto.types import ProgramId, ToolResult, ToolStatus

B = ProgramId("b")


@asynccontextmanager
async def server(path: Path, hosts: FakeHosts, **changes: object) -> AsyncGenerator[Programs]:
    edge = Edge(Secrets({"KEY": SECRET}), 16384)
    async with (
        open_journal(path) as journal,
        open_programs(config(**changes), FakeBackend(), hosts, edge, journal) as programs,
    ):
        yield programs


@asynccontextmanager
async def dying_server(path: Path, hosts: FakeHosts, **changes: object) -> AsyncGenerator[Programs]:
    """A server whose journal, after the block, is what it was when the block ended."""
    async with server(path, hosts, **changes) as programs:
        yield programs
        await anyio.sleep(0.5)  # far more than a commit takes, for which nobody can wait here
        kept = path.with_suffix(".kept")
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(kept)) as copy:
            source.backup(copy)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.with_suffix(".kept").rename(path)


def rows(path: Path) -> dict[str, int]:
    tables = ("programs", "results", "sandboxes", "snapshots")
    with closing(sqlite3.connect(path)) as connection:
        return {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}


async def test_what_a_call_came_to_is_answered_by_the_next_server_and_nothing_runs_again(tmp_path: Path):
    path, hosts = tmp_path / "journal", FakeHosts()
    async with dying_server(path, hosts) as first:
        await first.prepare(A, preparing())
        assert (await first.call(A, calling("echo", "7", "c1"))).content == "7"
        with pytest.raises(EnvironmentFailure):
            await first.call(A, calling("crash", "9", "c2"))
        assert (await first.reward(A, scoring(0.5))).value == 0.5
    async with server(path, hosts) as second:
        assert await second.call(A, calling("echo", "7", "c1")) == ToolResult(ToolStatus.OK, "7")
        with pytest.raises(EnvironmentFailure, match=r"KeyError: \[secret KEY\]"):
            await second.call(A, calling("crash", "9", "c2"))
        assert (await second.reward(A, scoring(0.5))).value == 0.5
        with pytest.raises(Interrupted, match="ended with the tool server that ran it"):
            await second.call(A, calling("echo", "8", "c3"))
        with pytest.raises(Interrupted, match="ended with the tool server"):
            await second.in_sandbox(A, lambda sandbox: sandbox.pause())
        await second.release(A)
        with pytest.raises(Refused, match="no program a here"):
            await second.call(A, calling("echo", "7", "c1"))
    assert hosts.host.runs == {"7": 1, "9": 1, "reward": 1}
    assert set(rows(path).values()) == {0}


async def test_a_call_that_was_under_way_is_unknown_and_is_not_run_again(tmp_path: Path):
    path, hosts = tmp_path / "journal", FakeHosts()
    async with dying_server(path, hosts) as first:
        await first.prepare(A, preparing())
        with anyio.move_on_after(0.05):
            await first.call(A, calling("sleep", "30"))
    async with server(path, hosts) as second:
        for _ in range(2):
            with pytest.raises(OutcomeUnknown, match="was under way when the tool server died"):
                await second.call(A, calling("sleep", "30"))
        assert second.state().counters["unknown_outcomes"] == 2
    assert hosts.host.runs == {"30": 1}


async def test_only_an_idempotent_call_runs_again_when_its_program_is_taken_up(tmp_path: Path):
    path, hosts = tmp_path / "journal", FakeHosts()
    async with dying_server(path, hosts) as first:
        await first.prepare(A, preparing())
        await first.call(A, calling("echo", "1", "done"))
        with anyio.move_on_after(0.05):
            async with anyio.create_task_group() as group:
                group.start_soon(first.call, A, calling("sleep", "30", "open"))
                group.start_soon(first.call, A, calling("again", "31", "open-idempotent"))
    async with server(path, hosts) as second:
        await second.prepare(A, preparing().model_copy(update={"continues": True}))
        assert (await second.call(A, calling("echo", "1", "done"))).content == "1"
        with pytest.raises(OutcomeUnknown):
            await second.call(A, calling("sleep", "30", "open"))
        again = calling("again", "31", "open-idempotent", timeout_s=0.1)
        assert (await second.call(A, again)).status is ToolStatus.TIMEOUT
        assert (await second.call(A, again)).status is ToolStatus.TIMEOUT
    assert hosts.host.runs == {"1": 1, "30": 1, "31": 2}
    assert set(rows(path).values()) == {0}


async def test_a_program_that_is_prepared_anew_begins_with_no_results(tmp_path: Path):
    path, hosts = tmp_path / "journal", FakeHosts()
    async with dying_server(path, hosts) as first:
        await first.prepare(A, preparing())
        await first.call(A, calling("echo", "1"))
    async with server(path, hosts) as second:
        await second.prepare(A, preparing())
        assert (await second.call(A, calling("echo", "2"))).content == "2"
        continued = preparing(owner="another").model_copy(update={"continues": True})
        await second.prepare(B, continued)


@pytest.mark.parametrize(("changes", "wait_s"), [({"lease_s": 0.1}, 0.3), ({"results_kept_s": 0.1}, 0.3)])
async def test_what_nobody_comes_for_is_dropped(tmp_path: Path, changes: dict[str, float], wait_s: float):
    path, hosts = tmp_path / "journal", FakeHosts()
    async with dying_server(path, hosts) as first:
        await first.prepare(A, preparing())
        await first.call(A, calling("echo", "1"))
    assert rows(path)["results"] == 1
    async with server(path, hosts, **changes) as second:
        await anyio.sleep(wait_s)
        with pytest.raises(Refused, match="no program a here"):
            await second.call(A, calling("echo", "1"))
        with anyio.fail_after(20):
            while set(rows(path).values()) != {0}:  # noqa: ASYNC110 - another thread commits
                await anyio.sleep(0.01)


async def test_a_call_is_on_disk_before_it_runs_and_its_rows_go_with_the_program(tmp_path: Path):
    path, hosts = tmp_path / "journal", FakeHosts()
    async with server(path, hosts) as programs:
        await programs.prepare(A, preparing())
        async with anyio.create_task_group() as group:
            group.start_soon(programs.call, A, calling("sleep", "0.2"))
            while not hosts.host.runs:  # noqa: ASYNC110
                await anyio.sleep(0.001)
            assert rows(path)["results"] == 1
        await programs.release(A)
        await programs.prepare(A, preparing())
        assert (await programs.call(A, calling("echo", "new"))).content == "new"
    assert set(rows(path).values()) == {0}


async def test_results_that_were_forgotten_stay_refused_after_a_restart(tmp_path: Path):
    path, hosts = tmp_path / "journal", FakeHosts()
    async with dying_server(path, hosts, results_bytes=1000) as first:
        await first.prepare(A, preparing())
        for n in range(3):
            await first.call(A, calling("flood", "400", f"c{n}"))
    with closing(sqlite3.connect(path)) as connection:
        kept_bytes = connection.execute("SELECT sum(length(outcome)) FROM results").fetchone()[0]
    assert kept_bytes < 1500
    async with server(path, hosts) as second:
        with pytest.raises(Refused, match="no longer kept"):
            await second.call(A, calling("flood", "400", "c0"))
        assert (await second.call(A, calling("flood", "400", "c2"))).content == "x" * 400
    assert hosts.host.runs == {"400": 3}


async def test_a_journal_that_cannot_be_written_refuses_calls_and_recovers(tmp_path: Path):
    path, hosts = tmp_path / "journal", FakeHosts()
    async with server(path, hosts) as programs:
        await programs.prepare(A, preparing())
        await programs.call(A, calling("echo", "1", "c1"))
        with closing(sqlite3.connect(path, timeout=0)) as other:
            other.execute("PRAGMA busy_timeout=0")
            other.execute("ALTER TABLE results RENAME TO hidden")
            with pytest.raises(ToolServerError, match="the call was not started"):
                await programs.call(A, calling("echo", "2", "c2"))
            assert "2" not in hosts.host.runs
            other.execute("ALTER TABLE hidden RENAME TO results")
        with anyio.fail_after(10):
            n = 3
            while True:
                with suppress(ToolServerError):
                    await programs.call(A, calling("echo", "3", f"c{n}"))
                    break
                n += 1
    assert set(rows(path).values()) == {0}


class CountingJournal(Journal):
    commits = 0

    @override
    async def commit(self) -> bool:
        self.commits += 1
        return await super().commit()


async def test_calls_that_start_together_share_commits(tmp_path: Path):
    path = tmp_path / "journal"
    async with open_journal(path) as journal:
        journal.program_came("p", "o")
    with closing(sqlite3.connect(path, check_same_thread=False)) as connection:
        journal = CountingJournal(connection, Left())
        async with anyio.create_task_group() as writing:
            writing.start_soon(journal.commit_for_ever)
            async with anyio.create_task_group() as group:
                for n in range(500):
                    group.start_soon(journal.call_opens, "p", Kind.CALL, str(n))
            writing.cancel_scope.cancel()
    assert journal.commits <= 3
    assert rows(path)["results"] == 500


async def test_results_without_a_program_are_dropped_when_the_journal_is_opened(tmp_path: Path):
    path = tmp_path / "journal"
    async with open_journal(path) as journal:
        await journal.call_opens("nobody", Kind.CALL, "c")
        journal.program_came("p", "o")
        await journal.call_opens("p", Kind.REWARD, "c\0\n")
    async with open_journal(path) as journal:
        assert [(row.program, row.call_id, row.ran) for row in journal.left.results] == [
            ("p", "c\0\n", Ran.OPENED)
        ]


async def test_a_file_that_is_no_journal_is_refused(tmp_path: Path):
    (tmp_path / "journal").write_bytes(b"hello" * 1000)
    with pytest.raises(ConfigError, match="state_dir: no journal can be opened"):
        async with open_journal(tmp_path / "journal"):
            pass


async def test_without_a_file_nothing_is_kept_and_nothing_is_waited_for():
    async with open_journal(None) as journal:
        assert isinstance(journal, Journal)
        await journal.call_opens("p", Kind.CALL, "c")
        assert not journal.keeps


async def test_what_a_program_can_go_on_from_goes_with_it_and_is_given_up_for_good(tmp_path: Path):
    path = tmp_path / "journal"
    async with open_journal(path) as journal:
        journal.program_came("a", "us/1")
        journal.program_came("b", "us/1")
        for program in ("a", "b", "nobody"):
            await journal.rest_comes(program, RestRow("", b"first"))
        await journal.rest_comes("a", RestRow("", b"second"))
        await journal.rest_ends("b", "it was used")
        await journal.rest_ends("c", "there is none")
    async with open_journal(path) as journal:
        assert journal.left.rests == {"a": RestRow("", b"second"), "b": RestRow("it was used", b"first")}
        journal.program_went("a")
        journal.rest_went("b")
    async with open_journal(path) as journal:
        assert (journal.left.programs, journal.left.rests) == ({"b": "us/1"}, {})


async def test_nothing_is_changed_when_it_cannot_be_written_down_that_it_will_be(tmp_path: Path):
    path = tmp_path / "journal"
    async with open_journal(path) as journal:
        journal.program_came("a", "us/1")
        standing = Standing(journal, A, may_be_there=True)
        await journal.rest_comes("a", RestRow("", b"there"))
        with closing(sqlite3.connect(path)) as another:
            another.execute("DROP TABLE rests")
            for _ in range(2):
                with pytest.raises(ToolServerError, match=r"nothing was done: .* no such table"):
                    await standing.changes_by("a call")
            another.execute("CREATE TABLE rests (program TEXT PRIMARY KEY, why_not TEXT, content BLOB)")
        await standing.changes_by("a call")
        assert not standing.may_be_there


async def test_a_journal_without_a_file_has_nothing_to_go_on_from():
    standing = Standing(Journal(None, Left()), A, may_be_there=True)
    await standing.changes_by("a call")
    await Journal(None, Left()).rest_comes("a", RestRow("", b""))
