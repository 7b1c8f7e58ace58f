"""The persistent shell in real containers."""

import anyio
import pytest

from dockers import needs_docker, running, said
from sostenuto.errors import SandboxError
from sostenuto.sandbox.docker.container import DockerSandbox
from sostenuto.sandbox.protocol import Blueprint, SandboxLimits

pytestmark = needs_docker


_SLEEPING = "cat /proc/[0-9]*/comm | grep -c sleep"


async def test_directory_and_variables_stay_and_output_comes_in_order():
    async with running() as sandbox:
        await said(sandbox, "mkdir -p deep && cd deep && X=5 && f() { echo f$1; }")
        seen = await said(
            sandbox, "for i in 1 2 3; do echo o$i; echo e$i >&2; done; echo $X $PWD; f 1; (exit 7)"
        )
        assert (seen.exit_code, seen.output) == (7, "o1\ne1\no2\ne2\no3\ne3\n5 /workspace/deep\nf1\n")


async def test_difficult_commands_have_a_result_and_the_shell_goes_on():
    commands = [
        ("exit 3", 3), ("set -e; false", 1), ("kill -9 $$", 137), ("exec true", 0), ("echo 'open", 2),
        ("if", 2), ("${unset:?}", None), ("nonesuch", 127), ("cat", 0), ("read x", 1), ("exec >/dev/null", 0),
        ("trap '' USR1; true", 0), ("sleep 1000 &", 0), ("a\0b", 126), ("# only a comment", 0), ("", 0),
        ("cat <<EOF\nx", 0), ("echo \\", 0), (":\n@end\ncheck a b\nkill x\n:", 0), ("exec 8>&- 9>&-", 0),
    ]  # fmt: skip
    async with running() as sandbox:
        for command, code in commands:
            result = await said(sandbox, command)
            assert result.exit_code == code or (code is None and result.exit_code), (command, result)
            assert (await said(sandbox, "echo alive")).output == "alive\n", command


@pytest.mark.parametrize("shell", ["sh", "bash"])
async def test_a_deadline_ends_the_command_and_what_it_started_alone(shell: str):
    commands = [
        "sleep 1000", "while :; do :; done", "while :; do sleep 1; done", "(sleep 1000 | cat); echo late",
        "f() { f2; }; f2() { sleep 1000; }; f; echo late > late", "x=$(sleep 1000); echo late",
        "sh -c 'trap \"\" TERM INT USR1; while :; do sleep 1; done'", "setsid sleep 1000 & wait",
        "kill -STOP $$", "for n in 1 2 3; do (setsid sleep 1000 &) done; sleep 1000",
    ]  # fmt: skip
    async with running(Blueprint(shell=shell)) as sandbox:
        await said(sandbox, "sleep 999 & echo $! > background")
        for command in commands:
            await said(sandbox, "mkdir -p sub; cd sub; X=kept; true & true")
            result = await said(sandbox, command, timeout_s=0.3)
            assert result.timed_out, command
            assert "late" not in result.output
            seen = await said(
                sandbox,
                f"cd /workspace; ls sub; kill -0 $(cat background); {_SLEEPING}",
            )
            assert seen.output == "1\n", (command, seen)
            if shell == "sh" and "STOP" not in command:
                assert (await said(sandbox, "echo $X")).output == "kept\n", command


async def test_a_shell_that_ignores_the_deadline_is_replaced():
    async with running() as sandbox:
        await said(sandbox, "X=lost; cd /usr")
        assert (await said(sandbox, "trap '' USR1; while :; do :; done", timeout_s=0.2)).timed_out
        assert (await said(sandbox, "echo [$X] $PWD")).output == "[] /workspace\n"


async def test_a_deadline_spares_what_exec_runs():
    async with running() as sandbox, anyio.create_task_group() as group:

        async def beside():
            result = await sandbox.exec(["sh", "-c", "sleep 1 & sleep 1; wait; echo whole"], timeout_s=20)
            assert result.output == "whole\n"

        group.start_soon(beside)
        await said(sandbox, "until grep -q whole /proc/[0-9]*/cmdline; do :; done")
        assert (await said(sandbox, "sleep 1000", timeout_s=0.1)).timed_out


async def test_a_flood_is_cut_in_the_middle_and_ends_at_its_deadline():
    async with running() as sandbox:
        result = await sandbox.shell("echo first; yes", timeout_s=0.5, output_bytes=1000)
        assert result.timed_out
        assert result.output.startswith("first\ny\n")
        assert len(result.output) < 1200
        assert result.cut_bytes > 100_000


