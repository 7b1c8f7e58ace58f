"""Programs of a fleet whose tool server is killed: they go on with the one that is started in its place."""

import subprocess
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import anyio
import psutil
import pytest
from anyio import to_thread

from resuming import (
    COUNTING,
    EPISODE,
    NOTES,
    TASK,
    add,
    assert_nothing_left,
    kill,
    rows,
    serving,
    sound_rests_of,
)
from sandboxes import nothing_left, sandbox_root
from sostenuto.errors import ToolServerError
from sostenuto.runtime import tool_keeper, tool_stays
from sostenuto.runtime.config import RuntimeConfig
from sostenuto.runtime.program import ToolServer
from sostenuto.runtime.run_directory import hold
from sostenuto.runtime.tool_fleet import ToolFleet, open_fleet
from sostenuto.runtime.tools_opened import open_tools
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.types import CallId, ProgramId, SandboxRung, ToolCall
from test_tool_fleet import free_port, link, until
from test_tools_serve import TOKEN

A, B, C = ProgramId("a"), ProgramId("b"), ProgramId("c")
WAIT = ToolCall("wait", '{"seconds": 60}')


async def prepared(
    tools: ToolServer, program: ProgramId, environment: EnvironmentRef = NOTES, *, snapshot: bool = True
) -> None:
    """With one call behind it, and its sandbox in a snapshot or not."""
    await tools.prepare(program, environment, TASK, seed=0, timeout_s=60)
    assert await said(tools, program, "1", "second") == "begun first second kept"
    if snapshot:
        assert (await tools.move(program, SandboxRung.SNAPSHOTTED)).rung is SandboxRung.SNAPSHOTTED


async def said(tools: ToolServer, program: ProgramId, call_id: str, line: str) -> str:
    return (await tools.call(program, CallId(call_id), add(line), timeout_s=30)).content.strip()


async def goes_on(tools: ToolServer, program: ProgramId, call_id: str = "2") -> None:
    """It has what it had, does what it is told, and is scored."""
    lines = " ".join(["begun first second", *("more" for _ in range(int(call_id) - 1))])
    assert await said(tools, program, call_id, "more") == f"{lines} kept"
    reward = await tools.reward(program, CallId("r"), EPISODE, timeout_s=30)
    assert reward.value == 2.0 + int(call_id)
    await tools.release(program)


class Machine:
    """A tool server at one place, which is killed and started again."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._port = free_port()
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def starts(self) -> None:
        def start() -> None:
            options = ("--port", str(self._port))
            self._process, url = self._stack.enter_context(serving(self.folder, *options))
            assert url == self.url

        await to_thread.run_sync(start)

    def is_killed(self) -> None:
        assert self._process is not None
        kill(self._process)


@asynccontextmanager
async def machine() -> AsyncGenerator[Machine]:
    """One with a server, which ends in order and leaves nothing."""
    with sandbox_root() as root:
        with ExitStack() as stack:
            made = Machine(root / "one", stack)
            await made.starts()
            yield made
        await assert_nothing_left(made.folder)


@asynccontextmanager
async def fleet_of(made: Machine, lease_s: float = 3.0) -> AsyncGenerator[ToolFleet]:
    async with open_fleet([link(made.url, token=TOKEN, lease_s=lease_s)]) as fleet:
        yield fleet


async def lost(made: Machine, fleet: ToolFleet) -> None:
    made.is_killed()
    await until(lambda: not fleet.living)


async def back(made: Machine, fleet: ToolFleet) -> None:
    await made.starts()
    await until(lambda: bool(fleet.living))


@pytest.mark.parametrize("lease_s", [3.0, 30.0], ids=["lost", "back before its lease is over"])
async def test_programs_that_rest_go_on_and_the_others_say_why_not(lease_s: float):
    async with machine() as made, fleet_of(made, lease_s) as fleet:
        await prepared(fleet, A)
        await prepared(fleet, B, snapshot=False)
        await prepared(fleet, C)
        await said(fleet, C, "2", "third")
        made.is_killed()
        if lease_s < 10:
            await until(lambda: not fleet.living)
        await back(made, fleet)
        await goes_on(fleet, A)
        with pytest.raises(ToolServerError, match="b cannot go on: no snapshot of it was taken"):
            await said(fleet, B, "2", "third")
        with pytest.raises(ToolServerError, match="c cannot go on: call 2 came after its last snapshot"):
            await said(fleet, C, "3", "fourth")
        for program in (B, C):
            await fleet.release(program)
        await until(lambda: not any(rows(made.folder).values()))
        assert repr(fleet) == f"<ToolFleet {made.url}=0>"


async def test_a_program_goes_on_from_server_to_server_and_from_call_to_call():
    async with machine() as made, fleet_of(made) as fleet:
        await prepared(fleet, A)
        for _ in range(2):
            await lost(made, fleet)
            await back(made, fleet)
        await said(fleet, A, "2", "more")
        await fleet.move(A, SandboxRung.SNAPSHOTTED)
        await lost(made, fleet)
        async with anyio.create_task_group() as group:
            # What is asked meanwhile waits for the server.
            group.start_soon(goes_on, fleet, A, "3")
            await made.starts()
        await until(lambda: not any(rows(made.folder).values()))


async def test_a_call_that_was_under_way_ends_its_program_with_the_reason():
    async with machine() as made, fleet_of(made) as fleet:
        await prepared(fleet, A)
        failed: list[str] = []

        async def wait() -> None:
            try:
                await fleet.call(A, CallId("2"), WAIT, timeout_s=100)
            except ToolServerError as error:
                failed.append(str(error))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await until(lambda: rows(made.folder)["results"] == 2)
            made.is_killed()
            await made.starts()
        # Which comes first is a matter of time: that its server is lost, or what the next one says.
        if f"tool server {made.url} was lost" in failed[0]:
            assert "a cannot go on: it was calling wait since its last snapshot" in failed[0]
        else:
            assert "call '2' was under way when the tool server died" in failed[0]
        await fleet.release(A)


async def test_an_environment_that_cannot_resume_fails_at_once():
    async with machine() as made:
        async with fleet_of(made) as fleet:
            await prepared(fleet, A, COUNTING)
            await lost(made, fleet)
            with pytest.raises(ToolServerError, match=r"a cannot go on: .*keeps count outside of"):
                await said(fleet, A, "2", "more")
        await made.starts()


async def test_a_server_that_does_not_come_back_in_time_fails_its_programs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tool_stays, "RETURN_S", 0.5)
    async with machine() as made:
        async with fleet_of(made) as fleet:
            await prepared(fleet, A)
            await lost(made, fleet)
            with pytest.raises(ToolServerError, match=r"was lost, and was not back within 0\.5 s"):
                await said(fleet, A, "2", "more")
            await fleet.release(A)
        await made.starts()


@asynccontextmanager
async def own(folder: Path, **settings: object) -> AsyncGenerator[ToolServer]:
    """A run's own server."""
    config = RuntimeConfig.model_validate({"tool_server": {"sandbox": "bubblewrap", **settings}})
    with hold(folder / "run") as run:
        async with open_tools(config, run) as tools:
            yield tools.server


