"""The persistent shell, through real sandboxes."""

import asyncio
import os
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes import ALL, output_of, running, supervisor_below
from sostenuto.errors import SandboxError
from sostenuto.sandbox import processes
from sostenuto.sandbox.output import HeadTail
from sostenuto.sandbox.protocol import Blueprint, Sandbox

each_backend = pytest.mark.parametrize("kind", ALL)


@each_backend
async def test_directory_and_variables_stay_for_the_next_command(kind: str):
    async with running(kind) as (sandbox, _):
        await sandbox.shell("mkdir -p deep && cd deep && X=5 && f() { echo f$1; }", timeout_s=20)
        assert await output_of(sandbox, "echo $X $(basename $PWD); f 1") == "5 deep\nf1"


async def test_output_and_errors_come_in_the_order_they_were_written():
    async with running("bubblewrap") as (sandbox, _):
        result = await sandbox.shell(
            "for i in 1 2 3; do echo o$i; echo e$i >&2; done; (exit 7)", timeout_s=20
        )
        assert (result.exit_code, result.output) == (7, "o1\ne1\no2\ne2\no3\ne3\n")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 3", 3), ("set -e; false", 1), ("kill -9 $$", 137), ("exec true", 0),
        ("echo 'open", 2), ("if", 2), ("( ", 2), ("${unset:?}", 2), (": > /no/such", 2), ("nonesuch", 127),
        ("cat", 0), ("read x", 1), ("exec >/dev/null", 0), ("trap '' USR1; true", 0), ("sleep 1000 &", 0),
        ("a\0b", 126), ("# only a comment", 0), ("", 0), ("cat <<EOF\nx", 0), ("echo \\", 0),
    ],
)  # fmt: skip
async def test_a_difficult_command_has_a_result_and_the_shell_goes_on(command: str, code: int):
    async with running("bubblewrap") as (sandbox, _):
        result = await sandbox.shell(command, timeout_s=20)
        assert result.exit_code == code
        assert await output_of(sandbox, "echo alive") == "alive"


async def test_bash_runs_when_it_is_asked_for():
    async with running("bubblewrap", Blueprint(shell="bash")) as (sandbox, _):
        assert await output_of(sandbox, "a=(1 2 3); [[ ${#a[@]} == 3 ]] && echo yes") == "yes"
        assert (await sandbox.shell("sleep 1000", timeout_s=0.1)).timed_out
        assert await output_of(sandbox, "echo again") == "again"


@each_backend
@pytest.mark.parametrize(
    "command",
    ["sleep 1000", "while :; do :; done", "while :; do sleep 1; done", "(sleep 1000 | cat); echo late",
     "f() { f2; }; f2() { sleep 1000; }; f; echo late > late", "x=$(sleep 1000); echo late",
     "sh -c 'trap \"\" TERM INT USR1; while :; do sleep 1; done'", "setsid sleep 1000 & wait"],
)  # fmt: skip
async def test_a_deadline_ends_the_command_and_keeps_the_shell(kind: str, command: str):
    async with running(kind) as (sandbox, _):
        await sandbox.shell("mkdir sub; cd sub; X=kept; sleep 999 & B=$!", timeout_s=20)
        result = await sandbox.shell(command, timeout_s=0.2)
        assert result.timed_out
        assert "late" not in result.output
        seen = await output_of(sandbox, "echo $X $(basename $PWD); ls; kill -0 $B && echo background")
        assert seen == "kept sub\nbackground"


@each_backend
async def test_a_shell_that_ignores_the_deadline_is_replaced(kind: str):
    async with running(kind) as (sandbox, _):
        await sandbox.shell("X=lost; cd /usr", timeout_s=20)
        assert (await sandbox.shell("trap '' USR1; while :; do :; done", timeout_s=0.2)).timed_out
        assert await output_of(sandbox, "echo [$X]; echo new > file") == "[]"
        assert await sandbox.read("file") == b"new\n"


