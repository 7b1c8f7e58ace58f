"""Worker processes: what an environment's code does to its own program, to its neighbours and to nobody."""

import inspect
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import psutil
import pytest
from pydantic import JsonValue

from fakes_envs import FakeSandbox, Ledger, Zoo
from sostenuto.envs.environment import Environment
from sostenuto.envs.pool import WorkerPool
from sostenuto.envs.registry import environment_ref
from sostenuto.errors import ConfigError, EnvironmentFailure, SandboxError, ToolServerError
from sostenuto.sandbox.protocol import Sandbox
from sostenuto.tools.host import Host
from sostenuto.tools.wire import CallRequest, EnvironmentRef, Prepared, PrepareRequest, RewardRequest
from sostenuto.types import Episode, Message, ProgramId, StopReason, ToolResult, ToolStatus

ZOO = environment_ref(Zoo)
LEDGER = environment_ref(Ledger)
SUM: dict[str, JsonValue] = {"csv": "a,1", "question": "How much?", "answer": "1"}
SECRET = "open-sesame"


def with_pool(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Give the test a pool of its own, opened and closed in the test's task."""

    async def run(**arguments: object) -> None:
        async with WorkerPool(secrets={"TOKEN": SECRET}, grace_s=0.3) as pool:
            await test(pool, **arguments)

    others = list(inspect.signature(test).parameters.values())[1:]
    run.__name__ = test.__name__
    vars(run)["__signature__"] = inspect.Signature(others)
    return run


async def prepare(host: Host, program: str, how: str = "", ref: EnvironmentRef = ZOO) -> Prepared:
    request = PrepareRequest(owner="o", environment=ref, task={"how": how}, seed=3, timeout_s=0.5)
    return await host.prepare(ProgramId(program), request, None)


async def prepare_ledger(host: Host, program: str, sandbox: Sandbox | None) -> Prepared:
    return await host.prepare(
        ProgramId(program), PrepareRequest(owner="o", environment=LEDGER, task=SUM), sandbox
    )


async def call(host: Host, program: str, name: str, **arguments: JsonValue) -> ToolResult:
    request = CallRequest(call_id=f"{program}-{name}", name=name, arguments=json.dumps(arguments))
    return await host.call(ProgramId(program), request)


async def score(host: Host, program: str, answer: str = "") -> float:
    episode = Episode((Message("assistant", answer),), StopReason.ANSWERED)
    request = RewardRequest(call_id="r", episode=episode, timeout_s=0.5)
    return (await host.reward(ProgramId(program), request)).value


async def until_gone(pid: int) -> None:
    await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


async def until(is_so: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not is_so():  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.02)


@with_pool
async def test_a_program_lives_from_prepare_to_release(pool: WorkerPool):
    facts = await pool.describe(LEDGER)
    assert facts.blueprint is not None
    assert facts.blueprint.limits.memory_bytes == 512 << 20
    assert [tool.name for tool in facts.tools] == ["bash", "hasty", "read"]
    host, sandbox = await pool.choose(LEDGER), FakeSandbox()
    prepared = await prepare_ledger(host, "p", sandbox)
    assert prepared.messages == (Message("user", "How much?"),)
    assert prepared.tools == facts.tools
    assert sandbox.files == {"ledger.csv": b"a,1"}
    assert (await call(host, "p", "bash", command="cat ledger.csv")).content == "a,1"
    assert (await call(host, "p", "bash", command="fail 3")).content == "failing\n[exit code 3]"
    assert await score(host, "p", "1") == 1.0
    assert await score(host, "p", "2") == 0.0
    await host.release(ProgramId("p"))
    await host.release(ProgramId("p"))
    with pytest.raises(ToolServerError, match="prepare it first"):
        await call(host, "p", "bash", command="cat ledger.csv")


@with_pool
async def test_an_environment_with_a_sandbox_is_not_prepared_without_one(pool: WorkerPool):
    with pytest.raises(ConfigError, match="Ledger declares a sandbox"):
        await prepare_ledger(await pool.choose(LEDGER), "p", None)


@with_pool
async def test_what_a_hasty_command_wrote_comes_with_the_timeout(pool: WorkerPool):
    host = await pool.choose(LEDGER)
    await prepare_ledger(host, "p", FakeSandbox())
    result = await call(host, "p", "hasty", command="sleep 60")
    assert (result.status, result.content) == (ToolStatus.TIMEOUT, "slept\n[hasty timed out after 0.4 s]")


@with_pool
async def test_a_broken_sandbox_is_infrastructure_and_a_missing_file_is_an_observation(pool: WorkerPool):
    host = await pool.choose(LEDGER)
    await prepare_ledger(host, "p", FakeSandbox())
    broken = await call(host, "p", "bash", command="break")
    assert broken.status is ToolStatus.INFRASTRUCTURE_FAILURE
    assert "the sandbox is gone" in broken.content
    missing = await call(host, "p", "read", path="nowhere")
    assert missing.status is ToolStatus.TOOL_ERROR
    assert missing.content == "'nowhere': No such file or directory"


@with_pool
async def test_a_cancelled_call_cancels_what_it_does_in_the_sandbox(pool: WorkerPool):
    host, sandbox = await pool.choose(LEDGER), FakeSandbox()
    await prepare_ledger(host, "p", sandbox)
    sandbox.started = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: call(host, "p", "bash", command="sleep 60"))
        await sandbox.started.wait()
        group.cancel_scope.cancel()
    await until(lambda: bool(sandbox.cancelled))
    assert host.alive
    assert (await call(host, "p", "bash", command="cat ledger.csv")).status is ToolStatus.OK


