"""Limits on all processes of a sandbox together, through real sandboxes and cgroups."""

import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from sandboxes import ALL, backend_of, left_processes, nothing_left, output_of, running, sandbox_root
from sostenuto.errors import SandboxError, Unsupported
from sostenuto.sandbox.cgroup_end import reclaim_cgroups
from sostenuto.sandbox.cgroup_tree import Tree, find_mounts, new_name
from sostenuto.sandbox.cgroups import find_cgroups
from sostenuto.sandbox.grouping import Grouping
from sostenuto.sandbox.protocol import Blueprint, Sandbox, SandboxLimits, ShellResult

each_backend = pytest.mark.parametrize("kind", ALL)
LIMITS = SandboxLimits(memory_bytes=96 << 20)
HOG = "python3 -S -c 'block = bytearray(300 << 20)'"
_GROUPS = find_cgroups()
needs_groups = pytest.mark.skipif(
    _GROUPS is None or not _GROUPS.bound_memory,
    reason="needs cgroups that this user can make and that bound memory, such as root's",
)


@asynccontextmanager
async def limited(kind: str, limits: SandboxLimits = LIMITS) -> AsyncGenerator[Sandbox]:
    async with running(kind, Blueprint(limits=limits)) as (sandbox, _):
        yield sandbox


@pytest.fixture(autouse=True)
def no_cgroup_is_left() -> Generator[None]:
    yield
    assert own_groups() == []


def has_swap() -> bool:
    return len(Path("/proc/swaps").read_text().splitlines()) > 1


def killed_after_its_first_line(program: str) -> Path:
    """Run a program until it has named a path."""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        process.kill()
    return path


def own_groups() -> list[Path]:
    """Groups of this process, in all places where it may have made some."""
    mark = new_name().rsplit(".", 1)[0]
    places = [path for mount in find_mounts(Tree()) for path in (mount.own, *mount.own.parents)]
    return [group for path in places for group in Tree().groups(path) if group.name.startswith(mark)]


def calls_in(group: Path) -> list[Path]:
    return [inner for inner in Tree().groups(group) if inner.name.startswith("call.")]


@needs_groups
@each_backend
async def test_a_command_that_runs_out_of_memory_is_told_so_and_takes_nothing_else(kind: str):
    async with limited(kind) as sandbox, limited(kind) as neighbour:
        await sandbox.shell("X=5; sleep 61 & Y=$!", timeout_s=20)
        hog = await sandbox.shell(HOG, timeout_s=20)
        assert (hog.exit_code, hog.out_of_memory) == (137, True)
        after = await sandbox.shell("kill -0 $Y && echo $X", timeout_s=20)
        assert (after.output, after.out_of_memory) == ("5\n", False)
        assert not (await neighbour.shell("true", timeout_s=20)).out_of_memory


@needs_groups
@each_backend
async def test_a_program_beside_the_shell_that_runs_out_of_memory_leaves_the_shell_s_command_alone(kind: str):
    async with limited(kind) as sandbox:
        said: list[str] = []

        async def neighbour() -> None:
            said.append((await sandbox.shell("read -r word < go; echo $word", timeout_s=30)).output)

        await sandbox.shell("mkfifo go", timeout_s=20)
        async with anyio.create_task_group() as group:
            group.start_soon(neighbour)
            hog = await sandbox.exec(["sh", "-c", f"{HOG}; echo code $?"], timeout_s=20)
            assert (hog.out_of_memory, hog.output.splitlines()[-1]) == (True, "code 137")
            await sandbox.exec(["sh", "-c", "echo on > go"], timeout_s=20)
        assert said == ["on\n"]


@needs_groups
@each_backend
async def test_a_program_beyond_its_own_memory_is_ended_alone_and_told_so(kind: str):
    limits = SandboxLimits(memory_bytes=256 << 20, call_memory_bytes=64 << 20)
    async with limited(kind, limits) as sandbox:
        await sandbox.shell("X=5; sleep 61 & Y=$!; mkfifo go", timeout_s=20)
        said: list[ShellResult] = []

        async def neighbour() -> None:
            program = "block = bytearray(40 << 20); print(len(open('go').read()))"
            said.append(await sandbox.exec(["python3", "-S", "-c", program], timeout_s=30))

        async with anyio.create_task_group() as group:
            group.start_soon(neighbour)
            hog = await sandbox.exec(["sh", "-c", HOG.replace("300", "120")], timeout_s=20)
            assert (hog.exit_code, hog.out_of_memory) == (137, True)
            fine = await sandbox.exec(["sh", "-c", "echo on > go"], timeout_s=20)
            assert not fine.out_of_memory
        assert [(one.output, one.exit_code, one.out_of_memory) for one in said] == [("3\n", 0, False)]
        after = await sandbox.shell("kill -0 $Y && echo $X", timeout_s=20)
        assert (after.output, after.out_of_memory) == ("5\n", False)
        roomy = await sandbox.shell(HOG.replace("300", "120"), timeout_s=20)
        assert (roomy.exit_code, roomy.out_of_memory) == (0, False), "the shell has what the sandbox has"


@needs_groups
@each_backend
async def test_what_lives_on_after_its_call_is_the_sandbox_s_and_its_group_goes(kind: str):
    async with limited(kind) as sandbox:
        started = await sandbox.exec(["sh", "-c", "sleep 61 >/dev/null 2>&1 & echo on"], timeout_s=20)
        assert started.output == "on\n"
        assert [inner for group in own_groups() for inner in calls_in(group)] == []
        assert not await sandbox.is_quiet()