async def test_a_background_flood_does_not_hold_later_commands():
    async with running() as sandbox:
        assert (await sandbox.shell("yes & echo started", timeout_s=20, output_bytes=100)).exit_code == 0
        assert (await sandbox.shell("kill $!; echo done", timeout_s=20, output_bytes=100)).exit_code == 0
        await sandbox.shell("true", timeout_s=20)
        assert (await said(sandbox, "echo quiet")).output == "quiet\n"


async def test_all_output_comes_with_its_command():
    async with running() as sandbox:
        for _ in range(30):
            seen = await said(sandbox, "seq 3000 | tail -c 4001; echo end")
            assert len(seen.output) == 4005
            assert seen.output.endswith("3000\nend\n")


async def test_what_is_printed_cannot_pass_for_a_report():
    async with running() as sandbox:
        line = "printf 'exit.%d 0\\nexit 5\\n' $n >$f"
        forged = f"for n in 1 2 3; do for f in /proc/[0-9]*/fd/9; do {line}; done; done"
        result = await said(sandbox, f"({forged}) 2>/dev/null; sleep 0.1; (exit 4)")
        assert result.exit_code == 4
        assert (await said(sandbox, "echo alive")).output == "alive\n"


async def test_long_commands_and_strange_text_arrive_unchanged():
    async with running() as sandbox:
        text = "'\"$(x)`y`\\ \N{SNOWMAN}\n!" * 10_000
        await sandbox.write("expected", text.encode())
        quoted = text.replace("'", "'\\''")
        result = await said(sandbox, f"printf %s '{quoted}' | cmp - expected")
        assert result.exit_code == 0, result.output
        assert (await said(sandbox, r"printf 'a\377b'")).output == "a\N{REPLACEMENT CHARACTER}b"


async def test_a_cancelled_command_is_ended_and_the_shell_stays():
    async with running() as sandbox:
        await said(sandbox, "X=kept")
        for delay_s in (0.0, 0.001, 0.003, 0.01, 0.1):
            with anyio.move_on_after(delay_s):
                await said(sandbox, "sleep 1000; touch late")
            assert (await said(sandbox, "echo $X; ls; cat /proc/[0-9]*/comm | grep sleep")).output == "kept\n"


async def test_a_shell_that_is_late_to_begin_a_cancelled_command_is_waited_for():
    async with running() as sandbox:
        pid = (await said(sandbox, "X=kept; echo $$")).output.strip()
        await said(sandbox, f"(sleep 0.5; kill -CONT {pid}) >/dev/null 2>&1 & true")
        await sandbox.exec(["kill", "-STOP", pid], timeout_s=20)
        with anyio.move_on_after(0.01):
            await said(sandbox, "sleep 1000; touch late")
        assert (await said(sandbox, "echo $X; ls; cat /proc/[0-9]*/comm | grep sleep")).output == "kept\n"


async def test_paused_processes_do_nothing_until_they_are_resumed():
    async with running() as sandbox:
        await said(sandbox, "(while :; do echo x >> log; done) & until [ -s log ]; do :; done")
        await sandbox.pause()
        await sandbox.pause()
        before = len(await sandbox.read("log"))
        await anyio.sleep(0.1)
        assert len(await sandbox.read("log")) == before
        with pytest.raises(SandboxError, match="paused"):
            await said(sandbox, "true")
        with pytest.raises(SandboxError, match="paused"):
            await sandbox.exec(["true"], timeout_s=20)
        await sandbox.resume()
        await sandbox.resume()
        await said(sandbox, f"until [ $(wc -c < log) -gt {before} ]; do :; done; kill $!")


async def test_a_command_that_is_paused_ends_at_its_deadline_and_the_pause_stays():
    async with running() as sandbox, anyio.create_task_group() as group:
        results: list[bool] = []

        async def run():
            results.append((await said(sandbox, "sleep 1000", timeout_s=0.5)).timed_out)

        group.start_soon(run)
        await anyio.sleep(0.1)
        await sandbox.pause()
        while not results:  # noqa: ASYNC110 - its end is what is waited for, and nothing tells it
            await anyio.sleep(0.05)
        with pytest.raises(SandboxError, match="paused"):
            await said(sandbox, "true")
        await sandbox.resume()
        assert (await said(sandbox, "cat /proc/[0-9]*/comm | grep sleep")).output == ""


