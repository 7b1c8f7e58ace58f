"""Sandboxes that are started ahead: used once, checked before, and never left."""

import os
import signal
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from sandboxes import backend_of, cancelled_at, entries, left_processes, output_of, supervisor_below
from sostenuto.sandbox import processes
from sostenuto.sandbox.protocol import Blueprint, SandboxLimits
from sostenuto.tools.journal import open_journal
from sostenuto.tools.ladder import Ladder
from sostenuto.tools.metrics import Metrics
from sostenuto.tools.recorded import RecordedBackend
from sostenuto.tools.setup import Setup
from sostenuto.tools.stock import Stock
from stocks import clean_root, stocked

LOCAL = ("bubblewrap", "landlock")
NONE = Setup()
GIVEN = Blueprint(files={"given": b"1"})


async def until_there_wait(stock: Stock, count: int) -> None:
    with anyio.fail_after(20):
        while len(stock.waiting(anyio.current_time())) != count:  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def start_and_stop(stock: Stock, blueprint: Blueprint = GIVEN, setup: Setup = NONE) -> None:
    await (await stock.start("p", blueprint, setup)).stop()


@pytest.mark.parametrize("kind", LOCAL)
async def test_once_a_kind_was_asked_for_some_wait_and_what_is_taken_is_made_up_for(kind: str):
    async with clean_root() as root, stocked(backend_of(kind, root), warm=2) as stock:
        assert stock.waiting(0) == ()
        for hits in range(3):
            sandbox = await stock.start("p", GIVEN, NONE)
            assert stock.counters["warm_hits"] == hits
            assert await output_of(sandbox, "cat given; ls | wc -l; echo 2 >own") == "11"
            await until_there_wait(stock, 2)
            await sandbox.stop()
        assert len(entries(root)) == 2


async def test_nothing_is_started_ahead_unless_it_is_asked_for():
    async with clean_root() as root, stocked(backend_of("bubblewrap", root)) as stock:
        await start_and_stop(stock)
        await anyio.sleep(0.1)
        assert entries(root) == []


async def test_a_program_gets_none_of_another_kind():
    async with clean_root() as root, stocked(backend_of("bubblewrap", root), warm=1) as stock:
        await start_and_stop(stock)
        await until_there_wait(stock, 1)
        others = [
            (Blueprint(files={"given": b"2"}), NONE),
            (Blueprint(files={"given": b"1"}, limits=SandboxLimits(processes=64)), NONE),
            (Blueprint(files={"given": b"1"}, environment={"A": "1"}), NONE),
            (Blueprint(files={"given": b"1"}, shell="bash"), NONE),
            (GIVEN, Setup(health="true")),
            (GIVEN, Setup(("true",))),
        ]
        for blueprint, setup in others:
            await start_and_stop(stock, blueprint, setup)
        assert stock.counters["warm_hits"] == 0


@pytest.mark.parametrize("spoil", ["kill", "stop"])
async def test_one_that_does_not_answer_any_more_is_ended_and_not_handed_out(spoil: str):
    async with clean_root() as root, stocked(backend_of("bubblewrap", root), warm=1) as stock:
        await start_and_stop(stock)
        await until_there_wait(stock, 1)
        launcher = supervisor_below(os.getpid(), root)
        for pid in [launcher, *processes.descendants(launcher)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if spoil == "kill" else signal.SIGSTOP)
        sandbox = await stock.start("p", GIVEN, NONE)
        assert stock.counters["warm_hits"] == 0
        assert await output_of(sandbox, "cat given") == "1"
        await sandbox.stop()


async def test_one_that_became_unfit_is_not_handed_out():
    async with clean_root() as root, stocked(backend_of("landlock", root), warm=1) as stock:
        setup = Setup(health="test -f given")
        await start_and_stop(stock, GIVEN, setup)
        await until_there_wait(stock, 1)
        next(root.glob("*/workspace/given")).unlink()
        sandbox = await stock.start("p", GIVEN, setup)
        assert stock.counters["warm_hits"] == 0
        assert await output_of(sandbox, "cat given") == "1"
        await sandbox.stop()


