"""Environments as their authors write and try them, in this process."""

import random
import threading
from pathlib import Path

import anyio
import pytest

from fakes_envs import FakeSandbox, Ledger, LedgerTask, Plain, Zoo
from sostenuto.envs.declaration import declaration
from sostenuto.envs.environment import Environment
from sostenuto.envs.registry import Registry, environment_ref, load_environment
from sostenuto.envs.testing import so_test
from sostenuto.envs.workspace import SandboxSpec, Workspace
from sostenuto.errors import ConfigError, EnvironmentFailure, SandboxError, ToolError
from sostenuto.tools.decorator import tool
from sostenuto.types import Episode, Message, ToolStatus

TASK = LedgerTask(csv="a,1", question="How much?", answer="1")


async def test_an_author_tries_an_environment_without_a_server():
    async with so_test(Ledger, TASK, FakeSandbox()) as program:
        assert program.messages == [Message("user", "How much?")]
        assert (await program.call("bash", {"command": "cat ledger.csv"})).content == "a,1"
        assert (await program.call("bash", "{")).status is ToolStatus.INVALID_ARGUMENTS
        assert await program.reward(answer="1") == 1.0
        assert await program.reward(answer="2") == 0.0


async def test_metrics_come_beside_the_reward():
    async with so_test(Zoo, Plain(how="reward has metrics")) as program:
        verdict = await program.verdict()
        assert (verdict.value, verdict.metrics) == (0.5, {"length": 3.0})


async def test_an_error_in_close_reaches_the_author():
    with pytest.raises(EnvironmentFailure, match="cannot close"):
        async with so_test(Zoo, Plain(how="close raises")):
            pass


async def test_a_secret_that_was_not_given_is_named():
    async with so_test(Zoo, Plain(), secrets={"TOKN": "open-sesame"}) as program:
        result = await program.call("secret")
        assert result.status is ToolStatus.ENVIRONMENT_FAILURE
        assert "secret 'TOKEN' was not given to the tool server; did you mean 'TOKN'?" in result.content


def test_a_demonstration_is_optional():
    assert Ledger.demonstrate(TASK, random.Random(0))[-1].content == "1"
    with pytest.raises(ConfigError, match="Zoo has no `demonstrate`"):
        Zoo.demonstrate(Plain(), random.Random(0))


def test_what_a_class_lacks_is_named_with_the_remedy():
    class NoReward(Environment):
        async def reset(self, task: Plain) -> str:
            return ""

    class NoReset(Environment):
        async def reward(self, episode: Episode) -> float:
            return 0.0

    class Untyped(NoReward):
        async def reset(self, task) -> str:  # noqa: ANN001 # pyright: ignore[reportUnknownParameterType, reportMissingParameterType]
            return ""

        async def reward(self, episode: Episode) -> float:
            return 0.0

    class OddTask(Environment):
        async def reset(self, task: dict[str, int]) -> str:
            return ""

        async def reward(self, episode: Episode) -> float:
            return 0.0

    class OddSandbox(Ledger):
        sandbox = "ledger"  # pyright: ignore[reportAssignmentType]

    for cls, says in (
        (NoReward, "NoReward has no `reward`; write `async def reward"),
        (NoReset, "NoReset has no `reset`"),
        (Untyped, "task type is nothing; make it a pydantic model"),
        (OddTask, r"task type is dict\[str, int\]"),
        (OddSandbox, "`sandbox` is not a SandboxSpec but str"),
    ):
        with pytest.raises(ConfigError, match=says):
            environment_ref(cls)


def test_two_tools_of_one_name_are_refused_at_definition():
    with pytest.raises(ConfigError, match="Twice: two tools are called 'same': one and two"):

        class Twice(Ledger):  # pyright: ignore[reportUnusedClass]
            @tool(name="same")
            def one(self) -> str:
                """One."""
                return ""

            @tool(name="same")
            def two(self) -> str:
                """Two."""
                return ""


async def test_plain_functions_are_tools_too_and_a_subclass_may_take_one_away():
    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    class Calculating(Ledger):
        tools = (add,)
        hasty = None  # pyright: ignore[reportAssignmentType]

    assert list(declaration(Calculating).tools) == ["bash", "read", "add"]
    async with so_test(Calculating, TASK, FakeSandbox()) as program:
        assert (await program.call("add", {"a": 2, "b": 3})).content == "5"


