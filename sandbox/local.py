"""A sandbox made of a folder, a launcher process and a shell: what the backends of this machine share.

- The launcher is a child of this process and dies with it; everything in the sandbox dies with the launcher.
- Start and stop finish what they began under any cancellation: where an await is cut short, the rest is
  done without one.
"""

import os
import subprocess
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import IO, Any

import anyio
import anyio.to_thread

from sostenuto.errors import SandboxError
from sostenuto.sandbox import archives, idmapped, processes, usage, workspace
from sostenuto.sandbox.cgroups import Cell
from sostenuto.sandbox.channel import Channel
from sostenuto.sandbox.egress.egress import Door, Egress, describe_network
from sostenuto.sandbox.execution import Spawner
from sostenuto.sandbox.folders import MARKER, Folder, Origin, end_marked
from sostenuto.sandbox.grouping import Grouping
from sostenuto.sandbox.launch import Launch
from sostenuto.sandbox.protocol import Blueprint, SandboxUsage, ShellResult, Snapshot
from sostenuto.sandbox.shell import PersistentShell
from sostenuto.sandbox.snapshots import Snapshots

_INLINE_BYTES = 1 << 18
"""Blueprints up to this size are written at once; handing them to a thread costs more."""
_END_S = 5.0
_UNPACKED_FILES = 4
"""An archive may hold as much as this many of the largest files, and no more than half of what is free."""