async def test_what_waits_takes_no_more_memory_than_sandboxes_may():
    limits = SandboxLimits(memory_bytes=256 << 20)
    blueprints = [Blueprint(files={"n": n}, limits=limits) for n in (b"1", b"2")]
    changes: dict[str, Any] = {"warm": 2, "sandbox_memory_bytes": 800 << 20}
    async with clean_root() as root, stocked(backend_of("bubblewrap", root), **changes) as stock:
        await start_and_stop(stock, blueprints[0])
        await start_and_stop(stock, blueprints[1])
        await until_there_wait(stock, 3)
        await start_and_stop(stock, blueprints[1])
        await until_there_wait(stock, 3)
        assert {one.memory_bytes for one in stock.waiting(0)} == {256 << 20}


@pytest.mark.parametrize("kind", LOCAL)
async def test_a_layer_is_in_use_while_a_sandbox_over_it_waits(kind: str):
    changes: dict[str, Any] = {"warm": 1, "layer_bytes": 0, "warm_idle_s": 0.5}
    async with clean_root() as root, stocked(backend_of(kind, root), **changes) as stock:
        setup = Setup(("head -c 9 /dev/urandom | od -An -tx1 >made",), health="test -f made")
        first = await stock.start("first", GIVEN, setup)
        await until_there_wait(stock, 1)
        await first.stop()
        assert stock.counters["layers_evicted"] == 0
        sandbox = await stock.start("p", GIVEN, setup)
        assert stock.counters["warm_hits"] == 1
        assert len(await output_of(sandbox, "cat made")) > 20
        await sandbox.stop()
        await until_there_wait(stock, 1)
        assert stock.counters["layers_evicted"] == 0
        with anyio.fail_after(20):
            while entries(root):  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert stock.counters["layers_built"] == stock.counters["layers_evicted"] == 1


@pytest.mark.parametrize("kind", LOCAL)
async def test_a_start_cancelled_at_any_await_leaves_only_what_waits(kind: str):
    step, in_time = 0, True
    async with clean_root() as root, stocked(backend_of(kind, root), warm=1) as stock:
        await start_and_stop(stock, GIVEN, Setup(health="true"))
        while in_time:
            await until_there_wait(stock, 1)
            started: list[Ladder] = []

            async def start(started: list[Ladder] = started) -> None:
                started.append(await stock.start("p", GIVEN, Setup(health="true")))

            in_time = await cancelled_at(start(), step)
            for sandbox in started:
                await sandbox.stop()
            # A canary that was cancelled has cost its sandbox; the next program is followed by another.
            await start_and_stop(stock, GIVEN, Setup(health="true"))
            step += 1
        await until_there_wait(stock, 1)
        with anyio.fail_after(20):
            while len(entries(root)) != 1:  # noqa: ASYNC110
                await anyio.sleep(0.01)
    assert step > 1


async def test_a_server_that_ends_while_it_starts_some_leaves_nothing():
    for hops in range(0, 40, 4):
        async with clean_root() as root, stocked(backend_of("bubblewrap", root), warm=3) as stock:
            await start_and_stop(stock)
            await anyio.sleep(hops * 0.002)
        assert left_processes(root) == []


def names_in(journal: Path) -> list[str]:
    with closing(sqlite3.connect(journal)) as connection:
        return sorted(name for (name,) in connection.execute("SELECT name FROM sandboxes"))


@pytest.mark.parametrize("setup", [NONE, Setup(("true",))])
async def test_one_that_is_handed_out_stands_in_the_journal_under_its_programs_name(
    tmp_path: Path, setup: Setup
):
    path = tmp_path / "journal.sqlite"
    async with clean_root() as root, open_journal(path) as journal:
        recorded = RecordedBackend(backend_of("bubblewrap", root), journal, Metrics(None))
        async with stocked(recorded, warm=1) as stock:
            await start_and_stop(stock, GIVEN, setup)
            await until_there_wait(stock, 1)
            await journal.commit()
            assert names_in(path) == ["warm-1"]
            sandbox = await stock.start("program-7", GIVEN, setup)
            await until_there_wait(stock, 1)
            await journal.commit()
            assert names_in(path) == ["program-7", "warm-2"]
            await sandbox.stop()
    assert names_in(path) == []