@each_backend
async def test_a_flood_is_cut_in_the_middle_and_ends_at_its_deadline(kind: str):
    async with running(kind) as (sandbox, _):
        result = await sandbox.shell("echo first; yes", timeout_s=0.5, output_bytes=1000)
        assert result.timed_out
        assert result.output.startswith("first\ny\n")
        assert len(result.output) < 1100
        assert result.cut_bytes > 1_000_000
        assert f"[... {result.cut_bytes} bytes cut ...]" in result.output


@pytest.mark.parametrize("cap", [20, 65536, 1 << 22, 1 << 26])
async def test_of_a_flood_that_ends_by_itself_every_byte_is_kept_or_counted(cap: int):
    flood = "echo begin; head -c 40000000 /dev/zero | tr '\\0' x; echo end"
    size = 40_000_010
    async with running("bubblewrap") as (sandbox, _):
        for run in (sandbox.shell(flood, timeout_s=60, output_bytes=cap),
                    sandbox.exec(["sh", "-c", flood], timeout_s=60, output_bytes=cap)):  # fmt: skip
            result = await run
            assert result.cut_bytes == max(0, size - cap)
            head, _, tail = result.output.partition(f"\n[... {result.cut_bytes} bytes cut ...]\n")
            assert len(head) + len(tail) + result.cut_bytes == size
            assert f"{head}{tail}".startswith("begin\nx")
            assert f"{head}{tail}".endswith("xend\n")
        assert await output_of(sandbox, "echo next") == "next"


async def test_a_background_flood_does_not_hold_later_commands():
    async with running("bubblewrap") as (sandbox, _):
        first = await sandbox.shell("yes & echo started", timeout_s=20, output_bytes=100)
        assert first.exit_code == 0
        second = await sandbox.shell("kill $!; echo done", timeout_s=20, output_bytes=100)
        assert second.exit_code == 0


async def test_bytes_that_are_no_text_are_replaced():
    async with running("bubblewrap") as (sandbox, _):
        assert (await sandbox.shell(r"printf 'a\377b'", timeout_s=20)).output == "a\N{REPLACEMENT CHARACTER}b"


async def test_long_commands_and_strange_text_arrive_unchanged():
    async with running("bubblewrap") as (sandbox, _):
        text = "'\"$(x)`y`\\ \N{SNOWMAN}\n!" * 10_000
        await sandbox.write("expected", text.encode())
        quoted = text.replace("'", "'\\''")
        result = await sandbox.shell(f"printf %s '{quoted}' | cmp - expected", timeout_s=20)
        assert result.exit_code == 0, result.output


async def test_commands_given_together_run_one_after_the_other():
    async with running("bubblewrap") as (sandbox, _), anyio.create_task_group() as group:
        for number in range(5):
            group.start_soon(_append, sandbox, number)
    # `running` would have failed had anything been left


async def _append(sandbox: Sandbox, number: int):
    result = await sandbox.shell(f"n=$(cat n 2>/dev/null); echo ${{n}}{number} > n; cat n", timeout_s=20)
    assert len(result.output.strip()) <= 5
    assert result.output.strip().endswith(str(number))


@each_backend
async def test_a_cancelled_command_is_ended_and_the_shell_stays(kind: str):
    async with running(kind) as (sandbox, _):
        await sandbox.shell("X=kept", timeout_s=20)
        with anyio.move_on_after(0.2):
            await sandbox.shell("sleep 1000; touch late", timeout_s=20)
        assert await output_of(sandbox, "echo $X; ls") == "kept"


async def test_a_task_cancelled_while_it_ends_a_late_command_ends_it_all_the_same():
    async with running("bubblewrap") as (sandbox, _):
        stubborn = "trap '' USR1; while :; do sleep 0.01; done"
        async with asyncio.TaskGroup() as group:
            late = group.create_task(sandbox.shell(stubborn, timeout_s=0.1))
            await anyio.sleep(0.3)  # it takes half a second to give up on such a shell
            late.cancel()
        for _ in range(10):
            assert await sandbox.is_quiet()
            await anyio.sleep(0.005)


