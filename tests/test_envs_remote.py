"""An environment whose tools are partly its own and partly a service's, on a real worker."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from pydantic import BaseModel

from fakes_envs import FakeSandbox
from fakes_tools import FakeBackend, config
from remote_services import KEY, saying, service
from serving import calling
from sostenuto.envs.declaration import declaration
from sostenuto.envs.environment import Environment
from sostenuto.envs.pool import WorkerPool
from sostenuto.envs.registry import environment_ref
from sostenuto.envs.testing import so_test
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.errors import ConfigError, lone_error
from sostenuto.sandbox.protocol import ShellResult
from sostenuto.tools.decorator import tool
from sostenuto.tools.edge import Edge
from sostenuto.tools.programs import Programs, open_programs
from sostenuto.tools.remote.declared import HttpTool, McpServer
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.wire import Prepared, PrepareRequest
from sostenuto.types import Episode, ProgramId, ToolStatus

A = ProgramId("a")


class Task(BaseModel):
    question: str = "?"


class Searcher(Environment[Task]):
    """Look things up."""

    async def reset(self, task: Task) -> str:
        return task.question

    @tool(concurrency=2)
    async def note(self, text: str) -> str:
        """Write down."""
        return text

    async def reward(self, episode: Episode) -> float:
        return 1.0


def searcher(*remote: HttpTool | McpServer) -> type[Searcher]:
    class WithServices(Searcher):
        pass

    WithServices.remote = remote
    return WithServices


def search(url: str, **changes: object) -> HttpTool:
    given = {"name": "search", "url": url, "description": "Search.", **changes}
    return HttpTool(**given)  # pyright: ignore[reportArgumentType]


@asynccontextmanager
async def prepared(cls: type[Searcher]) -> AsyncGenerator[tuple[Programs, Prepared]]:
    edge = Edge(Secrets({"KEY": KEY}), 16384)
    request = PrepareRequest(owner="o", environment=environment_ref(cls), task={})
    with lone_error():
        async with WorkerPool() as hosts, open_programs(config(), FakeBackend(), hosts, edge) as programs:
            yield programs, await programs.prepare(A, request)


async def test_the_model_sees_one_list_and_calls_go_where_they_belong():
    async with service(saying(f"your key is {KEY}")) as there:
        remote = search(there.url, headers={"X-Key": "${KEY}"}, concurrency=3)
        async with prepared(searcher(remote)) as (programs, ready):
            assert [one.name for one in ready.tools] == ["note", "search"]
            assert [one.limits.concurrency for one in ready.tools] == [2, 3]
            own = await programs.call(A, calling("note", '{"text": "x"}', "c1"))
            found = await programs.call(A, calling("search", "{}", "c2"))
            again = await programs.call(A, calling("search", "{}", "c2"))
            unknown = await programs.call(A, calling("serach", "{}", "c3"))
        assert (own.content, found.content) == ("x", "your key is [secret KEY]")
        assert again == found
        assert [key for *_, key in there.requests] == [KEY]
        assert unknown.status is ToolStatus.INVALID_ARGUMENTS
        assert "did you mean 'search'" in unknown.content


async def test_what_a_service_says_keeps_within_the_cap_of_its_tool():
    async with service(saying("x" * 10_000)) as there:
        async with prepared(searcher(search(there.url, output_bytes=100))) as (programs, _):
            result = await programs.call(A, calling("search", "{}"))
        assert len(result.content) <= 100
        assert result.cut_bytes > 9_900


async def test_a_secret_that_the_server_does_not_have_stops_the_preparation():
    remote = search("http://127.0.0.1:9/", headers={"X-Key": "${OTHER}"})
    with pytest.raises(ConfigError, match=r"WithServices: remote: .*secret 'OTHER' was not given"):
        async with prepared(searcher(remote)):
            pass


@pytest.mark.parametrize(
    ("remote", "words"),
    [
        ((search("http://x/", name="note"),), "two tools are called 'note'; rename one of them"),
        ((search("http://x/"), search("http://y/")), "two tools are called 'search'"),
        (("http://x/",), "`remote` has a str; it takes HttpTool and McpServer"),
    ],
)
def test_what_cannot_be_declared_together_is_refused_at_registration(
    remote: tuple[HttpTool, ...], words: str
):
    with pytest.raises(ConfigError) as refused:
        declaration(searcher(*remote))
    assert words in str(refused.value)


async def test_an_author_can_try_the_remote_tools_of_an_environment():
    async with service(saying(f"your key is {KEY}" + "x" * 500)) as there:
        remote = search(there.url, headers={"X-Key": "${KEY}"}, output_bytes=100)
        async with so_test(searcher(remote), Task(), secrets={"KEY": KEY}) as trial:
            assert list(trial.tools) == ["note", "search"]
            assert (await trial.call("note", {"text": "own"})).content == "own"
            found = await trial.call("search", {})
            assert found.content.startswith("your key is [secret KEY]")
            assert len(found.content) <= 100
            assert [message.name for message in trial.messages if message.role == "tool"] == [
                "note",
                "search",
            ]
        assert [key for *_, key in there.requests] == [KEY]


async def test_what_goes_wrong_beside_remote_tools_is_raised_as_it_is():
    async with service(saying("x")) as there:
        with pytest.raises(ValueError, match="the author's own"):
            async with so_test(searcher(search(there.url)), Task()):
                raise ValueError("the author's own")
        with pytest.raises(ConfigError, match="secret 'KEY' was not given"):
            async with so_test(searcher(search(there.url, headers={"X-Key": "${KEY}"})), Task()):
                pass


class SmallSandbox(FakeSandbox):
    """Runs out of memory."""

    async def shell(self, command: str, *, timeout_s: float, output_bytes: int = 65536) -> ShellResult:
        return ShellResult(137, "half of it\n", out_of_memory=True)


class Hungry(Searcher):
    sandbox = SandboxSpec(memory_bytes=512 << 20)

    @tool
    async def bash(self, command: str) -> str:
        """Run a command."""
        return await self.sandbox.shell(command)


async def test_a_command_that_ran_out_of_memory_says_so_and_with_which_limit():
    async with so_test(Hungry, Task(), SmallSandbox()) as trial:
        result = await trial.call("bash", {"command": "sort huge"})
        assert result.content == "half of it\n[ended: out of memory (limit 512 MiB)]"
        assert result.status is ToolStatus.OK
        assert (await trial.call("note", {"text": "goes on"})).content == "goes on"
