"""The tool server as a process of its own, on fakes."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import pytest

import fakes_tools
from fakes_tools import FORM, SECRET, TOKEN, config
from sostenuto.errors import ToolServerError
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.refused import OutcomeUnknown
from sostenuto.types import CallId, ProgramId, ToolCall

SCRIPT = str(Path(fakes_tools.__file__))


@contextmanager
def server(**changes: object) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A server process and its URL; killed if it is still there at the end."""
    environment = {**os.environ, "A_KEY": SECRET}
    process = subprocess.Popen(
        [sys.executable, SCRIPT, config(**changes).model_dump_json()],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_a_server_process_ends_cleanly_at_sigterm_with_programs_on_it():
    with server(secret_names=["A_KEY"]) as (process, url):
        async with ToolServerClient(url, TOKEN, "me") as client:
            await client.prepare(ProgramId("a"), FORM, {})
            result = await client.call(ProgramId("a"), CallId("c"), ToolCall("secret", "{}"))
            assert result.content == "token=[secret A_KEY]."
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0


def test_a_server_process_without_a_parent_to_watch_ends_at_ctrl_c():
    with server() as (process, url):
        assert url.startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_a_server_process_leaves_ctrl_c_to_the_parent_that_it_watches():
    with server(parent_pid=os.getpid()) as (process, _):
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_server_process_ends_when_its_parent_is_killed():
    code = (
        "import os, subprocess, sys\n"
        "from fakes_tools import config\n"
        "given = config(parent_pid=os.getpid()).model_dump_json()\n"
        f"child = subprocess.Popen([sys.executable, {SCRIPT!r}, given], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    path = os.pathsep.join([str(Path(SCRIPT).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        handle = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        wait_for_end(handle)
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


def wait_for_end(handle: int) -> None:
    """A pidfd is readable when its process has ended."""
    ended, _, _ = select.select([handle], [], [], 20)
    assert ended


async def test_what_a_call_came_to_is_answered_after_the_server_was_killed(tmp_path: Path):
    with server(state_dir=str(tmp_path)) as (process, url):
        async with ToolServerClient(url, TOKEN, "me/1") as client, anyio.create_task_group() as group:
            await client.prepare(ProgramId("a"), FORM, {})
            await client.call(ProgramId("a"), CallId("done"), ToolCall("echo", "7"))
            call = partial(client.call, ProgramId("a"), CallId("open"), ToolCall("sleep", "60"))
            group.start_soon(call)
            while (await client.state()).programs[0].phase != "calling":  # noqa: ASYNC110
                await anyio.sleep(0.01)
            # What ended is written within one commit, which nobody waits for.
            await anyio.sleep(1.0)
            group.cancel_scope.cancel()
        process.kill()
        process.wait()
    with server(state_dir=str(tmp_path)) as (process, url):
        async with ToolServerClient(url, TOKEN, "me/1") as client:
            result = await client.call(ProgramId("a"), CallId("done"), ToolCall("echo", "7"))
            assert result.content == "7"
            with pytest.raises(OutcomeUnknown, match="was under way when the tool server died"):
                await client.call(ProgramId("a"), CallId("open"), ToolCall("sleep", "60"))
            with pytest.raises(ToolServerError, match="ended with the tool server that ran it"):
                await client.call(ProgramId("a"), CallId("new"), ToolCall("echo", "8"))
            await client.release(ProgramId("a"))
            with pytest.raises(ToolServerError, match="no program a here"):
                await client.call(ProgramId("a"), CallId("done"), ToolCall("echo", "7"))