def own_server() -> psutil.Process:
    (process,) = [
        child
        for child in psutil.Process().children()
        if "sostenuto.runtime.tool_process" in " ".join(child.cmdline())
    ]
    return process


async def killed() -> None:
    process = own_server()
    process.kill()
    with anyio.fail_after(30):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def test_a_run_starts_its_own_server_again_and_its_programs_go_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tool_keeper, "_FIRST_PAUSE_S", 0.05)
    with sandbox_root() as root:
        async with own(root) as tools:
            await prepared(tools, A)
            await killed()
            await prepared(tools, B)
            await killed()
            await goes_on(tools, A)
            await goes_on(tools, B)
        assert await nothing_left(root / "run" / "sandboxes")
        assert list((root / "run" / "sandboxes").iterdir()) == []


async def test_a_runs_own_server_that_hangs_is_replaced_and_its_programs_go_on():
    with sandbox_root() as root:
        async with own(root, lease_s=3.0) as tools:
            await prepared(tools, A)
            hanging = own_server()
            hanging.suspend()
            await goes_on(tools, A)
            assert not hanging.is_running()
        assert list((root / "run" / "sandboxes").iterdir()) == []


async def test_where_idle_sandboxes_are_snapshotted_programs_go_on_without_stepping_down():
    with sandbox_root() as root:
        async with own(root, snapshot_idle_s=0.1) as tools:
            await prepared(tools, A, snapshot=False)
            await until(lambda: sound_rests_of(root / "run" / "tool_server") == 1)
            await killed()
            await goes_on(tools, A)
        assert list((root / "run" / "sandboxes").iterdir()) == []


async def test_a_server_that_dies_too_often_is_given_up_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tool_keeper, "_FIRST_PAUSE_S", 0.05)
    with sandbox_root() as root:
        async with own(root, restarts=1) as tools:
            await prepared(tools, A)
            await killed()
            assert await said(tools, A, "2", "more") == "begun first second more kept"
            await tools.move(A, SandboxRung.SNAPSHOTTED)
            await killed()
            said_why = r"tool server ended \(SIGKILL\); see .*; it was started again 1 times, and is given up"
            with pytest.raises(ToolServerError, match=said_why):
                await said(tools, A, "3", "more")
            with pytest.raises(ToolServerError, match=f"no tool server answers: of this run: .*{said_why}"):
                await tools.prepare(B, NOTES, TASK, seed=0, timeout_s=60)
            await tools.release(A)
        async with own(root):
            pass
        assert list((root / "run" / "sandboxes").iterdir()) == []
