"""Tool server and client over real sockets."""

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import anyio
import anyio.lowlevel
import pytest
from aiohttp import web

from fakes_tools import FORM, SECRET, TOKEN, FakeBackend, FakeHosts, config
from sostenuto.errors import ConfigError, EnvironmentFailure, PathError, ToolServerError
from sostenuto.sandbox.protocol import SandboxLimits
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.server import listen
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.types import (
    CallId,
    Episode,
    ProgramId,
    SandboxRung,
    StopReason,
    ToolCall,
    ToolResult,
    ToolStatus,
)

A = ProgramId("job/1 ü")
C1 = CallId("c1")
EPISODE = Episode(messages=(), stop_reason=StopReason.ANSWERED)


@dataclass
class Served:
    url: str
    client: ToolServerClient
    backend: FakeBackend
    hosts: FakeHosts

    async def nothing_left(self) -> None:
        """Wait until no program is here, and see that nothing else is."""
        with anyio.fail_after(10):
            while (await self.client.state()).programs:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert not self.backend.live
        assert not self.hosts.host.programs


@asynccontextmanager
async def serving(**changes: object) -> AsyncGenerator[Served]:
    backend, hosts = FakeBackend(), FakeHosts()
    async with (
        listen(config(**changes), backend, hosts, Secrets({"KEY": SECRET})) as url,
        ToolServerClient(url, TOKEN, "owner/1") as client,
    ):
        yield Served(url, client, backend, hosts)
    assert not backend.live
    assert not hosts.host.programs


async def raw(
    served: Served, method: str, path: str, body: bytes = b"", token: str = TOKEN
) -> tuple[int, dict[str, object]]:
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, served.url + path, data=body) as response,
    ):
        return response.status, await response.json()


async def test_a_program_lives_over_http_from_prepare_to_release():
    async with serving() as served:
        client = served.client
        prepared = await client.prepare(A, FORM, {"question": "why?"}, seed=7)
        assert prepared.messages[0].content == "why?"
        assert served.hosts.host.seeds == {A: 7}
        result = await client.call(A, C1, ToolCall("echo", '{"x": 1}'))
        assert result == ToolResult(ToolStatus.OK, '{"x": 1}')
        assert await client.read(A, "a.txt") == b"hello"
        await client.write(A, "dir/b c#ü.bin", b"\x00\xff")
        assert await client.read(A, "dir/b c#ü.bin") == b"\x00\xff"
        assert (await client.shell(A, "x" * 100, output_bytes=50)).cut_bytes > 50
        assert (await client.move(A, SandboxRung.PAUSED)).rung is SandboxRung.PAUSED
        assert all(sandbox.paused for sandbox in served.backend.live.values())
        await client.move(A, SandboxRung.RUNNING)
        assert (await client.reward(A, CallId("r1"), EPISODE)).value == 1.0
        state = await client.state()
        assert (state.programs[0].program_id, state.programs[0].sandbox) == (A, "fake")
        assert state.owners["owner/1"] == pytest.approx(30, abs=5)
        await client.release(A)
        await client.release(A)
        await served.nothing_left()


async def test_errors_keep_their_type_and_their_blame_over_http():
    async with serving() as served:
        client = served.client
        with pytest.raises(ConfigError, match="no method `reward`"):
            await client.prepare(A, EnvironmentRef(name="Broken"), {})
        with pytest.raises(EnvironmentFailure, match="reset raised"):
            await client.prepare(A, FORM, {"fail": "x"})
        with pytest.raises(ToolServerError, match=r"no program job/1 ü here"):
            await client.call(A, C1, ToolCall("echo", "1"))
        await client.prepare(A, FORM, {})
        with pytest.raises(EnvironmentFailure, match=r"KeyError: \[secret KEY\]"):
            await client.call(A, C1, ToolCall("crash", "1"))
        with pytest.raises(PathError, match=r"no file nowhere"):
            await client.read(A, "nowhere")
        with pytest.raises(ToolServerError, match="bearer token"):
            async with ToolServerClient(served.url, "wrong", "me") as stranger:
                await stranger.state()


