"""Programs beside the shell, through real sandboxes."""

import anyio
import pytest

from sandboxes import ALL, ISOLATING, cancelled_at, commands_inside, output_of, pipes_inside, running
from sostenuto.errors import SandboxError
from sostenuto.sandbox import execution
from sostenuto.sandbox.protocol import Blueprint, Sandbox, SandboxLimits

each_backend = pytest.mark.parametrize("kind", ALL)


@each_backend
async def test_a_program_has_its_input_its_words_and_the_variables_of_the_sandbox(kind: str):
    async with running(kind, Blueprint(environment={"GREETING": "good day"})) as (sandbox, _):
        whole = bytes(range(256)) * 2000
        await sandbox.shell("mkdir sub; cd sub; GREETING=changed", timeout_s=20)
        seen = await sandbox.exec(
            ["sh", "-c", "cat > copy; pwd; echo $GREETING; exit 3"], stdin=whole, timeout_s=20
        )
        assert (seen.exit_code, seen.output.splitlines()[1]) == (3, "good day")
        assert await sandbox.read("copy") == whole
        words = ["", " ", "'", '"$(x)`y`', "a\nb", "-n", "\N{SNOWMAN}", "*"]
        said = await sandbox.exec(["printf", "[%s]", *words], timeout_s=20)
        assert said.output == "".join(f"[{word}]" for word in words)


@each_backend
@pytest.mark.parametrize(
    ("argv", "code"),
    [(["true"], 0), (["sh", "-c", "kill -9 $$"], 137), (["sh", "-c", "kill -9 $PPID; sleep 9"], 137),
     (["exit", "3"], 127), (["A=B"], 127), (["a\0b"], 126), (["-x"], 126), (["cat"], 0), ([], 126)],
)  # fmt: skip
async def test_a_program_that_ends_in_any_way_has_a_result(kind: str, argv: list[str], code: int):
    async with running(kind) as (sandbox, _):
        result = await sandbox.exec(argv, timeout_s=20)
        if argv[:1] in (["exit"], ["A=B"]) and kind == "landlock":
            assert result.exit_code in {126, code}  # the search reaches a folder that may not be read
        else:
            assert result.exit_code == code
        assert await output_of(sandbox, "echo alive") == "alive"


@each_backend
async def test_a_program_reads_all_of_its_input_however_large(kind: str):
    async with running(kind) as (sandbox, _):
        for size in (0, 1, 70_000, 8 << 20):
            counted = await sandbox.exec(["wc", "-c"], stdin=b"x" * size, timeout_s=20)
            assert counted.output.strip() == str(size)


@each_backend
async def test_programs_run_at_once_and_beside_a_command_of_the_shell(kind: str):
    async with running(kind) as (sandbox, _), anyio.create_task_group() as group:
        group.start_soon(_shell_waits, sandbox)
        for number in range(8):
            group.start_soon(_meets_the_others, sandbox, number)


async def _shell_waits(sandbox: Sandbox):
    waits = "until [ $(ls | grep -c here) = 8 ]; do sleep 0.01; done"
    assert (await sandbox.shell(waits, timeout_s=60)).exit_code == 0


async def _meets_the_others(sandbox: Sandbox, number: int):
    script = f"touch here{number}; until [ $(ls | grep -c here) = 8 ]; do sleep 0.01; done; echo {number}"
    seen = await sandbox.exec(["sh", "-c", script], timeout_s=60)
    assert (seen.exit_code, seen.output) == (0, f"{number}\n")


_TREES = [
    "sleep 1001", "sleep 1001 & sleep 1001", "setsid sleep 1001 & wait", "(setsid sleep 1001 &); sleep 1001",
    "trap '' TERM INT USR1; while :; do sleep 1001; done",
    "(nohup setsid sh -c 'sleep 1001; :' &); sleep 1001",
]  # fmt: skip


@each_backend
@pytest.mark.parametrize("script", _TREES)
async def test_a_deadline_ends_the_tree_of_a_program_and_nothing_else(kind: str, script: str):
    async with running(kind) as (sandbox, root):
        await sandbox.shell("(setsid sleep 999 &); X=kept", timeout_s=20)
        result = await sandbox.exec(["sh", "-c", script], timeout_s=0.3)
        assert result.timed_out
        assert [line for line in commands_inside(root) if "sleep" in line] == ["sleep 999"]
        assert await output_of(sandbox, "echo $X") == "kept"


@each_backend
async def test_a_cancelled_program_is_ended(kind: str):
    async with running(kind) as (sandbox, root):
        with anyio.move_on_after(0.3):
            await sandbox.exec(["sh", "-c", "sleep 1001 & sleep 1001; touch late"], timeout_s=20)
        assert [line for line in commands_inside(root) if "sleep" in line] == []


