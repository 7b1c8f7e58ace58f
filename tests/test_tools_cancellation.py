"""The tool server's program table, cancelled at every step, on virtual time."""

from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest

from fakes_tools import FakeBackend, FakeHosts, config
from serving import A, Served, calling, preparing, scoring, serving
from sostenuto.tools.edge import Edge
from sostenuto.tools.programs import open_programs
from sostenuto.tools.secrets import Secrets

pytestmark = pytest.mark.looptime


async def life(served: Served) -> None:
    """One program's whole life; a client that is cancelled anywhere in it does not release."""
    await served.programs.prepare(A, preparing())
    await served.programs.in_sandbox(A, lambda box: box.write("b.txt", b""))
    await served.programs.call(A, calling("sleep", "0"))
    await served.programs.reward(A, scoring())
    await served.programs.release(A)


async def cancel_at_step(step: int, work: Callable[[], Awaitable[None]]) -> bool:
    """Cancel `work` at the step-th turn of the event loop; False when it had ended by then."""
    ended = False

    async def run() -> None:
        nonlocal ended
        await work()
        ended = True

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        for _ in range(step):
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    return not ended


async def test_a_client_cancelled_at_any_step_leaves_nothing_once_its_program_is_released():
    step = 0
    cancelled = True
    async with serving() as served:
        while cancelled:
            step += 1
            cancelled = await cancel_at_step(step, lambda: life(served))
            await served.programs.release(A)
            served.assert_nothing_left()
        counters = served.programs.state().counters
        assert counters["released"] == step
    assert step > 15


async def test_a_client_cancelled_at_any_step_leaves_nothing_once_its_lease_is_over():
    step = 0
    cancelled = True
    async with serving(lease_s=5) as served:
        while cancelled:
            step += 1
            cancelled = await cancel_at_step(step, lambda: life(served))
            await anyio.sleep(6)
            served.assert_nothing_left()
            assert not served.programs.state().owners
    assert step > 15


async def test_a_prepare_cancelled_at_any_step_leaves_nothing():
    step = 0
    cancelled = True

    async def prepare() -> None:
        await served.programs.prepare(A, preparing())

    async with serving() as served:
        while cancelled:
            step += 1
            cancelled = await cancel_at_step(step, prepare)
            if cancelled:
                await served.settle()
                served.assert_nothing_left()
        await served.programs.release(A)
    assert step > 5


async def test_a_release_cancelled_at_any_step_is_completed_all_the_same():
    async with serving(FakeBackend(stop_s=1)) as served:
        for step in range(1, 12):
            await served.programs.prepare(A, preparing())
            with anyio.move_on_after(100):
                await cancel_at_step(step, lambda: served.programs.release(A))
            await served.settle()
            served.assert_nothing_left()


async def test_a_server_cancelled_at_any_step_leaves_nothing():
    backend, hosts = FakeBackend(), FakeHosts()

    async def serve_and_live() -> None:
        async with open_programs(config(), backend, hosts, Edge(Secrets({}), 16384)) as programs:
            await life(Served(programs, backend, hosts))

    step = 0
    cancelled = True
    while cancelled:
        step += 1
        cancelled = await cancel_at_step(step, serve_and_live)
        assert not backend.live
        assert not hosts.host.programs
    assert step > 15