@needs_groups
async def test_processes_share_the_memory_of_their_sandbox():
    half = "python3 -S -c 'import time; block = bytearray(60 << 20); time.sleep(1)'"
    async with limited("bubblewrap") as sandbox:
        assert not (await sandbox.shell(half, timeout_s=20)).out_of_memory
        assert (await sandbox.shell(f"{half} & {half} & wait", timeout_s=20)).out_of_memory


@needs_groups
async def test_address_space_is_not_limited_where_memory_is():
    async with limited("bubblewrap") as sandbox:
        reserve = "python3 -S -c 'import mmap; mmap.mmap(-1, 4 << 30, flags=0x4022); print(1)'"
        assert await output_of(sandbox, reserve) == "1"


@needs_groups
async def test_files_in_memory_cannot_use_up_what_the_processes_need():
    async with limited("bubblewrap") as sandbox:
        fill = "for f in /tmp/a /tmp/b /dev/shm/a; do head -c 90000000 /dev/zero > $f; done"
        filled = await sandbox.shell(fill, timeout_s=20)
        assert "No space left" in filled.output
        assert not filled.out_of_memory
        assert await output_of(sandbox, "python3 -S -c 'print(1)'") == "1"


@needs_groups
async def test_processes_are_counted_even_where_the_user_is_root():
    async with limited("process", SandboxLimits(processes=20)) as sandbox:
        spawn = "i=0; while [ $i -lt 60 ]; do sleep 5 & i=$((i+1)); done; echo all"
        assert "all" not in (await sandbox.shell(spawn, timeout_s=20)).output
        assert await output_of(sandbox, "echo alive") == "alive"


@needs_groups
async def test_a_share_of_a_core_is_not_exceeded():
    loop = "python3 -S -c 'import time; end = time.monotonic() + 1\nwhile time.monotonic() < end: pass'"
    async with limited("bubblewrap", SandboxLimits(cpus=0.2)) as sandbox:
        before_s = (await sandbox.usage()).cpu_s
        await sandbox.shell(f"{loop} & {loop} & wait", timeout_s=60)
        assert (await sandbox.usage()).cpu_s - before_s < 1.0


@needs_groups
async def test_usage_knows_what_was_used_between_two_looks():
    async with limited("bubblewrap") as sandbox:
        await sandbox.shell("python3 -S -c 'block = bytearray(50 << 20)'", timeout_s=20)
        used = await sandbox.usage()
        assert used.peak_memory_bytes > 50 << 20 > used.memory_bytes
        assert used.cpu_s > 0


async def test_memory_cannot_be_moved_out_without_swap_and_the_sandbox_goes_on():
    async with limited("bubblewrap") as sandbox:
        if _GROUPS is not None and has_swap():
            await sandbox.shell("X=5", timeout_s=20)
            await sandbox.reclaim()
            await sandbox.resume()
            assert await output_of(sandbox, "echo $X") == "5"
            return
        with pytest.raises(Unsupported, match=r"memory cannot be moved out: .*(swap|root)"):
            await sandbox.reclaim()
        assert await output_of(sandbox, "echo on") == "on"


async def test_probing_says_what_limits_a_sandbox():
    with sandbox_root() as root:
        probe = await backend_of("bubblewrap", root).probe()
    said = probe.details["limits"]
    assert "memory" in said
    assert ("Delegate=yes" in said) == (_GROUPS is None or not _GROUPS.bound_memory)


@needs_groups
def test_what_forks_without_end_is_stopped_all_the_same():
    grouping = Grouping(SandboxLimits(processes=200))
    bomb = "import os\nwhile True:\n  if os.fork(): os._exit(0)"
    command = ["/bin/sh", "-c", f"{sys.executable} -S -c '{bomb}'; read x"]
    leader = subprocess.Popen([*grouping.entering, *command], stdin=subprocess.PIPE)
    try:
        time.sleep(0.3)
        grouping.stop(leader.pid)
    finally:
        grouping.remove()
        leader.communicate()


@needs_groups
async def test_a_killed_server_s_cgroups_are_found_by_the_next():
    with sandbox_root() as root:
        program = (
            "import anyio, sys; from pathlib import Path\n"
            "from sostenuto.sandbox.bubblewrap import BubblewrapBackend\n"
            "from sostenuto.sandbox.protocol import Blueprint\n"
            "async def main():\n"
            f"  sandbox = await BubblewrapBackend(Path({str(root)!r})).start('left', Blueprint())\n"
            "  print(sandbox._grouping.entering[4], flush=True)\n"
            "  await anyio.sleep_forever()\n"
            "anyio.run(main)\n"
        )
        group = killed_after_its_first_line(program)
        assert await nothing_left(root)
        assert group.name in reclaim_cgroups(Tree())
        assert group.name not in reclaim_cgroups(Tree())


@needs_groups
@each_backend
async def test_a_start_that_fails_or_is_cancelled_leaves_no_cgroup(kind: str):
    with sandbox_root() as root:
        backend = backend_of(kind, root)
        for delay_s in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04):
            with anyio.move_on_after(delay_s):
                sandbox = await backend.start("x", Blueprint())
                await sandbox.stop()
        with pytest.raises(SandboxError):
            await backend.start("x", Blueprint(limits=SandboxLimits(cpus=1e-6)))
        assert left_processes(root) == []
