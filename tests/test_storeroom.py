"""The storeroom's tools and reward, over a real shell in an empty folder."""

import json
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fakes_sandbox import Unused
from sostenuto.envs.declaration import declaration
from sostenuto.envs.environment import bind
from sostenuto.envs.storeroom import Record, Storeroom, StoreroomTask, held_out_tasks
from sostenuto.errors import SandboxError, ToolError
from sostenuto.sandbox.protocol import ShellResult
from sostenuto.types import Episode, Message, StopReason

TASK = StoreroomTask(
    word="plum",
    files={
        "oak.txt": Record(word="plum", old=14, new=23),
        "elm.txt": Record(word="nut", old=2, new=49),
    },
)


class FolderShell(Unused):
    """Runs each command in a shell of its own in one folder, and remembers it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: list[str] = []

    async def shell(self, command: str, *, timeout_s: float, output_bytes: int = 65536) -> ShellResult:
        self.commands.append(command)
        with anyio.fail_after(timeout_s):
            done = await anyio.run_process(["/bin/sh", "-c", command], cwd=self.folder, check=False)
        return ShellResult(done.returncode, (done.stdout + done.stderr).decode()[:output_bytes])

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        return await anyio.Path(self.folder / path).read_bytes()

    async def write(self, path: str, data: bytes) -> None:
        await anyio.Path(self.folder / path).write_bytes(data)

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def stop(self) -> None: ...


def storeroom_in(folder: Path, task: StoreroomTask = TASK) -> tuple[Storeroom, FolderShell]:
    environment, shell = Storeroom(), FolderShell(folder)
    bind(environment, task, 0, {}, shell)
    return environment, shell


def episode(answer: str, stop_reason: StopReason = StopReason.ANSWERED) -> Episode:
    return Episode((Message("user", TASK.question), Message("assistant", answer)), stop_reason)


def test_the_class_declares_its_three_tools_in_the_order_of_use():
    assert list(declaration(Storeroom).tools) == ["find", "read", "calc"]


async def test_three_calls_each_on_the_one_before_give_the_answer(tmp_path: Path):
    environment, shell = storeroom_in(tmp_path)
    assert await environment.reset(TASK) == "How many plum in all?"
    assert len(shell.commands) == 1
    file = await environment.find("plum")
    assert file == "oak.txt"
    assert await environment.read(file) == "plum:14 old,23 new"
    assert await environment.calc("14+23") == "37"
    assert await environment.reward(episode("The total is 37.")) == 1.0


async def test_every_held_out_task_can_be_answered_with_the_tools(tmp_path: Path):
    for index, task in enumerate(held_out_tasks(5, seed=0)):
        folder = tmp_path / str(index)
        folder.mkdir()
        environment, _ = storeroom_in(folder, task)
        await environment.reset(task)
        assert await environment.read(await environment.find(task.word)) == task.record.line
        assert await environment.calc(f"{task.record.old}+{task.record.new}") == str(task.answer)


async def test_what_is_not_there_is_an_observation_and_not_a_failure(tmp_path: Path):
    environment, _ = storeroom_in(tmp_path)
    await environment.reset(TASK)
    with pytest.raises(ToolError, match="no file has that word"):
        await environment.find("lamp")
    with pytest.raises(ToolError, match="no such file"):
        await environment.read("fir.txt")


HOSTILE = [
    "plum; touch owned", "$(touch owned)", "`touch owned`", "plum\ntouch owned", "-r", "--help", "..", "",
    "../oak.txt", "/etc/passwd", "oak.txt/../../x.txt", "*", "a" * 33, "plum\x00", "oak.txt\n", "1+1\n", "é",
    "a[$(touch owned)]", "1+x", "1/0", "08+1", "9999999+1", "1+1+1+1", "1+-1", "2**9", "<|end|>", "(1+1)",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("tool", ["find", "read", "calc"])
async def test_hostile_text_never_reaches_the_shell(tmp_path: Path, tool: str, text: str):
    environment, shell = storeroom_in(tmp_path)
    with pytest.raises(ToolError):
        await getattr(environment, tool)(text)
    assert shell.commands == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(
    tool=st.sampled_from(["find", "read", "calc"]), text=st.text("ab.;|&$()`'\"\\\n+-* 019/txt", max_size=12)
)
async def test_any_text_is_refused_or_reaches_the_shell_without_its_metacharacters(
    tmp_path: Path, tool: str, text: str
):
    class Deaf(FolderShell):
        async def shell(self, command: str, *, timeout_s: float, output_bytes: int = 65536) -> ShellResult:
            self.commands.append(command)
            return ShellResult(0, "heard")

    environment, shell = Storeroom(), Deaf(tmp_path)
    bind(environment, TASK, 0, {}, shell)
    try:
        await getattr(environment, tool)(text)
    except ToolError:
        assert shell.commands == []
    else:
        assert not set(text) & set(";|&$()`'\"\\\n/")


async def test_the_largest_expression_fits_the_arithmetic_of_the_shell(tmp_path: Path):
    environment, _ = storeroom_in(tmp_path)
    assert await environment.calc("999999*999999*999999") == str(999_999**3)
    assert await environment.calc("2 - 49") == "-47"


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("The total is 37.", 1.0),
        ("37", 1.0),
        ("The total is 38.", 0.0),
        ("The total is 37 or 38.", 0.0),
        ("The total is -37.", 0.0),
        ("The total is 137.", 0.0),
        ("", 0.0),
    ],
)
async def test_the_reward_asks_for_the_one_right_number(tmp_path: Path, answer: str, value: float):
    environment, _ = storeroom_in(tmp_path)
    assert await environment.reward(episode(answer)) == value


async def test_an_answer_that_was_cut_off_earns_nothing(tmp_path: Path):
    environment, _ = storeroom_in(tmp_path)
    assert await environment.reward(episode("The total is 37.", StopReason.TURN_TOKENS)) == 0.0


async def test_files_that_cannot_be_written_are_an_infrastructure_failure(tmp_path: Path):
    (tmp_path / "oak.txt").mkdir()
    environment, _ = storeroom_in(tmp_path)
    with pytest.raises(SandboxError, match="writing the files"):
        await environment.reset(TASK)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"oak.txt": {"word": "nut", "old": 1, "new": 2}},
        {"../x.txt": {"word": "plum", "old": 1, "new": 2}},
        {"oak.txt": {"word": "plum; ls", "old": 1, "new": 2}},
        {"oak.txt": {"word": "plum", "old": -1, "new": 2}},
        {"a.txt": {"word": "plum", "old": 1, "new": 2}, "b.txt": {"word": "plum", "old": 1, "new": 2}},
    ],
)
def test_a_task_that_cannot_be_answered_is_refused(files: dict[str, object]):
    with pytest.raises(ValidationError):
        StoreroomTask.model_validate({"word": "plum", "files": files})


def test_a_task_survives_json():
    assert StoreroomTask.model_validate(json.loads(TASK.model_dump_json())) == TASK
