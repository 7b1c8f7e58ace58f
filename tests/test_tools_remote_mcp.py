"""Tools of real MCP servers, over pipes and over HTTP on 127.0.0.1."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from socket import create_connection, create_server

import anyio
import psutil
import pytest

from hosts import until_gone
from remote_services import KEY, remote_tools, saying, service
from sostenuto.errors import ConfigError, ToolServerError, Unsupported
from sostenuto.tools.remote.declared import McpServer
from sostenuto.tools.remote.tool import RemoteTool
from sostenuto.types import ToolStatus

pytest.importorskip("mcp", reason="the mcp package is not installed: sostenuto[mcp]")

SCRIPT = str(Path(__file__).with_name("mcp_example.py"))
COMMAND = (sys.executable, SCRIPT)


def over_pipes(**changes: object) -> McpServer:
    given = {"name": "example", "command": COMMAND, **changes}
    return McpServer(**given)  # pyright: ignore[reportArgumentType]


@contextmanager
def running_server(port: int) -> Generator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)
    try:
        while not _answers(port) and process.poll() is None:
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url() -> Generator[str]:
    """Of one server for all tests that leave it alone."""
    port = free_port()
    with running_server(port):
        yield f"http://127.0.0.1:{port}/mcp"


def free_port() -> int:
    with closing(create_server(("127.0.0.1", 0))) as taken:
        return taken.getsockname()[1]


def _answers(port: int) -> bool:
    try:
        create_connection(("127.0.0.1", port), timeout=0.1).close()
    except OSError:
        return False
    return True


def at(url: str, **changes: object) -> McpServer:
    given = {"name": "example", "url": url, "start_s": 20, **changes}
    return McpServer(**given)  # pyright: ignore[reportArgumentType]


async def pid_of(tools: dict[str, RemoteTool]) -> int:
    return int((await tools["whoami"].call("")).content.split()[0])


async def test_tools_are_listed_with_their_schemas_and_called(url: str):
    async with remote_tools(at(url, concurrency=4, timeout_s=7)) as tools:
        assert set(tools) == {"search", "whoami", "wait", "fail", "die", "picture"}
        schema = tools["search"].schema
        assert schema.description == "Search the archive."
        assert schema.parameters["required"] == ["query"]
        assert (schema.timeout_s, schema.limits.concurrency, schema.limits.queue) == (7, 4, "mcp.example")
        result = await tools["search"].call('{"query": "x", "limit": 2}')
        assert (result.status, result.content) == (ToolStatus.OK, "2 of x")


async def test_only_what_is_allowed_is_offered(url: str):
    async with remote_tools(at(url, allow=("search", "wait"))) as tools:
        assert list(tools) == ["search", "wait"]


async def test_what_is_allowed_and_not_offered_is_an_error_of_configuration(url: str):
    with pytest.raises(ConfigError, match="it offers no tool 'serach'; did you mean 'search'"):
        async with remote_tools(at(url, allow=("serach",))):
            pass


async def test_names_that_are_taken_get_the_servers_name_before_them(url: str):
    async with remote_tools(at(url, allow=("search", "wait")), taken=("search",)) as tools:
        assert list(tools) == ["example_search", "wait"]
        assert (await tools["example_search"].call('{"query": "x"}')).content == "3 of x"
    with pytest.raises(ConfigError, match="two tools are called 'example_search'"):
        async with remote_tools(at(url, allow=("search",)), taken=("search", "example_search")):
            pass


async def test_what_a_tool_says_went_wrong_is_an_observation(url: str):
    async with remote_tools(at(url)) as tools:
        result = await tools["fail"].call('{"why": "no luck"}')
        assert result.status is ToolStatus.TOOL_ERROR
        assert "no luck" in result.content
        assert (await tools["search"].call("{}")).status is ToolStatus.INVALID_ARGUMENTS


async def test_a_slow_tool_is_a_timeout_and_its_neighbours_go_on(url: str):
    async with remote_tools(at(url, timeout_s=0.5)) as tools:
        result = await tools["wait"].call('{"seconds": 30}')
        assert (result.status, result.content) == (ToolStatus.TIMEOUT, "[wait timed out after 0.5 s]")
    async with remote_tools(at(url)) as tools:
        assert (await tools["search"].call('{"query": "x"}')).status is ToolStatus.OK


async def test_what_is_no_text_is_named(url: str):
    async with remote_tools(at(url)) as tools:
        assert (await tools["picture"].call("")).content == "[3 bytes of image/png]"


async def test_a_command_has_its_secrets_and_nothing_of_the_servers_own_and_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
):
    """Two declarations of it share its process."""
    monkeypatch.setenv("PRIVATE", "of the tool server")
    secret = {"API_KEY": "${KEY}"}
    twice = (
        over_pipes(allow=("whoami",), environment=secret),
        over_pipes(name="again", allow=("whoami",), environment=secret, timeout_s=9),
    )
    async with remote_tools(*twice) as tools:
        first, second = [(await tools[name].call("")).content for name in ("whoami", "again_whoami")]
        assert first == second
        pid, *variables = first.split()
        assert variables == [KEY, "None"]
    await until_gone(int(pid))


async def test_a_server_that_dies_fails_the_call_under_way_and_is_started_again():
    async with remote_tools(over_pipes()) as tools:
        pid = await pid_of(tools)
        with pytest.raises(ToolServerError, match="example ended while the call was under way, and how far"):
            await tools["die"].call("")
        again = await pid_of(tools)
        assert again != pid
        # Killed while nobody asks, too.
        os.kill(again, signal.SIGKILL)
        await until_gone(again)
        await anyio.sleep(1.0)  # so that the pipe's end has been seen
        assert await pid_of(tools) not in {pid, again}


async def test_a_server_behind_a_url_that_comes_back_is_asked_again():
    port = free_port()
    with running_server(port) as process:
        async with remote_tools(at(f"http://127.0.0.1:{port}/mcp")) as tools:
            process.kill()
            process.wait()
            with pytest.raises(ToolServerError):
                await tools["search"].call('{"query": "x"}')
            with running_server(port):
                await until_works(tools["search"])


async def until_works(tool: RemoteTool) -> None:
    with anyio.fail_after(15):
        while True:
            try:
                assert (await tool.call('{"query": "x"}')).status is ToolStatus.OK
            except ToolServerError:
                await anyio.sleep(0.2)
            else:
                return


async def test_a_program_that_speaks_no_mcp_says_what_it_wrote():
    command = ("/bin/sh", "-c", "echo no key given >&2; exit 3")
    with pytest.raises(ToolServerError, match=r"MCP server example does not run: .*no key given"):
        async with remote_tools(over_pipes(command=command)):
            pass


async def test_a_command_that_is_not_there_is_named():
    with pytest.raises(ToolServerError, match=r"does not run: FileNotFoundError: .*no-such-program"):
        async with remote_tools(over_pipes(command=("no-such-program",))):
            pass


def _sleeps(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # one that is dead is not reaped yet
        return "1000" in process.cmdline()
    return False


async def test_a_server_that_says_nothing_is_given_up_at_its_deadline_and_ended():
    with anyio.fail_after(20), pytest.raises(ToolServerError, match="does not run"):
        async with remote_tools(over_pipes(command=("/bin/sleep", "1000"), start_s=0.3)):
            pass
    assert not [child for child in psutil.Process().children() if _sleeps(child)]


async def test_a_page_that_is_no_mcp_server_is_no_server():
    async with service(saying("<html>")) as there:
        with pytest.raises(ToolServerError, match="does not run"):
            async with remote_tools(McpServer("web", url=there.url, start_s=3)):
                pass


async def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(Unsupported, match=r"install sostenuto\[mcp\]"):
        async with remote_tools(over_pipes()):
            pass