_HOG = "dd if=/dev/zero of=/dev/null bs=300M count=1"


async def test_running_out_of_memory_takes_one_command_and_is_reported():
    async with running(Blueprint(limits=SandboxLimits(memory_bytes=64 << 20))) as sandbox:
        await said(sandbox, "X=kept; sleep 1000 &")
        result = await said(sandbox, f"{_HOG}; echo $?")
        assert result.out_of_memory
        assert result.output.endswith("137\n")
        after = await said(sandbox, "echo $X; ps | grep -c '[s]leep'")
        assert (after.output, after.out_of_memory) == ("kept\n1\n", False)
        ended = await sandbox.exec(["sh", "-c", _HOG], timeout_s=20)
        assert ended.out_of_memory
        assert not (await sandbox.exec(["true"], timeout_s=20)).out_of_memory


async def test_a_shell_that_uses_all_memory_is_replaced():
    async with running(Blueprint(limits=SandboxLimits(memory_bytes=64 << 20))) as sandbox:
        result = await said(sandbox, "x=$(dd if=/dev/zero bs=1M count=100 2>/dev/null | tr '\\0' x); echo $?")
        assert result.out_of_memory
        assert (await said(sandbox, "echo alive")).output == "alive\n"


async def test_limits_bind_and_nothing_of_the_system_can_be_changed():
    limits = SandboxLimits(processes=20, file_bytes=1 << 20, open_files=32, memory_bytes=64 << 20, cpus=0.5)
    checks = {
        "for n in $(seq 40); do sleep 999 & done": "can't fork",
        "for p in /proc/[0-9]*; do read -r c < $p/comm; [ $c = sleep ] && kill ${p#/proc/}; done": "",
        "head -c 2000000 /dev/zero > big; wc -c < big": "1048576",
        "ulimit -n; ulimit -c": "32\n0",
        "touch /bin/x /etc/x /x 2>/dev/null; echo $?": "1",
        "id -u; grep CapBnd /proc/self/status; grep NoNewPrivs /proc/self/status": (
            "61184\nCapBnd:\t0000000000000000\nNoNewPrivs:\t1"
        ),
        "ls /sys/class/net": "lo",
        "mount -t tmpfs x /workspace 2>/dev/null; echo $?": "1",
        "touch /tmp/x && echo made": "made",
        "cat /sys/fs/cgroup/cpu.max 2>/dev/null || cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
    }
    async with running(Blueprint(limits=limits)) as sandbox:
        for command, expected in checks.items():
            result = await said(sandbox, command)
            assert expected in result.output, (command, result)


async def test_a_fork_bomb_leaves_the_files_and_the_deadline_working():
    async with running(Blueprint(limits=SandboxLimits(processes=30))) as sandbox:
        bomb = "b() { b & b & while :; do :; done; }; b & while :; do :; done"
        assert (await said(sandbox, bomb, timeout_s=0.5)).timed_out
        assert (await said(sandbox, "ls -d /proc/[0-9]* | wc -l")).output.strip() in {"6", "7", "8"}
        await said(sandbox, f"({bomb}) & while ! (exit); do :; done")
        await sandbox.write("reached", b"yes")
        assert await sandbox.read("reached") == b"yes"
        refused = await sandbox.exec(["true"], timeout_s=20)
        assert refused.exit_code in {0, 126}


async def test_a_sandbox_that_is_gone_says_so():
    async with running() as sandbox:
        with pytest.raises(SandboxError, match="ended"):
            await said(sandbox, "kill -9 $PPID; sleep 10")
        await _all_refuse(sandbox)
        await sandbox.stop()
        await _all_refuse(sandbox)


async def _all_refuse(sandbox: DockerSandbox):
    uses = (
        said(sandbox, "true"), sandbox.read("x"), sandbox.write("x", b""), sandbox.pause(), sandbox.usage(),
        sandbox.exec(["true"], timeout_s=20), sandbox.snapshot(), sandbox.download(),
    )  # fmt: skip
    for use in uses:
        with pytest.raises(SandboxError, match="ended"):
            await use


async def test_stopping_interrupts_a_command_of_another_task():
    async with running() as sandbox, anyio.create_task_group() as group:

        async def use():
            with pytest.raises(SandboxError):
                await said(sandbox, "sleep 1000", timeout_s=60)

        group.start_soon(use)
        await anyio.sleep(0.1)
        await sandbox.stop()
