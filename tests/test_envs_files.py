"""What environment code does with whole folders and with programs, on a real worker in real sandboxes."""

import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from fakes_files import HOSTILE, Builder
from hosts import call, until
from sandboxes import commands_inside, running
from sostenuto.envs.frames import Exec, Upload
from sostenuto.envs.pool import WorkerPool
from sostenuto.envs.registry import environment_ref
from sostenuto.sandbox.protocol import Sandbox
from sostenuto.tools.host import Host
from sostenuto.tools.wire import PrepareRequest
from sostenuto.types import ProgramId, ToolStatus

BUILDER = environment_ref(Builder)


@asynccontextmanager
async def building(kind: str = "bubblewrap") -> AsyncGenerator[tuple[Host, Sandbox, Path]]:
    """A host with one prepared program, `p`, in a real sandbox."""
    async with WorkerPool(grace_s=2) as pool:
        facts = await pool.describe(BUILDER)
        async with running(kind, facts.blueprint) as (sandbox, root):
            host = await pool.choose(BUILDER)
            await host.prepare(
                ProgramId("p"), PrepareRequest(owner="o", environment=BUILDER, task={"number": 21}), sandbox
            )
            yield host, sandbox, root


@pytest.mark.parametrize("kind", ["bubblewrap", "landlock", "process"])
async def test_a_folder_goes_in_a_program_runs_and_the_folder_comes_back(kind: str):
    async with building(kind) as (host, _, _):
        assert (await call(host, "p", "double")).content == "0 it's $x ran 42 True"


async def test_two_programs_run_at_once_beside_the_shell():
    async with building() as (host, _, _):
        assert (await call(host, "p", "together")).content == "both"


async def test_what_a_hostile_archive_tries_is_an_observation_and_nothing_is_written():
    async with building() as (host, sandbox, _):
        for what in HOSTILE:
            result = await call(host, "p", "send", what=what)
            assert result.status is ToolStatus.TOOL_ERROR, what
        assert (await sandbox.shell("ls", timeout_s=20)).output == "src\n"
        assert (await call(host, "p", "double")).status is ToolStatus.OK


async def test_a_download_is_bounded_and_a_path_without_anything_is_an_observation():
    async with building() as (host, _, _):
        assert int((await call(host, "p", "fetch", path="src", max_bytes=4 << 20)).content) > 1 << 20
        for path, most in (("src", 1 << 20), ("nowhere", 1 << 20), ("../..", 1 << 20), ("/etc", 1 << 20)):
            assert (await call(host, "p", "fetch", path=path, max_bytes=most)).status is ToolStatus.TOOL_ERROR
        assert "ask for a part" in (await call(host, "p", "fetch", path="src", max_bytes=1)).content


async def test_a_program_that_takes_too_long_is_ended_with_its_tree():
    async with building() as (host, _, root):
        assert (await call(host, "p", "sleep", limit_s=0.3)).content == "True begun"
        assert not [line for line in commands_inside(root) if "sleep" in line]
        assert (await call(host, "p", "hasty")).content == "True"
        assert not [line for line in commands_inside(root) if "sleep" in line]


async def test_a_cancelled_call_ends_the_program_that_it_runs():
    async with building() as (host, sandbox, root):
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: call(host, "p", "sleep", limit_s=600))
            with anyio.fail_after(20):
                while (await sandbox.shell("cat begun", timeout_s=20)).exit_code:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            group.cancel_scope.cancel()
        await until(lambda: not [line for line in commands_inside(root) if "sleep" in line])
        assert (await call(host, "p", "double")).status is ToolStatus.OK


async def test_a_program_that_takes_too_much_memory_fails_alone():
    async with building() as (host, _, _):
        assert (await call(host, "p", "hog")).content == "True"
        assert (await call(host, "p", "double")).status is ToolStatus.OK


async def test_a_command_line_in_place_of_words_is_refused_with_the_remedy():
    async with building() as (host, _, _):
        result = await call(host, "p", "shout")
        assert result.content == "exec: argv is one str, 'ls -l'; give a sequence of words, or use `shell`"


def test_bulk_crosses_to_the_server_as_the_bytes_that_it_is():
    content = bytes(1 << 20)
    for frame in (Upload(1, "p", ".", content), Exec(1, "p", ("cat",), content, 1.0, 1)):
        assert len(msgspec.msgpack.encode(frame)) < len(content) + 100


def test_the_example_of_the_documentation_runs(tmp_path: Path):
    text = (Path(__file__).parents[1] / "docs" / "sandboxes.md").read_text()
    (code,) = (block.split("```")[0] for block in text.split("```python\n")[1:] if "so_test" in block)
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "3 passed\n1.0\n"), done.stderr