@pytest.mark.parametrize(
    ("name", "arguments", "status", "says"),
    [
        ("echo", {"text": "hi"}, ToolStatus.OK, "hi"),
        ("structure", {}, ToolStatus.OK, '{"a":[1,2]}'),
        ("surrogate", {}, ToolStatus.OK, "a?b"),
        ("refuse", {}, ToolStatus.TOOL_ERROR, "not today"),
        ("ecco", {}, ToolStatus.INVALID_ARGUMENTS, "did you mean 'echo'?"),
        ("echo", {"txt": "hi"}, ToolStatus.INVALID_ARGUMENTS, "did you mean 'text'?"),
        ("slow", {}, ToolStatus.TIMEOUT, "[slow timed out after 0.2 s]"),
        ("crash", {}, ToolStatus.ENVIRONMENT_FAILURE, "tool crash of Zoo: ZeroDivisionError: "),
        ("exit", {}, ToolStatus.ENVIRONMENT_FAILURE, "SystemExit: 1"),
        ("invent_cancellation", {}, ToolStatus.ENVIRONMENT_FAILURE, "CancelledError"),
        ("unfit", {}, ToolStatus.ENVIRONMENT_FAILURE, "return a str"),
    ],
)
@with_pool
async def test_what_comes_of_a_call(
    pool: WorkerPool, name: str, arguments: dict[str, JsonValue], status: ToolStatus, says: str
):
    host = await pool.choose(ZOO)
    await prepare(host, "p")
    result = await call(host, "p", name, **arguments)
    assert result.status is status
    assert says in result.content
    assert host.alive


@with_pool
async def test_a_failure_names_the_line_in_the_authors_file(pool: WorkerPool):
    host = await pool.choose(ZOO)
    await prepare(host, "p")
    source = Path(__file__).with_name("fakes_envs.py")
    line = next(n for n, text in enumerate(source.read_text().splitlines(), 1) if "1 // 0" in text)
    assert f"({source}:{line})" in (await call(host, "p", "crash")).content


@with_pool
async def test_a_flood_keeps_head_and_tail_and_names_the_cut(pool: WorkerPool):
    host = await pool.choose(ZOO)
    await prepare(host, "p")
    result = await call(host, "p", "flood")
    assert len(result.content) <= 200
    assert result.content.startswith("aaa")
    assert result.content.endswith("z")
    assert f"{result.cut_bytes} bytes cut" in result.content


@with_pool
async def test_serial_tools_run_one_at_a_time_and_others_together(pool: WorkerPool):
    host = await pool.choose(ZOO)
    await prepare(host, "p")
    seen: dict[str, list[str]] = {"alone": [], "together": []}

    async def note(name: str) -> None:
        seen[name].append((await call(host, "p", name)).content)

    for name in seen:
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(note, name)
    assert seen["alone"] == ["1"] * 4
    assert max(map(int, seen["together"])) == 4


@with_pool
async def test_finish_marks_the_result_as_the_last(pool: WorkerPool):
    host = await pool.choose(ZOO)
    await prepare(host, "p")
    assert not (await call(host, "p", "echo", text="x")).done
    assert (await call(host, "p", "stop")).done


@with_pool
async def test_messages_begin_with_the_system_message_and_seed_and_options_arrive(pool: WorkerPool):
    ref = environment_ref(Zoo, greeting="ciao")
    prepared = await prepare(await pool.choose(ref), "p", ref=ref)
    assert prepared.messages == (Message("system", "Be careful."), Message("user", "ciao 3"))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("reset raises", r"program p: reset of Zoo: KeyError: 'no such world' \(.*fakes_envs.py:\d+\)"),
        ("reset exits", "SystemExit: 3"),
    ],
)
@with_pool
async def test_a_failed_reset_is_the_environments_and_leaves_nothing(pool: WorkerPool, how: str, says: str):
    host = await pool.choose(ZOO)
    with pytest.raises(EnvironmentFailure, match=says):
        await prepare(host, "p", how)
    await prepare(host, "p")


