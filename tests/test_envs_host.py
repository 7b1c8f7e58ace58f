"""Worker processes: what an environment's code does to its own program."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from pydantic import JsonValue

from fakes_envs import FakeSandbox, Zoo
from hosts import LEDGER, ZOO, call, prepare, prepare_ledger, score, until, with_pool
from sostenuto.envs.environment import Environment
from sostenuto.envs.pool import WorkerPool
from sostenuto.envs.registry import environment_ref
from sostenuto.errors import ConfigError, EnvironmentFailure, SandboxError, ToolServerError
from sostenuto.tools.wire import EnvironmentRef, PrepareRequest
from sostenuto.types import Message, ProgramId, ToolStatus


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
