"""Worker processes: what a hung or dying one does to its own programs, to its neighbours and to nobody."""

import logging
import os
import signal
import sys
from pathlib import Path

import anyio
import psutil
import pytest

from hosts import SECRET, ZOO, call, prepare, score, until, until_gone, with_pool
from sostenuto.envs.pool import WorkerPool
from sostenuto.errors import EnvironmentFailure, ToolServerError
from sostenuto.types import ProgramId


@pytest.mark.parametrize("name", ["hang_in_thread", "hang_the_loop", "hang_with_the_lock", "stubborn"])
@with_pool
async def test_a_hung_tool_ends_its_worker_and_is_blamed_alone(pool: WorkerPool, name: str):
    host, (pid,) = await pool.choose(ZOO), pool.pids
    await prepare(host, "hung")
    await prepare(host, "near")
    async with anyio.create_task_group() as group:

        async def neighbour() -> None:
            with pytest.raises(ToolServerError, match=f"ended for a neighbour: program hung: tool {name}"):
                await call(host, "near", "wait")

        group.start_soon(neighbour)
        await anyio.sleep(0.1)
        with pytest.raises(EnvironmentFailure, match=rf"program hung: tool {name} of Zoo: .*limit of 0\.2 s"):
            await call(host, "hung", name)
    assert not host.alive
    await until_gone(pid)
    with pytest.raises(ToolServerError):
        await call(host, "near", "echo", text="x")
    await host.release(ProgramId("near"))
    again = await pool.choose(ZOO)
    await prepare(again, "new")
    assert (await call(again, "new", "echo", text="x")).content == "x"


@with_pool
async def test_a_short_call_is_not_blamed_for_a_neighbour_that_has_the_loop(pool: WorkerPool):
    host = await pool.choose(ZOO)
    await prepare(host, "hung")
    await prepare(host, "near")
    async with anyio.create_task_group() as group:

        async def neighbour() -> None:
            with pytest.raises(ToolServerError, match="program hung: tool hang_the_loop"):
                await call(host, "near", "slow")

        group.start_soon(neighbour)
        with pytest.raises(EnvironmentFailure, match="hang_the_loop"):
            await call(host, "hung", "hang_the_loop")


@pytest.mark.parametrize("step", ["reset", "reward"])
@with_pool
async def test_a_hung_step_ends_its_worker(pool: WorkerPool, step: str):
    host = await pool.choose(ZOO)

    async def both() -> None:
        await prepare(host, "p", f"{step} hangs")
        await score(host, "p")

    with pytest.raises(EnvironmentFailure, match=rf"{step} of Zoo: .*limit of 0\.5 s"):
        await both()
    assert not host.alive


@with_pool
async def test_a_killed_worker_fails_what_was_under_way_and_is_replaced(pool: WorkerPool):
    host, (pid,) = await pool.choose(ZOO), pool.pids
    await prepare(host, "p")
    async with anyio.create_task_group() as group:

        async def broken() -> None:
            with pytest.raises(ToolServerError, match=r"tool wait of Zoo: the worker ended: SIGKILL"):
                await call(host, "p", "wait")

        for _ in range(3):
            group.start_soon(broken)
        await anyio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
    assert pool.count == 0
    await prepare(await pool.choose(ZOO), "p")
    assert pool.count == 1


@with_pool
async def test_a_worker_that_ends_itself_is_reported_with_its_exit_code(pool: WorkerPool):
    host = await pool.choose(ZOO)
    await prepare(host, "p")
    with pytest.raises(ToolServerError, match="exit code 7"):
        await call(host, "p", "die")


@with_pool
async def test_secrets_reach_tools_and_no_log(pool: WorkerPool, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    host, (pid,) = await pool.choose(ZOO), pool.pids
    await prepare(host, "p")
    assert (await call(host, "p", "secret")).content == f"{len(SECRET)} <secrets TOKEN>"
    await until(lambda: "the secret is" in caplog.text)
    assert "the secret is [secret TOKEN]" in caplog.text
    assert SECRET not in caplog.text
    assert SECRET not in " ".join(psutil.Process(pid).cmdline())


async def test_programs_spread_over_the_workers():
    async with WorkerPool(size=2) as pool:
        hosts = [await pool.choose(ZOO) for _ in range(4)]
        assert len({id(host) for host in hosts}) == 2
        for n, host in enumerate(hosts[:2]):
            await prepare(host, f"p{n}")
        await hosts[0].release(ProgramId("p0"))
        assert await pool.choose(ZOO) is hosts[0]


async def test_leaving_the_pool_ends_hung_workers_too():
    async with WorkerPool() as pool:
        host, (pid,) = await pool.choose(ZOO), pool.pids
        await prepare(host, "p")
        with anyio.move_on_after(0.1):
            await call(host, "p", "hang_in_thread")
    await until_gone(pid)


SERVER = """
import os, anyio
from fakes_envs import Zoo
from sostenuto.envs.pool import WorkerPool
from sostenuto.envs.registry import environment_ref
from sostenuto.tools.wire import CallRequest, PrepareRequest

async def main():
    ref = environment_ref(Zoo)
    async with WorkerPool() as pool, anyio.create_task_group() as group:
        host = await pool.choose(ref)
        await host.prepare("p", PrepareRequest(owner="o", environment=ref, task={}), None)
        group.start_soon(host.call, "p", CallRequest(call_id="1", name="TOOL", arguments="{}"))
        await anyio.sleep(0.1)
        print(*pool.pids, flush=True)
        await anyio.sleep(60)

anyio.run(main)
"""


@pytest.mark.parametrize("name", ["wait", "hang_the_loop"])
async def test_workers_end_when_their_server_is_killed(name: str):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", SERVER.replace("TOOL", name)]
    async with await anyio.open_process(command, env=environment, stderr=None) as server:
        assert server.stdout is not None
        pid = int(await server.stdout.receive())
        server.kill()
        await server.wait()
    await until_gone(pid)