async def test_no_secret_leaves_by_any_route():
    async with serving() as served:
        client = served.client
        await client.prepare(A, FORM, {"question": SECRET})
        assert (await client.call(A, C1, ToolCall("secret", "{}"))).content == "token=[secret KEY]."
        assert (await client.shell(A, f"echo {SECRET}")).output == "echo [secret KEY]"
        cut = (await client.shell(A, "x" * 2 + SECRET * 9, output_bytes=50)).output
        assert SECRET[:6] not in cut
        await client.write(A, "s", b"\xff" + SECRET.encode())
        assert await client.read(A, "s") == b"\xff[secret KEY]"
        assert (await client.reward(A, CallId("r"), EPISODE)).metrics == {"[secret KEY]": 1.0}
        program = ProgramId(SECRET)
        with pytest.raises(ToolServerError, match=r"no program \[secret KEY\] here"):
            await client.call(program, C1, ToolCall("echo", "1"))


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/programs/a/call", b"", 400, "CallRequest: body: Invalid JSON"),
        ("/v1/programs/a/call", b"\xff\xfe", 400, "CallRequest: body: Invalid JSON"),
        ("/v1/programs/a/call", b"[]", 400, "CallRequest: body"),
        ("/v1/programs/a/call", b'{"call_id": "\\ud800", "name": "a", "arguments": ""}', 400, "Invalid JSON"),
        ("/v1/programs/a/call", b'{"call_id": "", "name": "a", "arguments": ""}', 400, "call_id"),
        ("/v1/programs/a/call", b'{"call_id": "c", "name": 1, "arguments": ""}', 400, "CallRequest: name"),
        (
            "/v1/programs/a/call",
            b'{"call_id": "c", "name": "a", "arguments": "", "timeout_s": -1}',
            400,
            "timeout_s",
        ),
        ("/v1/programs/a/call", b'{"call_id": "c", "name": "a", "arguments": "", "x": 1}', 400, "x: Extra"),
        ("/v1/programs/a/prepare", b'{"owner": "o", "environment": {}, "task": {}}', 400, "environment.name"),
        ("/v1/programs/a/reward", b'{"call_id": "c", "episode": {"messages": 3}}', 400, "episode.messages"),
        ("/v1/owners/o/heartbeat", b'{"lease_s": NaN}', 400, "lease_s"),
        ("/v1/programs/a/shell", b'{"command": "ls"}', 404, "no program a here"),
        ("/v1/programs/a/dance", b"", 404, "POST /v1/programs/a/dance: Not Found"),
        ("/v1/state", b"", 405, "Method Not Allowed"),
        ("/v1/programs/a/call", b"x" * 5000, 413, "Request Entity Too Large"),
    ],
)
async def test_bad_input_is_refused_with_the_field_named(path: str, body: bytes, status: int, words: str):
    async with serving(body_bytes=4096) as served:
        got, refusal = await raw(served, "POST", path, body)
        assert got == status
        assert words in str(refusal["message"])


async def test_every_route_but_health_wants_the_token():
    async with serving() as served:
        assert (await raw(served, "GET", "/health", token="wrong"))[0] == 200
        for path in ("/v1/state", "/v1/programs/a/files/x", "/nowhere"):
            status, refusal = await raw(served, "GET", path, token="wrong")
            assert (status, refusal["error"]) == (401, "ToolServerError")


async def test_a_port_in_use_is_named_with_the_remedy():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port: 127.0.0.1:{port} is in use; choose another, or 0"):
            async with serving(port=port):
                pass


async def test_a_client_that_hangs_up_during_a_call_gets_the_result_when_it_asks_again():
    async with serving() as served:
        await served.client.prepare(A, FORM, {})
        with anyio.move_on_after(0.1) as gone:
            await served.client.call(A, C1, ToolCall("sleep", "0.4"))
        assert gone.cancelled_caught
        result = await served.client.call(A, C1, ToolCall("sleep", "0.4"))
        assert result.status is ToolStatus.OK
        assert served.hosts.host.runs == {"0.4": 1}


async def test_what_was_started_ahead_is_told_with_what_the_server_has():
    async with serving(warm=1) as served:
        assert (await served.client.supply()).warm_memory_bytes == 0
        await served.client.prepare(A, FORM, {})
        assert (await served.client.supply()).warm_memory_bytes == SandboxLimits().memory_bytes


async def test_a_client_that_hangs_up_during_a_prepare_leaves_nothing():
    async with serving() as served:
        with anyio.move_on_after(0.1):
            await served.client.prepare(A, EnvironmentRef(name="Stuck"), {})
        await served.nothing_left()


async def test_clients_that_hang_up_at_any_step_leave_nothing_after_the_release():
    async with serving() as served:

        async def life() -> None:
            await served.client.prepare(A, FORM, {})
            await served.client.call(A, C1, ToolCall("sleep", "0.001"))
            await served.client.reward(A, CallId("r"), EPISODE)
            await served.client.release(A)

        for step in range(1, 60):
            async with anyio.create_task_group() as group:
                group.start_soon(life)
                for _ in range(step):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            await served.client.release(A)
            await served.nothing_left()


