"""What a hostile program inside tries, against each backend that isolates."""

import io
import os
import socket
import subprocess
import sys
import tarfile
from contextlib import suppress
from pathlib import Path

import landlockpy
import pytest

from sandboxes import ISOLATING, backend_of, left_processes, output_of, running, sandbox_root
from sostenuto.errors import PathError, SandboxError
from sostenuto.sandbox import processes
from sostenuto.sandbox.protocol import Blueprint, SandboxLimits
from sostenuto.sandbox.supervised import SHARED_TASKS

each_backend = pytest.mark.parametrize("kind", ISOLATING)


def archive_of(name: str, content: bytes) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return memory.getvalue()


ONE_FILE = archive_of("secret", b"mine\n")


def python(code: str) -> str:
    """A command that runs `code` and prints what it raises."""
    quoted = code.replace("'", '"')
    return f"python3 -c '\ntry:\n  {quoted}\nexcept BaseException as e: print(type(e).__name__, e)\n' 2>&1"


def holds(path: str, text: str) -> bool:
    with suppress(OSError):
        return Path(path).is_file() and Path(path).read_text() == text
    return False


@each_backend
async def test_the_system_cannot_be_written(kind: str):
    async with running(kind) as (sandbox, _):
        for path in (
            "/usr/x",
            "/etc/x",
            "/bin/x",
            "/x",
            "/dev/x",
            "/proc/sys/kernel/hostname",
            "/home/x",
            "/var/x",
        ):
            assert (await sandbox.shell(f"echo bad > {path}", timeout_s=20)).exit_code != 0, path
            assert not holds(path, "bad\n")


@each_backend
async def test_homes_and_secrets_of_the_system_cannot_be_read(kind: str, tmp_path: Path):
    (tmp_path / "secret").write_text("hidden")
    async with running(kind) as (sandbox, _):
        for path in (
            "/home",
            "/opt",
            "/etc/shadow",
            "/var/log",
            "/run",
            "/sys/kernel",
            str(tmp_path / "secret"),
        ):
            seen = await sandbox.shell(f"cat {path}/* {path} && ls {path}/.ssh", timeout_s=20)
            assert seen.exit_code != 0, path
            assert "hidden" not in seen.output


@each_backend
async def test_another_sandbox_cannot_be_seen_or_touched(kind: str):
    with sandbox_root() as root:
        backend = backend_of(kind, root)
        one, other = await backend.start("one", Blueprint()), await backend.start("other", Blueprint())
        try:
            await one.write("secret", b"hidden")
            await one.shell("chmod 644 secret; chmod 755 .; sleep 1000 & echo $!", timeout_s=20)
            where = next(path for path in root.iterdir() if (path / "workspace" / "secret").exists())
            for command in (
                f"cat {where}/workspace/secret",
                f"ls {where}",
                f"ls {root}",
                f"touch {where}/tmp/x",
            ):
                assert (await other.shell(command, timeout_s=20)).exit_code != 0, command
            hunt = (
                "for p in /proc/[0-9]*; do cat $p/environ; "
                "for way in cwd root; do cat $p/$way/secret; done; done 2>/dev/null"
            )
            assert "hidden" not in await output_of(other, hunt)
        finally:
            await one.stop()
            await other.stop()


@each_backend
async def test_processes_of_another_sandbox_can_be_neither_read_nor_traced_nor_ended(kind: str):
    if kind == "landlock" and landlockpy.abi_version() < 6 and os.geteuid() != 0:
        pytest.skip("Landlock before ABI 6 does not confine signals, as `isolation` says")
    with sandbox_root() as root:
        backend = backend_of(kind, root)
        one, other = await backend.start("one", Blueprint()), await backend.start("other", Blueprint())
        try:
            started = "sleep 1000 & until grep -q 1000 /proc/$!/cmdline; do :; done; X=kept"
            await one.shell(started, timeout_s=20)
            victims = [pid for pid in processes.descendants(os.getpid()) if processes.has_word(pid, "1000")]
            assert victims
            for pid in victims:
                trace = f"import ctypes; print(ctypes.CDLL(None).ptrace(16, {pid}, 0, 0))"
                assert await output_of(other, python(trace)) == "-1"
                for attempt in (f"head -c 1 /proc/{pid}/mem", f"cat /proc/{pid}/environ", f"kill -9 {pid}"):
                    assert (await other.shell(attempt, timeout_s=20)).exit_code != 0, attempt
            assert await output_of(one, "echo $X; kill -0 $! && echo alive") == "kept\nalive"
        finally:
            await one.stop()
            await other.stop()


