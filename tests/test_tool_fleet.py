"""Several tool servers as one, over real sockets; those that are killed or frozen are real processes."""

import os
import signal
import socket
import subprocess
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from fakes_tools import FORM, TOKEN, FakeBackend, FakeHosts, config
from sostenuto.errors import ConfigError, EnvironmentFailure, SandboxError, ToolServerError
from sostenuto.runtime.tool_fleet import ToolFleet, open_fleet
from sostenuto.runtime.tool_keeper import Link, reached
from sostenuto.sandbox.protocol import Blueprint, Sandbox, Snapshot
from sostenuto.scheduler.events import ToolServerJoined
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.server import listen
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.types import CallId, Episode, ProgramId, SandboxRung, StopReason, ToolCall
from test_tools_process import server

A, B = ProgramId("a"), ProgramId("b")
C1 = CallId("c1")
EPISODE = Episode(messages=(), stop_reason=StopReason.ANSWERED)


class BrokenBackend(FakeBackend):
    async def start(self, name: str, blueprint: Blueprint, *, snapshot: Snapshot | None = None) -> Sandbox:
        del name, blueprint, snapshot
        await anyio.lowlevel.checkpoint()
        raise SandboxError("no space left on device")


class Server:
    """One that listens in this process."""

    def __init__(self, url: str, backend: FakeBackend, hosts: FakeHosts) -> None:
        self.url = url
        self.backend = backend
        self.hosts = hosts

    @property
    def programs(self) -> set[str]:
        return set(self.hosts.host.programs)


@asynccontextmanager
async def listening(
    *settings: Mapping[str, object], broken: tuple[int, ...] = ()
) -> AsyncGenerator[list[Server]]:
    """A server for each of the settings; nothing is on them afterwards."""
    servers: list[Server] = []
    async with AsyncExitStack() as stack:
        for index, changes in enumerate(settings):
            backend = BrokenBackend() if index in broken else FakeBackend()
            hosts = FakeHosts()
            given = config(**{"cpus": 2, **changes})
            url = await stack.enter_async_context(listen(given, backend, hosts, Secrets({})))
            servers.append(Server(url, backend, hosts))
        yield servers
    assert not any(server.backend.live or server.programs for server in servers)


def link(url: str, *, token: str = TOKEN, lease_s: float = 30.0, repeat_s: float = 0.2) -> Link:
    def client(epoch: int) -> ToolServerClient:
        return ToolServerClient(url, token, f"us-{url[-5:]}/{epoch}", lease_s=lease_s, repeat_s=repeat_s)

    return reached(url, client)


def needing(memory_bytes: int = 0, *, kind: int = 0) -> EnvironmentRef:
    return FORM.model_copy(update={"memory_bytes": memory_bytes, "options": {"kind": kind}})


async def prepare(fleet: ToolFleet, name: str, environment: EnvironmentRef = FORM, **task: str) -> None:
    prepared = await fleet.prepare(ProgramId(name), environment, {**task}, seed=0, timeout_s=20)
    assert prepared.tools