async def test_a_call_survives_the_loss_of_its_connection_and_runs_once():
    lost: list[str] = []
    async with (
        serving() as served,
        lossy(served.url, lost) as url,
        ToolServerClient(url, TOKEN, "me") as client,
    ):
        await served.client.prepare(A, FORM, {})
        result = await client.call(A, C1, ToolCall("echo", "1"))
        assert result.content == "1"
        assert served.hosts.host.runs == {"1": 1}
        with pytest.raises(ToolServerError, match="lost"):
            await client.shell(A, "ls")
    assert lost == ["call", "shell"]


@asynccontextmanager
async def lossy(upstream: str, lost: list[str]) -> AsyncGenerator[str]:
    """A proxy that passes every request on and drops the first answer of each action."""

    async def forward(request: web.Request) -> web.Response:
        async with (
            aiohttp.ClientSession(headers={"Authorization": request.headers["Authorization"]}) as session,
            session.post(f"{upstream}{request.raw_path}", data=await request.read()) as response,
        ):
            body = await response.read()
        action = request.path.rsplit("/", 1)[1]
        if action not in lost:
            lost.append(action)
            assert request.transport is not None
            request.transport.abort()
        return web.Response(body=body, status=response.status)

    application = web.Application()
    application.router.add_post("/{path:.*}", forward)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_server_that_is_gone_is_an_error_after_a_bounded_time():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    async with ToolServerClient(f"http://127.0.0.1:{port}", TOKEN, "me", repeat_s=0.3, lease_s=0.5) as client:
        with pytest.raises(ToolServerError, match=r"connection to .* lost"):
            await client.call(A, C1, ToolCall("echo", "1"))
        with pytest.raises(ToolServerError, match=r"heartbeat: (connection|no answer)"):
            await client.heartbeats()


async def test_a_server_that_does_not_answer_is_an_error_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with ToolServerClient(url, TOKEN, "me", slack_s=0.1) as client:
            with pytest.raises(ToolServerError, match="no answer from"):
                await client.call(A, C1, ToolCall("echo", "1"), timeout_s=0.1)


async def test_an_answer_that_is_not_what_was_agreed_is_an_error_that_says_so():
    async def strange(_: web.Request) -> web.Response:
        return web.json_response({"status": "odd"}, status=200)

    async def broken(_: web.Request) -> web.Response:
        return web.Response(text="<html>bad gateway</html>", status=502)

    application = web.Application()
    application.router.add_post("/{_:.*}", strange)
    application.router.add_get("/{_:.*}", broken)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with ToolServerClient(url, TOKEN, "me", repeat_s=0) as client:
            with pytest.raises(ToolServerError, match="not what was agreed"):
                await client.call(A, C1, ToolCall("echo", "1"))
            with pytest.raises(ToolServerError, match="status 502: <html>bad gateway"):
                await client.state()
    finally:
        await runner.cleanup()


async def test_heartbeats_keep_programs_and_their_end_releases_them():
    async with (
        serving(lease_s=1.5) as served,
        ToolServerClient(served.url, TOKEN, "beating", lease_s=1.5) as client,
    ):
        async with anyio.create_task_group() as group:
            group.start_soon(client.heartbeats)
            await client.prepare(A, FORM, {})
            await anyio.sleep(2.5)
            assert (await client.state()).programs
            group.cancel_scope.cancel()
        await served.nothing_left()
        assert (await client.state()).counters["expired_programs"] == 1


async def test_a_server_that_ends_releases_its_programs_and_answers_their_calls():
    hosts = FakeHosts()
    running = anyio.Event()

    async def call_for_long(url: str) -> None:
        async with ToolServerClient(url, TOKEN, "me") as client:
            await client.prepare(A, FORM, {})
            running.set()
            with pytest.raises(ToolServerError, match="was released before"):
                await client.call(A, C1, ToolCall("sleep", "100"))

    # The server ends first: the group waits for the client.
    async with (
        anyio.create_task_group() as group,
        listen(config(), FakeBackend(), hosts, Secrets({})) as url,
    ):
        group.start_soon(call_for_long, url)
        with anyio.fail_after(10):
            await running.wait()
            while not hosts.host.runs:  # noqa: ASYNC110
                await anyio.sleep(0.01)
    assert not hosts.host.programs