@each_backend
async def test_a_program_cancelled_at_any_await_ends_and_leaves_no_pipe(kind: str):
    async with running(kind) as (sandbox, root):
        for n in range(60):
            work = sandbox.exec(["sh", "-c", "sleep 0.02; sleep 0.02"], timeout_s=20)
            if not await cancelled_at(work, n):
                break
            assert [line for line in commands_inside(root) if "sleep" in line] == []
            assert len(pipes_inside(root)) == 1
        else:
            pytest.fail("exec has more awaits than are tried")
        assert n >= 1  # one more where it has not begun before that is waited for


@each_backend
async def test_a_deadline_of_the_shell_spares_a_program_that_began_during_the_command(kind: str):
    async with running(kind) as (sandbox, _), anyio.create_task_group() as group:
        group.start_soon(_is_spared, sandbox)
        assert (await sandbox.shell("sleep 1000", timeout_s=0.6)).timed_out
        await sandbox.write("go", b"")


async def _is_spared(sandbox: Sandbox):
    await anyio.sleep(0.1)
    child = "until [ -e go ]; do sleep 0.01; done; echo done > child"
    script = f"(setsid sh -c '{child}' &); until [ -e child ]; do sleep 0.01; done"
    assert (await sandbox.exec(["sh", "-c", script], timeout_s=60)).exit_code == 0


@each_backend
async def test_a_flood_of_a_program_is_cut_and_ends_at_its_deadline(kind: str):
    async with running(kind) as (sandbox, _):
        result = await sandbox.exec(["yes"], timeout_s=0.5, output_bytes=1000)
        assert result.timed_out
        assert len(result.output) < 1100
        assert result.cut_bytes > 1_000_000


@each_backend
async def test_programs_have_the_limits_and_the_confinement_of_the_sandbox(kind: str):
    async with running(kind, Blueprint(limits=SandboxLimits(open_files=77))) as (sandbox, _):
        assert (await sandbox.exec(["sh", "-c", "ulimit -n"], timeout_s=20)).output == "77\n"
        compared = "grep -E '^(Cap|Seccomp|NoNewPrivs|Uid|Gid|Groups)' /proc/self/status"
        inside = await sandbox.exec(["sh", "-c", compared], timeout_s=20)
        assert inside.output.strip() == await output_of(sandbox, compared)
        if kind != "process":
            assert (await sandbox.exec(["sh", "-c", "echo x > /usr/x"], timeout_s=20)).exit_code != 0


@pytest.mark.parametrize("kind", ISOLATING)
async def test_the_pipes_of_programs_can_be_neither_listed_nor_changed(kind: str):
    async with running(kind) as (sandbox, root):
        (folder,) = root.iterdir()
        pipes = "/run/sandbox" if kind == "bubblewrap" else f"{folder}/pipes"
        (control,) = pipes_inside(root)
        for attempt in ("ls {0}", "touch {0}/x", "rm -f {0}/{1}", "mv {0}/{1} {0}/x", "chmod 777 {0}"):
            seen = await sandbox.shell(attempt.format(pipes, control), timeout_s=20)
            assert seen.exit_code != 0, attempt
        assert (await sandbox.exec(["true"], timeout_s=20)).exit_code == 0


async def test_a_paused_sandbox_starts_no_program_and_one_that_is_gone_says_so():
    async with running("bubblewrap") as (sandbox, _):
        await sandbox.pause()
        with pytest.raises(SandboxError, match="paused"):
            await sandbox.exec(["true"], timeout_s=20)
        await sandbox.resume()
        with pytest.raises(SandboxError):
            await sandbox.exec(["sh", "-c", "kill -9 -1"], timeout_s=20)
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"], timeout_s=20)


async def test_stopping_interrupts_a_program_of_another_task():
    refused: list[str] = []

    async def use(sandbox: Sandbox):
        try:
            await sandbox.exec(["sleep", "1000"], timeout_s=60)
        except SandboxError as exc:
            refused.append(str(exc))

    async with running("bubblewrap") as (sandbox, _), anyio.create_task_group() as group:
        group.start_soon(use, sandbox)
        await anyio.sleep(0.2)
        await sandbox.stop()
    assert len(refused) == 1


async def test_where_setsid_cannot_fork_a_shell_starts_programs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/no/such")
    execution._spawn.cache_clear()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    assert "setsid" not in execution.spawner_script("/x", "y")
    monkeypatch.undo()
    try:
        async with running("bubblewrap") as (sandbox, _):
            seen = await sandbox.exec(["cat"], stdin=b"content", timeout_s=20)
            assert (seen.exit_code, seen.output) == (0, "content")
            assert (await sandbox.exec(["sleep", "1000"], timeout_s=0.2)).timed_out
    finally:
        execution._spawn.cache_clear()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