@each_backend
async def test_paused_processes_do_nothing_until_they_are_resumed(kind: str):
    async with running(kind) as (sandbox, _):
        loop = "(while :; do echo x >> log; sleep 0.01; done) & until [ -s log ]; do :; done"
        await sandbox.shell(loop, timeout_s=20)
        await sandbox.pause()
        before = len(await sandbox.read("log"))
        await anyio.sleep(0.1)
        assert len(await sandbox.read("log")) == before
        with pytest.raises(SandboxError, match="paused"):
            await sandbox.shell("true", timeout_s=20)
        await sandbox.resume()
        await sandbox.shell(f"until [ $(wc -c < log) -gt {before} ]; do sleep 0.01; done", timeout_s=20)
        assert len(await sandbox.read("log")) > before


def states_below(pid: int) -> set[str]:
    stats = [Path(f"/proc/{child}/stat").read_text() for child in processes.descendants(pid)]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


@each_backend
async def test_pausing_and_resuming_twice_is_as_once(kind: str):
    async with running(kind) as (sandbox, root):
        await sandbox.shell("X=kept; sleep 1000 & (setsid sleep 1000 &)", timeout_s=20)
        launcher = supervisor_below(os.getpid(), root)
        await sandbox.resume()
        for _ in range(2):
            await sandbox.pause()
            assert states_below(launcher) == {"T"}
        for _ in range(2):
            await sandbox.resume()
        assert await output_of(sandbox, "echo $X") == "kept"


@each_backend
async def test_a_paused_sandbox_stops_as_any_other(kind: str):
    async with running(kind) as (sandbox, _):
        await sandbox.shell("sleep 1000 &", timeout_s=20)
        await sandbox.pause()


@each_backend
async def test_a_sandbox_that_is_gone_says_so(kind: str):
    async with running(kind) as (sandbox, _):
        with pytest.raises(SandboxError, match="ended"):
            await sandbox.shell("kill -9 $PPID; sleep 10", timeout_s=20)
        for use in (sandbox.shell("true", timeout_s=20), sandbox.read("x"), sandbox.write("x", b"")):
            with pytest.raises(SandboxError, match="ended"):
                await use


async def test_stopping_interrupts_a_command_of_another_task():
    refused: list[str] = []

    async def use(sandbox: Sandbox):
        try:
            await sandbox.shell("sleep 1000", timeout_s=60)
        except SandboxError as exc:
            refused.append(str(exc))

    async with running("bubblewrap") as (sandbox, _), anyio.create_task_group() as group:
        group.start_soon(use, sandbox)
        await anyio.sleep(0.05)
        await sandbox.stop()
    assert len(refused) == 1


@given(st.lists(st.binary(max_size=50)), st.integers(min_value=2, max_value=64))
def test_head_and_tail_are_exact_and_what_is_missing_is_counted(chunks: list[bytes], cap_bytes: int):
    sink = HeadTail(cap_bytes)
    for chunk in chunks:
        sink.add(chunk)
    whole = b"".join(chunks)
    text, cut_bytes = sink.text()
    assert sink.total_bytes == len(whole)
    if len(whole) <= cap_bytes:
        assert (text, cut_bytes) == (whole.decode(errors="replace"), 0)
    else:
        assert cut_bytes == len(whole) - cap_bytes
        assert text.startswith(whole[: cap_bytes // 2].decode(errors="replace"))
        assert text.endswith(whole[len(whole) - (cap_bytes - cap_bytes // 2) :].decode(errors="replace"))


def test_a_stream_of_any_length_is_kept_in_bounded_memory():
    sink = HeadTail(1000)
    for _ in range(2000):
        sink.add(b"x" * 65536)
    text, cut_bytes = sink.text()
    assert cut_bytes == 2000 * 65536 - 1000
    assert len(text) < 1100