class LocalSandbox:
    """See `sostenuto.sandbox.protocol.Sandbox`."""

    def __init__(
        self, name: str, blueprint: Blueprint, folder: Folder, origin: Origin, snapshots: Snapshots
    ) -> None:
        self._name = name
        self._limits = blueprint.limits
        self._folder = folder
        self._origin = origin
        self._snapshots = snapshots
        self._channel = Channel()
        self._spawner = Spawner(folder.pipes, folder.token, folder.uid)
        self._launcher: subprocess.Popen[bytes] | None = None
        self._launch: Launch | None = None
        self._grouping: Grouping | None = None
        self._launching = threading.Lock()
        self._pidfds: list[int] = []
        """pidfds of the launcher and its children: readable when the whole sandbox is dead."""
        self._shell: PersistentShell | None = None
        self._network = blueprint.network
        self._door: Door | None = None
        self._paused = False
        self._standing = anyio.Lock()
        """Held by whoever makes it stand still, or go on."""
        self._copied_bytes = 0
        self._kills_seen = 0
        """Processes that the kernel had ended for want of memory when that was last looked at."""
        self._at_rest = 0
        """Processes below the launcher while the shell waits for its first command."""
        self._stopping = anyio.Lock()
        self._gone = False

    async def fill(self) -> None:
        """Put what the workspace starts with into it, as far as it is copied."""
        size = sum(map(len, self._origin.files.values()))
        if self._origin.layered or (not self._origin.lowers and size <= _INLINE_BYTES):
            self._folder.fill(self._origin)
        else:
            await anyio.to_thread.run_sync(self._folder.fill, self._origin)
            self._copied_bytes = sum(map(usage.disk_bytes, self._origin.lowers))

    async def launch(self, launch: Launch) -> None:
        if launch.shown:
            await anyio.to_thread.run_sync(self._start, launch)
        else:
            self._start(launch)

    def _start(self, launch: Launch) -> None:
        try:
            with self._launching:
                if self._gone:
                    raise SandboxError(f"sandbox {self._name!r} was given up")
                self._launch = launch
                self._grouping = Grouping(self._limits)
                spawn = partial(self._spawn, launch)
                self._launcher = idmapped.launch_over(launch.shown, spawn) if launch.shown else spawn()
        except OSError as exc:
            raise SandboxError(f"sandbox {self._name!r}: {launch.argv[0]}: {exc}") from exc
        finally:
            for fd in launch.descriptors:
                os.close(fd)
            self._channel.close_far_ends()

    def _spawn(self, launch: Launch) -> "subprocess.Popen[bytes]":
        stdin, stdout, stderr = self._channel.far_ends
        return subprocess.Popen(
            [*self._entering(), *launch.argv],
            stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=launch.descriptors,
            env=launch.environment | {MARKER: str(self._folder.path)}, cwd="/", start_new_session=True,
        )  # fmt: skip

    def _entering(self) -> list[str]:
        return self._grouping.entering if self._grouping else []

    async def start_shell(self) -> None:
        """Raises SandboxError with the launcher's own words when it gave up."""
        if self._launcher is None or self._launch is None:
            raise SandboxError(f"sandbox {self._name!r} was not launched")
        shell = PersistentShell(self._channel, self._launcher.pid, self._spawner.members)
        try:
            await shell.start()
        except SandboxError as exc:
            if self._kills():
                raise SandboxError(f"{exc}: its memory was used up") from exc
            raise
        self._shell = shell
        launcher = self._launcher.pid
        self._pidfds = processes.open_handles([launcher, *processes.children(launcher)])
        self._spawner.settle(launcher, self._launch.pipes, self._cell)
        if self._origin.layered:
            enter, pid = self._folder.enter, shell.host_pid()
            await anyio.to_thread.run_sync(enter, pid, self._launch.workspace, self._origin.files)
            await anyio.to_thread.run_sync(idmapped.withdraw, self._launch.shown)
        self._at_rest = self._tasks()

    async def open_network(self, egress: Egress) -> None:
        """Let it reach what its blueprint lists."""
        if self._network:
            self._door = await egress.open(self._running().host_pid(), None, self._network)

    async def describe_network(self) -> dict[str, str]:
        """What could be opened to it, for people."""
        return {"network": await describe_network(self._running().host_pid())}

    async def shell(self, command: str, *, timeout_s: float, output_bytes: int = 65536) -> ShellResult:
        self._check_awake()
        before = self._kills_seen
        result = await self._explained(self._running().run(command, timeout_s, output_bytes))
        self._kills_seen = self._kills()
        return replace(result, out_of_memory=True) if self._kills_seen > before else result

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, output_bytes: int = 65536
    ) -> ShellResult:
        self._check_awake()
        self._running()
        return await self._explained(self._spawner.run(argv, stdin, timeout_s, output_bytes))

    async def _explained(self, running: Coroutine[Any, Any, ShellResult]) -> ShellResult:
        """Where it fails as the kernel ends a process for want of memory, the error says so."""
        before = self._kills_seen
        try:
            return await running
        except SandboxError as exc:
            if self._kills() > before:
                raise SandboxError(f"{exc}: its memory was used up") from exc
            raise

    def _cell(self) -> Cell | None:
        return self._grouping.cell() if self._grouping else None

    def _kills(self) -> int:
        return self._grouping.out_of_memory_kills() if self._grouping else 0

    def _check_awake(self) -> None:
        if self._paused:
            raise SandboxError(f"sandbox {self._name!r} is paused; resume it first")
        if self._door is not None:
            self._door.check()

    def _running(self) -> PersistentShell:
        launcher = self._launcher
        if self._shell is None or launcher is None or launcher.poll() is not None or self._channel.ended:
            raise SandboxError(f"sandbox {self._name!r} has ended")
        return self._shell

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        self._running()
        return await anyio.to_thread.run_sync(self._read, path, max_bytes)

    def _read(self, path: str, max_bytes: int) -> bytes:
        with self._folder.open_workspace() as fd:
            return workspace.read_file(fd, path, max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        self._running()
        await anyio.to_thread.run_sync(self._write, path, data)

    def _write(self, path: str, data: bytes) -> None:
        with self._folder.open_workspace() as fd:
            workspace.write_file(fd, path, data, uid=self._folder.uid)

    async def upload(self, archive: bytes | IO[bytes], path: str = ".") -> None:
        self._running()
        await anyio.to_thread.run_sync(self._upload, archive, path)

    def _upload(self, archive: bytes | IO[bytes], path: str) -> None:
        with self._folder.open_workspace() as fd:
            disk = os.fstatvfs(fd)
            most_bytes = min(_UNPACKED_FILES * self._limits.file_bytes, disk.f_bavail * disk.f_frsize // 2)
            bound = archives.Bound(self._limits.file_bytes, most_bytes)
            archives.unpack(fd, archive, path, bound, uid=self._folder.uid)

    async def download(self, path: str = ".", *, max_bytes: int = 64 << 20) -> bytes:
        self._running()
        return await anyio.to_thread.run_sync(self._download, path, max_bytes)

    def _download(self, path: str, max_bytes: int) -> bytes:
        with self._folder.open_workspace() as fd:
            return archives.pack(fd, path, max_bytes)

    async def download_to(self, target: IO[bytes], path: str = ".", *, max_bytes: int) -> None:
        self._running()
        await anyio.to_thread.run_sync(self._download_to, target, path, max_bytes)

    def _download_to(self, target: IO[bytes], path: str, max_bytes: int) -> None:
        with self._folder.open_workspace() as fd:
            archives.pack_into(target, fd, path, max_bytes)

    async def pause(self) -> None:
        async with self._standing:
            self._running()
            self._paused = True
            self._stand()

    async def reclaim(self) -> None:
        async with self._standing:
            self._running()
            assert self._grouping is not None
            self._grouping.check_moves_out()
            self._paused = True
            self._stand()
            await anyio.to_thread.run_sync(self._grouping.move_out)

    async def resume(self) -> None:
        async with self._standing:
            self._running()
            if self._grouping is not None:
                self._grouping.let_back()
            self._go_on()
            self._paused = False

    async def snapshot(self) -> Snapshot:
        async with self._standing:
            self._running()
            taking = self._snapshots.begin(self._name, self._folder, self._origin)
            try:
                self._stand()
                return await anyio.to_thread.run_sync(taking.run)
            except BaseException:
                taking.give_up()
                raise
            finally:
                if not self._paused and not self._gone:
                    self._go_on()

    async def is_quiet(self) -> bool:
        self._running()
        return self._tasks() <= self._at_rest

    def _tasks(self) -> int:
        return len(processes.descendants(self._launcher.pid)) if self._launcher is not None else 0

    async def usage(self) -> SandboxUsage:
        self._running()
        return await anyio.to_thread.run_sync(self._usage)

    def _usage(self) -> SandboxUsage:
        assert self._launcher is not None
        assert self._grouping is not None
        tree = processes.descendants(self._launcher.pid)
        memory_bytes, peak_bytes = self._grouping.memory_bytes(tree)
        written_bytes = usage.disk_bytes(self._folder.workspace) + usage.disk_bytes(self._folder.tmp)
        return SandboxUsage(
            memory_bytes,
            peak_bytes,
            self._grouping.cpu_s(tree),
            len(tree),
            max(0, written_bytes - self._copied_bytes),
        )

    def _stand(self) -> None:
        if self._launcher is not None and self._grouping is not None:
            self._grouping.stop(self._launcher.pid)

    def _go_on(self) -> None:
        if self._launcher is not None:
            processes.thaw(self._launcher.pid)

    async def stop(self) -> None:
        try:
            with anyio.CancelScope(shield=True):
                async with self._stopping:
                    await self._stop()
        except BaseException:
            self.end_now()
            raise

    async def _stop(self) -> None:
        if self._gone:
            return
        self._kill()
        with anyio.move_on_after(_END_S):
            for fd in self._pidfds:
                await anyio.wait_readable(fd)
        self._reap()
        await anyio.to_thread.run_sync(self._remove)
        self._gone = True

    def _remove(self) -> None:
        """The cgroup last: if a process in it cannot be ended, the rest is gone all the same."""
        self._folder.remove()
        if self._grouping is not None:
            self._grouping.remove()

    def end_now(self) -> None:
        """What `stop` does, without an await: for ways out on which nothing more can be awaited."""
        with self._launching:
            gone, self._gone = self._gone, True
        if not gone:
            self._kill()
            self._reap()
            self._remove()

    def _kill(self) -> None:
        launcher = self._launcher
        if launcher is None:
            return
        if launcher.poll() is not None:
            end_marked(self._folder.path)  # whoever killed a supervisor has orphaned what it watched
        elif self._shell is None:
            # Half started: its children may not yet be bound to die with it.
            processes.end_tree(launcher.pid)
        elif self._launch is not None:
            launcher.send_signal(self._launch.end_signal)

    def _reap(self) -> None:
        """Wait for the launcher, which the kernel or `_kill` has ended; then nothing of it is left."""
        if self._launcher is not None:
            try:
                self._launcher.wait(_END_S)
            except subprocess.TimeoutExpired:
                processes.end_tree(self._launcher.pid)
                self._launcher.wait(_END_S)
        if self._door is not None:
            self._door.close()
        handles, self._pidfds = self._pidfds, []
        processes.await_death(handles)
        self._channel.close()
        self._spawner.close()
        self._folder.leave()


async def start_local(
    folder: Folder,
    name: str,
    blueprint: Blueprint,
    origin: Origin,
    snapshots: Snapshots,
    plan: Callable[[Folder], Launch],
    egress: Egress | None = None,
) -> LocalSandbox:
    """Fill the folder, launch, wait for the shell; on any failure nothing is left, the folder included."""
    sandbox: LocalSandbox | None = None
    try:
        snapshots.borrow(origin, folder)
        sandbox = LocalSandbox(name, blueprint, folder, origin, snapshots)
        await sandbox.fill()
        await sandbox.launch(plan(folder))
        await sandbox.start_shell()
        if egress is not None:
            await sandbox.open_network(egress)
    except BaseException:
        if sandbox is not None:
            sandbox.end_now()
        folder.remove()
        raise
    return sandbox
