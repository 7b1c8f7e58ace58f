"""Programs beside the shell, in real containers."""

import anyio
import pytest

from dockers import needs_docker, running, said
from sandboxes import cancelled_at
from sostenuto.errors import ConfigError
from sostenuto.sandbox.protocol import Blueprint

pytestmark = needs_docker
_SLEEPING = "cat /proc/[0-9]*/comm | grep -c sleep"
_MANY = 80


async def test_a_program_has_its_input_its_words_and_the_sandbox_s_variables():
    async with running(Blueprint(environment={"GREETING": "hello  there"})) as sandbox:
        given = bytes(range(256)) * 4000
        result = await sandbox.exec(["md5sum"], stdin=given, timeout_s=20)
        await sandbox.write("given", given)
        assert result.output == (await said(sandbox, "md5sum < given")).output
        words = ["printf", "%s|", "a b", "$x", "'", "", "-n"]
        assert (await sandbox.exec(words, timeout_s=20)).output == "a b|$x|'||-n|"
        script = "echo $GREETING $PWD; echo err >&2; exit 7"
        result = await sandbox.exec(["sh", "-c", script], timeout_s=20)
        assert (result.exit_code, result.output) == (7, "hello there /workspace\nerr\n")


async def test_what_cannot_be_run_is_a_result_and_a_wrong_argv_is_an_error():
    async with running() as sandbox:
        assert (await sandbox.exec(["nonesuch"], timeout_s=20)).exit_code == 127
        assert (await sandbox.exec(["/etc/passwd"], timeout_s=20)).exit_code == 126
        assert (await sandbox.exec(["exit", "3"], timeout_s=20)).exit_code == 127  # no builtin of a shell
        for argv in ([], ["a\0b"]):
            with pytest.raises(ConfigError, match="argv"):
                await sandbox.exec(argv, timeout_s=20)


async def test_a_deadline_ends_its_whole_tree_and_nothing_else():
    trees = (
        "sleep 1000", "sleep 1000 & sleep 1000", "(setsid sleep 1000 &); sleep 1000",
        "trap '' TERM; sleep 1000",
        "env -i sleep 1000", "(sleep 1000 | cat) & wait", "kill -STOP $$",
    )  # fmt: skip
    async with running() as sandbox:
        await said(sandbox, "sleep 999 &")
        for tree in trees:
            result = await sandbox.exec(["sh", "-c", f"echo begun; {tree}"], timeout_s=0.7)
            assert result.timed_out, tree
            assert (await said(sandbox, _SLEEPING)).output == "1\n", tree


async def test_what_a_program_leaves_in_the_background_does_not_hold_its_result():
    async with running() as sandbox:
        result = await sandbox.exec(["sh", "-c", "sleep 1000 & echo done"], timeout_s=20)
        assert result.output == "done\n"
        assert (await said(sandbox, _SLEEPING)).output == "1\n"


async def test_a_flood_is_cut_and_a_program_that_reads_nothing_is_not_waited_for():
    async with running() as sandbox:
        result = await sandbox.exec(["yes"], timeout_s=0.5, output_bytes=1000)
        assert result.timed_out
        assert len(result.output) < 1200
        assert result.cut_bytes > 10_000
        assert (await sandbox.exec(["true"], stdin=b"x" * 5_000_000, timeout_s=20)).exit_code == 0


async def test_a_program_that_ends_all_processes_ends_itself():
    async with running() as sandbox:
        result = await sandbox.exec(["sh", "-c", "kill -9 $PPID; sleep 1000"], timeout_s=1)
        assert result.exit_code in {137, None}


async def test_many_run_at_once_beside_a_command_of_the_shell():
    async with running() as sandbox, anyio.create_task_group() as group:

        async def run(number: int):
            result = await sandbox.exec(["sh", "-c", f"sleep 0.2; echo {number}"], timeout_s=20)
            assert result.output == f"{number}\n"

        group.start_soon(said, sandbox, "sleep 0.5")
        for number in range(6):
            group.start_soon(run, number)


async def test_a_program_cancelled_at_any_await_is_ended():
    async with running() as sandbox:
        for n in range(_MANY):
            work = sandbox.exec(["sh", "-c", "sleep 0.1; sleep 0.1"], stdin=b"x", timeout_s=20)
            if not await cancelled_at(work, n):
                break
            assert (await said(sandbox, _SLEEPING)).output == "0\n", n
        else:
            pytest.fail("exec has more awaits than are tried")