@each_backend
async def test_descriptors_used_up_inside_bound_nobody_outside(kind: str):
    async with running(kind, Blueprint(limits=SandboxLimits(open_files=64, processes=40))) as (sandbox, _):
        opens = 'import time; x = [open("/dev/null") for _ in range(50)]; time.sleep(1000)'
        await sandbox.shell(f"for i in 1 2 3 4 5 6 7 8; do python3 -c '{opens}' & done", timeout_s=20)
        assert (await sandbox.exec(["cat"], stdin=b"x", timeout_s=20)).output == "x"
        await sandbox.write("a/b", b"content")
        assert await sandbox.read("a/b") == b"content"
        full = await sandbox.exec(
            ["sh", "-c", f"exec python3 -c '{opens.replace('50', '500')}'"], timeout_s=20
        )
        assert "Too many open files" in full.output


_SWAPS = """
mkdir -p kept && echo mine > kept/secret
while :; do
  ln -s ../.. up; mkfifo pipe; mkdir folder
  for new in up pipe folder; do mv kept hidden; mv -T $new swapped; mv -T swapped $new; mv hidden kept; done
  mv kept swapped; mv swapped kept; ln -sfn / secret; mv -f pipe secret; rm -rf up pipe folder secret
done
"""


@each_backend
async def test_links_pipes_and_folders_swapped_from_inside_lead_nowhere(kind: str, tmp_path: Path):
    (tmp_path / "file").write_text("of the template")
    async with running(kind, Blueprint(str(tmp_path))) as (sandbox, root):
        await sandbox.shell(f"({_SWAPS}) >/dev/null 2>&1 &", timeout_s=20)
        for number in range(100):
            for name in ("swapped/secret", "kept/secret", "secret", "swapped/tmp/secret", "up/secret"):
                with suppress(PathError):
                    await sandbox.write(name, b"mine\n")
                with suppress(PathError):
                    assert await sandbox.read(name) == b"mine\n"
            with suppress(PathError):
                await sandbox.upload(ONE_FILE, ("swapped", "kept", "up", "secret")[number % 4])
            with suppress(PathError):
                assert b"root:" not in await sandbox.download(".")
        await sandbox.shell("kill $!", timeout_s=20)
        for above in (root.parent, root, *root.iterdir()):
            assert not {"secret", "swapped", "kept"} & {path.name for path in above.iterdir()}
    assert (tmp_path / "file").read_text() == "of the template"


@each_backend
async def test_what_a_sandbox_writes_is_bounded_file_by_file_and_told(kind: str):
    """The sum is bounded by nothing but the disk: whoever owns the sandbox looks at `usage`."""
    async with running(kind, Blueprint(limits=SandboxLimits(file_bytes=1 << 20))) as (sandbox, _):
        fill = "for i in 1 2 3 4 5 6 7 8; do head -c 4000000 /dev/zero > $i; done; ls -l | grep -c 1048576"
        assert (await output_of(sandbox, fill)).endswith("8")
        assert (await sandbox.shell("truncate -s 4M larger", timeout_s=20)).exit_code != 0
        used = (await sandbox.usage()).disk_bytes
        assert 8 << 20 <= used < 9 << 20


@each_backend
async def test_variables_of_the_runtime_do_not_reach_a_sandbox(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("API_KEY", "hunter2")
    async with running(kind) as (sandbox, _):
        assert "hunter2" not in await output_of(
            sandbox, "env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'"
        )


@each_backend
async def test_variables_of_a_sandbox_are_on_no_command_line(kind: str):
    async with running(kind, Blueprint(environment={"TOKEN": "hunter2"})) as (sandbox, root):
        assert await output_of(sandbox, "echo $TOKEN") == "hunter2"
        lines = left_processes(root)
        assert lines
        assert "hunter2" not in " ".join(lines)


@each_backend
async def test_there_is_no_network(kind: str):
    abstract = "\0sostenuto-test-" + str(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(abstract)
        unix.listen()
        port = tcp.getsockname()[1]
        async with running(kind) as (sandbox, _):
            code = f'import socket; socket.create_connection(("127.0.0.1", {port}), 5); print("REACHED")'
            seen = await output_of(sandbox, python(code))
            assert "Error" in seen
            assert "REACHED" not in seen
            name = abstract.replace("\0", "\\0")
            code = f'import socket; socket.socket(socket.AF_UNIX).connect("{name}"); print("REACHED")'
            assert "REACHED" not in await output_of(sandbox, python(code))
            code = 'import socket; a, b = socket.socketpair(); a.send(b"pair works"); print(b.recv(99))'
            assert "pair works" in await output_of(sandbox, python(code))


@each_backend
@pytest.mark.parametrize(
    "call", ["unshare -U true", "unshare -m true", "unshare -r true", "mount -t tmpfs x ."]
)
async def test_namespaces_and_mounts_cannot_be_made(kind: str, call: str):
    async with running(kind) as (sandbox, _):
        assert (await sandbox.shell(call, timeout_s=20)).exit_code != 0


def bystander() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])