@with_pool
async def test_a_task_that_does_not_fit_is_refused_by_field(pool: WorkerPool):
    host = await pool.choose(LEDGER)
    request = PrepareRequest(owner="o", environment=LEDGER, task={"csv": 3, "question": "?"})
    with pytest.raises(EnvironmentFailure, match=r"no LedgerTask: csv: .*; answer: Field required"):
        await host.prepare(ProgramId("p"), request, FakeSandbox())


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("reward raises", "reward of Zoo: ValueError: cannot score"),
        ("reward is nan", "a reward must be finite"),
        ("reward is text", "return a finite float"),
    ],
)
@with_pool
async def test_a_reward_that_is_no_number_is_a_failure_and_never_a_zero(
    pool: WorkerPool, how: str, says: str
):
    host = await pool.choose(ZOO)
    await prepare(host, "p", how)
    with pytest.raises(EnvironmentFailure, match=says):
        await score(host, "p")


@with_pool
async def test_an_error_in_close_is_logged_and_the_program_is_released(
    pool: WorkerPool, caplog: pytest.LogCaptureFixture
):
    host = await pool.choose(ZOO)
    await prepare(host, "p", "close raises")
    await host.release(ProgramId("p"))
    assert "close of Zoo: RuntimeError: cannot close" in caplog.text
    await prepare(host, "p")


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


@with_pool
async def test_describe_names_what_is_wrong_with_a_class(pool: WorkerPool):
    for path, says in (
        ("fakes_envs:Ledgr", "did you mean 'Ledger'"),
        ("no_such_module:Ledger", "no module 'no_such_module'"),
        ("fakes_envs:FakeSandbox", "not an Environment class"),
    ):
        with pytest.raises(ConfigError, match=says):
            await pool.describe(EnvironmentRef(name="x", import_path=path))
    with pytest.raises(ConfigError, match="cannot be read"):
        await pool.describe(EnvironmentRef(name="x", pickled="bm90IGEgcGlja2xl"))
    with pytest.raises(ConfigError, match="no option 'greting'; did you mean 'greeting'"):
        await pool.describe(ZOO.model_copy(update={"options": {"greting": "x"}}))


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text)
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)


SCRIPT = '''
from __future__ import annotations
import anyio, json
from pydantic import BaseModel
from sostenuto.envs.environment import Environment
from sostenuto.envs.pool import WorkerPool
from sostenuto.envs.registry import environment_ref
from sostenuto.tools.decorator import tool
from sostenuto.tools.wire import CallRequest, PrepareRequest

class Point(BaseModel):
    x: int

class Task(BaseModel):
    point: Point

def double(x):
    return 2 * x

class Local(Environment[Task]):
    async def reset(self, task: Task) -> str:
        return str(double(task.point.x))

    @tool
    async def second(self, point: Point) -> str:
        """Second by name, first by place."""
        return str(double(point.x))

    @tool
    async def first(self) -> str:
        """First by name."""
        return str(1 // 0)

    async def reward(self, episode: Episode) -> float:
        return 1.0

async def main():
    ref = environment_ref(Local)
    assert ref.import_path is None
    async with WorkerPool() as pool:
        host = await pool.choose(ref)
        task = {"point": {"x": 4}}
        prepared = await host.prepare("p", PrepareRequest(owner="o", environment=ref, task=task), None)
        print(prepared.messages[0].content, [t.name for t in prepared.tools])
        for name, arguments in (("second", task), ("first", {})):
            request = CallRequest(call_id=name, name=name, arguments=json.dumps(arguments))
            result = await host.call("p", request)
            print(result.content)

if __name__ == "__main__":
    anyio.run(main)
'''


def test_a_class_of_a_script_travels_by_value(tmp_path: Path):
    done = run_script(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["8 ['second', 'first']", "8"]
    line = next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if "1 // 0" in text)
    assert f"script.py:{line})" in lines[2]


@with_pool
async def test_a_class_of_a_local_scope_travels_by_value(pool: WorkerPool):
    def make(word: str) -> type[Environment]:
        class Here(Zoo):
            def reset(self, task: object) -> str:
                return word

        return Here

    makers: list[Callable[[], type[Environment]]] = [lambda: make("one"), lambda: make("two")]
    for maker, word in zip(makers, ("one", "two"), strict=True):
        ref = environment_ref(maker())
        prepared = await prepare(await pool.choose(ref), word, ref=ref)
        assert prepared.messages[1].content == word


@with_pool
async def test_a_broken_sandbox_in_reset_is_infrastructure(pool: WorkerPool):
    class Gone(FakeSandbox):
        async def write(self, path: str, data: bytes) -> None:
            raise SandboxError("the disk is full")

    with pytest.raises(SandboxError, match="program p: reset of Ledger: SandboxError: the disk is full"):
        await prepare_ledger(await pool.choose(LEDGER), "p", Gone())
