"""What one worker may use, and whose failure it is when that is too little."""

import os

import anyio
import psutil
import pytest

from fakes_bounds import Hungry
from hosts import ZOO, call, prepare, until_gone
from sostenuto.envs import pool as pool_module
from sostenuto.envs.bounding import Bounding, WorkerBounds
from sostenuto.envs.pool import WorkerPool
from sostenuto.envs.registry import environment_ref
from sostenuto.errors import ConfigError, EnvironmentFailure, ToolServerError
from sostenuto.sandbox.cgroup_tree import Tree
from sostenuto.sandbox.cgroups import look_for_cgroups

HUNGRY = environment_ref(Hungry)
BOUNDS = WorkerBounds(memory_bytes=200 << 20)
SAID = rf"program fat: tool eat of Hungry: environment Hungry used more than {200 << 20} bytes of memory"


@pytest.fixture(params=["cgroup", "looked at"])
def bounded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of holding a worker to its memory, as far as this system has them."""
    cgroups = look_for_cgroups(Tree()) if request.param == "cgroup" else None
    if request.param == "cgroup" and (cgroups is None or not cgroups.bound_memory):
        pytest.skip("needs cgroups that this user can make and that bound memory")
    monkeypatch.setattr(pool_module, "find_cgroups", lambda: cgroups)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("where", ["in its own process", "in a child"])
async def test_an_environment_that_uses_more_than_it_may_ends_its_worker_and_no_other(where: str):
    async with WorkerPool(size=2, bounds=BOUNDS) as pool:
        fat, thin = await pool.choose(HUNGRY), await pool.choose(HUNGRY)
        await prepare(fat, "fat", ref=HUNGRY)
        await prepare(thin, "thin", ref=HUNGRY)
        with pytest.raises(EnvironmentFailure, match=SAID):
            await call(fat, "fat", "eat", megabytes=400, in_child=where == "in a child")
        assert (await call(thin, "thin", "eat", megabytes=1)).content == "eaten"
        assert pool.count == 1
        with pytest.raises(EnvironmentFailure, match="used more than"):
            await call(fat, "fat", "eat", megabytes=1)


@pytest.mark.usefixtures("bounded")
async def test_a_worker_below_its_bound_is_left_alone():
    async with WorkerPool(bounds=BOUNDS) as pool:
        host = await pool.choose(HUNGRY)
        await prepare(host, "p", ref=HUNGRY)
        assert (await call(host, "p", "eat", megabytes=20)).content == "eaten"
        await anyio.sleep(0.5)
        assert pool.count == 1


@pytest.mark.usefixtures("bounded")
async def test_where_several_environments_share_a_worker_none_of_them_is_blamed():
    async with WorkerPool(bounds=BOUNDS) as pool:
        host = await pool.choose(HUNGRY)
        await prepare(host, "fat", ref=HUNGRY)
        await prepare(host, "near", ref=ZOO)
        with pytest.raises(ToolServerError, match="environment Hungry, Zoo used more than"):
            await call(host, "fat", "eat", megabytes=400)


async def test_nothing_of_a_bounded_worker_is_left():
    async with WorkerPool(bounds=BOUNDS) as pool:
        host, (pid,) = await pool.choose(HUNGRY), pool.pids
        await prepare(host, "p", ref=HUNGRY)
        child = int((await call(host, "p", "run_away")).content)
        assert psutil.pid_exists(child)
    await until_gone(pid)
    if look_for_cgroups(Tree()) is None:
        os.kill(child, 9)
        pytest.skip("who leaves the process group of a worker outlives it where no cgroup can be made")
    await until_gone(child)


@pytest.mark.usefixtures("bounded")
def test_who_looks_at_a_worker_that_is_being_buried_sees_no_excess():
    bounding = Bounding(BOUNDS, pool_module.find_cgroups())
    bounding.remove()
    assert not bounding.is_exceeded(os.getpid())


def test_without_a_cgroup_a_share_of_cores_is_rounded_up_and_spread():
    cores = os.sched_getaffinity(0)
    bounding = Bounding(WorkerBounds(cpus=0.5), None)
    pinned: set[int] = set()
    try:
        for number in range(len(cores)):
            bounding.pin(os.getpid(), number)
            mine = os.sched_getaffinity(0)
            os.sched_setaffinity(0, cores)
            assert len(mine) == 1
            pinned |= mine
    finally:
        os.sched_setaffinity(0, cores)
    assert pinned == cores


def test_a_bound_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="memory_bytes"):
        WorkerBounds(memory_bytes=0)
    with pytest.raises(ConfigError, match="cpus"):
        WorkerBounds(cpus=0.0)