async def test_the_task_type_may_be_the_parameter_of_the_base():
    class Typed(Environment[LedgerTask]):
        async def reset(self, task: LedgerTask) -> list[Message]:
            return [Message("system", "s"), Message("user", task.question)]

        async def reward(self, episode: Episode) -> float:
            return float(episode.answer == self.task.answer)

    async with so_test(Typed, TASK) as program:
        assert [message.role for message in program.messages] == ["system", "user"]
        assert await program.reward(answer="1") == 1.0


@pytest.mark.parametrize("returned", [None, [], ["hello"], [Message("robot", "x")], b"bytes"])
async def test_a_reset_that_returns_no_conversation_is_a_failure(returned: object):
    class Odd(Zoo):
        def reset(self, task: Plain) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
            return returned

    with pytest.raises(EnvironmentFailure, match="reset of Odd"):
        async with so_test(Odd, Plain()):
            pass


async def test_a_command_may_have_a_limit_of_its_own():
    sandbox = Workspace(FakeSandbox())
    assert await sandbox.shell("sleep 60", timeout_s=0.01) == "slept\n[timed out after 0.01 s]"
    result = await sandbox.run("fail 2", timeout_s=1)
    assert (result.exit_code, result.output) == (2, "failing\n")


async def test_text_is_written_and_read_as_utf8():
    sandbox = Workspace(FakeSandbox())
    await sandbox.write("a", "naïve")
    assert await sandbox.read_bytes("a") == "naïve".encode()
    await sandbox.write("a", b"\xff")
    assert await sandbox.read("a") == "\ufffd"


async def test_a_path_without_a_file_is_what_a_tool_may_say():
    with pytest.raises(ToolError, match="'b': No such file"):
        await Workspace(FakeSandbox()).read("b")


def test_a_sandbox_is_a_spec_on_the_class_and_a_handle_on_the_instance():
    assert isinstance(Ledger.sandbox, SandboxSpec)
    with pytest.raises(SandboxError, match=r"Ledger\.sandbox: no sandbox yet"):
        _ = Ledger().sandbox


def test_a_spec_becomes_a_blueprint(tmp_path: Path):
    (tmp_path / "ledger").mkdir()
    spec = SandboxSpec(template="ledger", files={"a/b": "text", "c": b"\x00"}, processes=3)
    blueprint = spec.blueprint(tmp_path)
    assert blueprint.template == str(tmp_path / "ledger")
    assert blueprint.files == {"a/b": b"text", "c": b"\x00"}
    assert blueprint.limits.processes == 3
    with pytest.raises(ConfigError, match="template 'nowhere' is not a folder; looked at"):
        SandboxSpec(template="nowhere").blueprint(tmp_path)
    for wrong in ({"/etc/x": ""}, {"../x": ""}):
        with pytest.raises(ConfigError, match="leaves the workspace"):
            SandboxSpec(files=wrong)
    with pytest.raises(ConfigError, match="memory_bytes is 0"):
        SandboxSpec(memory_bytes=0)


def test_a_registry_names_the_nearest_and_imports_late():
    registry = Registry({"ledger": Ledger, "zoo": "fakes_envs:Zoo"})
    assert registry["ledger"] is Ledger
    assert registry["zoo"] is Zoo
    assert registry["fakes_envs:Ledger"] is Ledger
    with pytest.raises(ConfigError, match="no environment 'legder'; did you mean 'ledger'"):
        _ = registry["legder"]
    with pytest.raises(ConfigError, match="registered already"):
        registry.add("zoo", Zoo)


def test_an_importable_class_travels_by_path_with_its_options():
    ref = environment_ref(Zoo, greeting="ciao")
    assert ref.import_path == "fakes_envs:Zoo"
    assert load_environment(ref).options == {"greeting": "ciao"}
    with pytest.raises(ConfigError, match="no option 'greting'; did you mean 'greeting'"):
        environment_ref(Zoo, greting="x")
    with pytest.raises(ConfigError, match="no option 'x'"):
        environment_ref(Ledger, x=1)


def test_a_class_that_holds_what_cannot_be_sent_is_refused():
    class Holding(Zoo):
        lock = threading.Lock()

    with pytest.raises(ConfigError, match="cannot be sent by value"):
        environment_ref(Holding)


async def test_serial_calls_in_one_process_do_not_overlap():
    async with so_test(Zoo, Plain()) as program, anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(program.call, "alone")
    assert [message.content for message in program.messages if message.role == "tool"] == ["1"] * 3