@each_backend
async def test_processes_outside_cannot_be_traced_or_killed(kind: str):
    if kind == "landlock" and landlockpy.abi_version() < 6 and os.geteuid() != 0:
        pytest.skip("Landlock before ABI 6 does not confine signals, as `isolation` says")
    outside = bystander()
    try:
        async with running(kind) as (sandbox, _):
            await sandbox.shell(f"kill -9 {outside.pid}; kill -9 {os.getpid()}", timeout_s=20)
            trace = f"import ctypes; print(ctypes.CDLL(None).ptrace(16, {outside.pid}, 0, 0))"
            assert await output_of(sandbox, python(trace)) == "-1"
            with suppress(SandboxError):  # it ends itself
                await sandbox.shell("kill -9 -1", timeout_s=5)
            assert outside.poll() is None
    finally:
        outside.kill()
        outside.wait()


@each_backend
async def test_a_fork_bomb_is_bounded_and_ends_with_its_deadline(kind: str):
    limits = SandboxLimits(processes=40)
    async with running(kind, Blueprint(limits=limits)) as (sandbox, root):
        shares_user = kind != "bubblewrap" and os.geteuid() != 0
        most = limits.processes + (SHARED_TASKS if shares_user else 0)
        bomb = "f() { f & f & sleep 1; }; f; while :; do f; done"
        await sandbox.shell(bomb, timeout_s=0.5)
        assert len(left_processes(root)) <= most + 3
        # What is left of the bomb may still complain in between.
        assert "alive" in (await output_of(sandbox, "echo alive")).splitlines()


@each_backend
async def test_limits_on_memory_files_and_descriptors_hold(kind: str):
    limits = SandboxLimits(memory_bytes=512 << 20, file_bytes=1 << 20, open_files=64)
    async with running(kind, Blueprint(limits=limits)) as (sandbox, _):
        hog = await sandbox.shell(python("bytearray(600 << 20)"), timeout_s=20)
        assert hog.out_of_memory or "MemoryError" in hog.output
        await sandbox.shell("head -c 3000000 /dev/zero > big", timeout_s=20)
        assert await output_of(sandbox, "wc -c < big") == str(1 << 20)
        opened = await output_of(sandbox, python('x = [open("/dev/null") for _ in range(100)]'))
        assert "Too many open files" in opened
        raised = await sandbox.shell("ulimit -n unlimited", timeout_s=20)
        assert raised.exit_code != 0
        assert await output_of(sandbox, "echo alive") == "alive"


async def test_temporary_files_in_memory_are_bounded():
    limits = SandboxLimits(memory_bytes=64 << 20)
    async with running("bubblewrap", Blueprint(limits=limits)) as (sandbox, _):
        for folder in ("/tmp", "/dev/shm"):
            fill = (
                f"for i in 1 2 3 4 5 6 7 8; do head -c 16000000 /dev/zero > {folder}/$i; done; rm {folder}/*"
            )
            assert "No space left" in (await sandbox.shell(fill, timeout_s=20)).output


@each_backend
async def test_a_sandbox_has_no_privileges(kind: str):
    async with running(kind) as (sandbox, _):
        status = dict(
            line.split(":", 1)
            for line in (await output_of(sandbox, "cat /proc/self/status")).splitlines()
            if ":" in line
        )
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status["CapAmb"], 16) == 0
        assert (status["NoNewPrivs"].strip(), status["Seccomp"].strip()) == ("1", "2")


async def test_a_sandbox_sees_only_its_own_processes_under_bubblewrap():
    async with running("bubblewrap") as (sandbox, _):
        assert int(await output_of(sandbox, "ls -d /proc/[0-9]* | wc -l")) < 10
        assert await output_of(sandbox, "hostname") == "sandbox"


async def test_a_command_has_neither_the_status_pipe_nor_the_command_pipe():
    async with running("bubblewrap") as (sandbox, _):
        assert (await sandbox.shell("echo x >&9; echo y >&8; (exit 5)", timeout_s=20)).exit_code == 5
        seen = await output_of(sandbox, "ls -l /proc/self/fd | grep -c pipe; cat")
        assert seen == "2"  # ls writes to grep, and its errors to the output