async def until(is_so: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not is_so():  # noqa: ASYNC110
            await anyio.sleep(0.02)


async def test_programs_of_different_environments_are_spread_evenly():
    async with listening({}, {}) as servers, open_fleet([link(s.url) for s in servers]) as fleet:
        for number in range(6):
            await prepare(fleet, f"p{number}", needing(kind=number))
        assert [len(server.programs) for server in servers] == [3, 3]


async def test_load_is_relative_to_what_a_server_has():
    small, large = {"sandbox_memory_bytes": 100}, {"sandbox_memory_bytes": 300}
    async with listening(small, large) as servers, open_fleet([link(s.url) for s in servers]) as fleet:
        for number in range(8):
            await prepare(fleet, f"p{number}", needing(50, kind=number))
        assert [len(server.programs) for server in servers] == [2, 6]


async def test_an_environment_stays_where_it_was_prepared_until_that_server_is_clearly_fuller():
    async with listening({}, {}) as servers, open_fleet([link(s.url) for s in servers]) as fleet:
        await prepare(fleet, "other", needing(kind=1))
        for number in range(6):
            await prepare(fleet, f"p{number}")
        counts = sorted(len(server.programs - {"other"}) for server in servers)
        assert counts == [0, 6]
        for number in range(6, 20):
            await prepare(fleet, f"p{number}")
        assert abs(len(servers[0].programs) - len(servers[1].programs)) <= 5


async def test_all_that_a_program_asks_for_reaches_its_server_and_nothing_is_left():
    async with listening({}, {}) as servers, open_fleet([link(s.url) for s in servers]) as fleet:
        for name, kind in ((A, 0), (B, 1)):
            await prepare(fleet, name, needing(kind=kind))
        for name in (A, B):
            result = await fleet.call(name, C1, ToolCall("echo", "7"), timeout_s=10, priority=1)
            assert result.content == "7"
            assert (await fleet.move(name, SandboxRung.PAUSED)).rung is SandboxRung.PAUSED
            state = await fleet.state_of(name)
            assert state is not None
            assert (state.program_id, state.phase, state.rung) == (name, "ready", SandboxRung.PAUSED)
            assert (await fleet.reward(name, CallId("r"), EPISODE, timeout_s=10)).value == 1.0
        assert sorted(map(len, (server.programs for server in servers))) == [1, 1]
        for name in (A, B, A):
            await fleet.release(name)
        assert not any(server.programs for server in servers)
        with pytest.raises(ToolServerError, match="no program a on any tool server"):
            await fleet.call(A, C1, ToolCall("echo", "7"), timeout_s=10)
        assert await fleet.state_of(A) is None


async def test_what_the_infrastructure_could_not_prepare_is_prepared_on_another_server():
    async with (
        listening({}, {}, broken=(0,)) as (broken, sound),
        open_fleet([link(broken.url), link(sound.url)]) as fleet,
    ):
        for number in range(4):
            await prepare(fleet, f"p{number}", needing(kind=number))
        assert len(sound.programs) == 4
        # One that has just failed comes last.
        assert broken.hosts.described["Form"] == 1


async def test_a_preparation_is_tried_on_two_servers_and_no_more():
    async with (
        listening({}, {}, {}, broken=(0, 1, 2)) as servers,
        open_fleet([link(server.url) for server in servers]) as fleet,
    ):
        with pytest.raises(SandboxError, match="no space left"):
            await prepare(fleet, "a")
        assert sum(server.hosts.described["Form"] for server in servers) == 2
        await fleet.release(A)


async def test_what_is_the_environments_own_fault_is_not_tried_elsewhere():
    async with listening({}, {}) as servers, open_fleet([link(s.url) for s in servers]) as fleet:
        with pytest.raises(EnvironmentFailure, match="why"):
            await prepare(fleet, "a", fail="why")
        with pytest.raises(ConfigError, match="has no method"):
            await prepare(fleet, "b", EnvironmentRef(name="Broken", import_path="tests:Broken"))
        assert sum(server.hosts.described.total() for server in servers) == 2
        assert repr(fleet).count("=0") == 2


async def test_a_preparation_that_is_cancelled_is_given_back_by_its_release():
    stuck = EnvironmentRef(name="Stuck", import_path="tests:Stuck")
    async with listening({}, {}) as servers, open_fleet([link(s.url) for s in servers]) as fleet:
        async with anyio.create_task_group() as group:
            group.start_soon(partial(fleet.prepare, A, stuck, {}, seed=0, timeout_s=20))
            await until(lambda: any(server.programs for server in servers))
            group.cancel_scope.cancel()
        await fleet.release(A)
        assert not any(server.programs or server.backend.live for server in servers)
        assert repr(fleet).count("=0") == 2


async def test_a_program_that_is_cancelled_at_any_moment_leaves_nothing():
    async with listening({}, {}) as servers, open_fleet([link(s.url) for s in servers]) as fleet:

        async def live(name: str) -> None:
            await prepare(fleet, name, needing(kind=len(name)))
            await fleet.call(ProgramId(name), C1, ToolCall("sleep", "0.01"), timeout_s=10)
            await fleet.release(ProgramId(name))

        for number in range(24):
            name = "p" * (number + 1)
            with anyio.move_on_after(number / 1000):
                await live(name)
            await fleet.release(ProgramId(name))
            assert repr(fleet).count("=0") == 2
        await until(lambda: not any(server.programs or server.backend.live for server in servers))


async def test_a_wrong_token_is_said_at_the_start_with_the_servers_name():
    async with listening({}, {}) as (right, wrong):
        said = rf"tool_servers: {wrong.url}: .*bearer token; see its token_env"
        with pytest.raises(ConfigError, match=said):
            async with open_fleet([link(right.url), link(wrong.url, token="x" * 20)]):
                pass


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


async def test_a_fleet_begins_with_the_servers_that_answer_and_needs_one():
    nobody = f"http://127.0.0.1:{free_port()}"
    async with listening({}) as (there,), open_fleet([link(nobody), link(there.url)]) as fleet:
        assert fleet.living == (there.url,)
        assert fleet.isolation == "none"
        await prepare(fleet, "a")
    with pytest.raises(ToolServerError, match=rf"no tool server answers: {nobody}: .*lost"):
        async with open_fleet([link(nobody)]):
            pass


async def test_heartbeats_keep_the_programs_on_every_server():
    async with (
        listening({"lease_s": 0.5}, {"lease_s": 0.5}) as servers,
        open_fleet([link(server.url, lease_s=0.5) for server in servers]) as fleet,
    ):
        for number in range(2):
            await prepare(fleet, f"p{number}", needing(kind=number))
        await anyio.sleep(1.5)
        assert [len(server.programs) for server in servers] == [1, 1]
        for number in range(2):
            await fleet.release(ProgramId(f"p{number}"))


async def test_a_killed_server_fails_its_programs_at_once_and_takes_new_ones_when_it_is_back():
    with server() as (there, living), server(port=free_port()) as (process, url):
        async with open_fleet([link(living), link(url, lease_s=1.0)]) as fleet:
            names = await one_on_each(fleet)
            failed: dict[str, str] = {}
            async with anyio.create_task_group() as group:
                for name in names:
                    group.start_soon(sleep, fleet, name, failed)
                await calls_run(living)
                process.kill()
                await until(lambda: fleet.living == (living,))
            ((name, why),) = failed.items()
            assert "lost" in why
            with pytest.raises(ToolServerError, match=rf"tool server {url} was lost, with all programs on"):
                await fleet.reward(ProgramId(name), CallId("r"), EPISODE, timeout_s=10)
            for number in range(3):
                await prepare(fleet, f"later{number}", needing(kind=10 + number))
            with anyio.fail_after(1):
                await fleet.release(ProgramId(name))
            with server(port=int(url.rpartition(":")[2])):
                await until(lambda: url in fleet.living)
                await prepare(fleet, "again", needing(kind=20))
                async with ToolServerClient(url, TOKEN, "who") as client:
                    (program,) = (await client.state()).programs
                    assert program.program_id == "again"
                await fleet.release(ProgramId("again"))
        assert there.poll() is None


async def one_on_each(fleet: ToolFleet) -> tuple[str, str]:
    await prepare(fleet, "a", needing(kind=0))
    await prepare(fleet, "b", needing(kind=1))
    return "a", "b"


async def calls_run(url: str) -> None:
    async with ToolServerClient(url, TOKEN, "who") as client:
        while (await client.state()).programs[0].phase != "calling":  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def test_a_server_that_hangs_is_lost_and_what_it_kept_is_released_when_it_answers_again():
    with server() as (_, living), server(lease_s=1000) as (process, url):
        async with open_fleet([link(living), link(url, lease_s=0.5)]) as fleet:
            names = await one_on_each(fleet)
            await stopped(process)
            failed: dict[str, str] = {}
            async with anyio.create_task_group() as group:
                for name in names:
                    group.start_soon(sleep, fleet, name, failed)
            (why,) = failed.values()
            assert why.startswith(f"tool server {url} was lost, with all programs on it: ")
            with anyio.fail_after(1):
                for name in names:
                    await fleet.release(ProgramId(name))
            process.send_signal(signal.SIGCONT)
            await until(lambda: url in fleet.living)
            async with ToolServerClient(url, TOKEN, "who") as client:
                with anyio.fail_after(10):
                    while (await client.state()).programs:  # noqa: ASYNC110
                        await anyio.sleep(0.02)
                assert (await client.state()).counters["fenced_programs"] == 1


async def sleep(fleet: ToolFleet, name: str, failed: dict[str, str]) -> None:
    """Call a tool of the program that takes a second, or enter why it failed."""
    try:
        await fleet.call(ProgramId(name), C1, ToolCall("sleep", "1"), timeout_s=100)
    except ToolServerError as error:
        failed[name] = str(error)


async def stopped(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    with suppress(ChildProcessError):
        await anyio.to_thread.run_sync(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


async def test_what_sandboxes_may_take_is_the_sum_of_the_servers_that_answer():
    told: list[int | None] = []

    def tell(limits: ToolServerJoined) -> None:
        told.append(limits.memory_bytes)

    with (
        server(sandbox_memory_bytes=100) as (_, living),
        server(sandbox_memory_bytes=300, port=free_port()) as (process, url),
    ):
        async with open_fleet([link(living), link(url, lease_s=0.5)]) as fleet:
            with fleet.limiting(tell):
                process.kill()
                await until(lambda: len(told) == 2)
                with server(sandbox_memory_bytes=500, port=int(url.rpartition(":")[2])):
                    await until(lambda: len(told) == 3)
            assert told == [400, 100, 600]


async def test_sandboxes_are_not_limited_together_where_one_server_sets_no_limit():
    told: list[ToolServerJoined] = []
    async with (
        listening({"sandbox_memory_bytes": 100}, {}) as servers,
        open_fleet([link(server.url) for server in servers]) as fleet,
    ):
        with fleet.limiting(told.append):
            assert told == [ToolServerJoined()]
