"""A sandbox made of a folder, a launcher process and a shell: what the backends of this machine share.

- The launcher is a child of this process and dies with it; everything in the sandbox dies with the launcher.
- Start and stop finish what they began under any cancellation: where an await is cut short, the rest is
  done without one.
"""

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread

from sostenuto.errors import ConfigError, SandboxError
from sostenuto.sandbox import processes, workspace
from sostenuto.sandbox.channel import Channel
from sostenuto.sandbox.folders import MARKER, Folder, end_marked
from sostenuto.sandbox.protocol import Blueprint, ShellResult
from sostenuto.sandbox.shell import SHELLS, PersistentShell

_INLINE_BYTES = 1 << 18
"""Blueprints up to this size are written at once; handing them to a thread costs more."""
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start the launcher of one sandbox."""

    argv: list[str]
    environment: dict[str, str]
    """All variables of the launcher; not on its command line, which others may read."""
    end_signal: signal.Signals
    """SIGKILL when the kernel then ends everything inside, SIGTERM when the launcher does."""
    descriptors: tuple[int, ...] = field(default=())
    """Passed on to the launcher and closed here once it runs."""


class LocalSandbox:
    """See `sostenuto.sandbox.protocol.Sandbox`."""

    def __init__(self, name: str, folder: Folder) -> None:
        self._name = name
        self._folder = folder
        self._channel = Channel()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._end_signal = signal.SIGKILL
        self._pidfds: list[int] = []
        """pidfds of the launcher and its children: readable when the whole sandbox is dead."""
        self._shell: PersistentShell | None = None
        self._paused = False
        self._stopping = anyio.Lock()
        self._gone = False

    def launch(self, launch: Launch) -> None:
        try:
            self._spawn(launch)
        except OSError as exc:
            raise SandboxError(f"sandbox {self._name!r}: {launch.argv[0]}: {exc}") from exc
        finally:
            for fd in launch.descriptors:
                os.close(fd)
            self._channel.close_far_ends()

    def _spawn(self, launch: Launch) -> None:
        stdin, stdout, stderr = self._channel.far_ends
        self._end_signal = launch.end_signal
        self._launcher = subprocess.Popen(
            launch.argv, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=launch.descriptors,
            env=launch.environment | {MARKER: str(self._folder.path)}, cwd="/", start_new_session=True,
        )  # fmt: skip

    async def start_shell(self) -> None:
        """Raises SandboxError with the launcher's own words when it gave up."""
        if self._launcher is None:
            raise SandboxError(f"sandbox {self._name!r} was not launched")
        shell = PersistentShell(self._channel, self._launcher.pid)
        await shell.start()
        self._shell = shell
        launcher = self._launcher.pid
        self._pidfds = processes.open_handles([launcher, *processes.children(launcher)])

    async def shell(self, command: str, *, timeout_s: float, output_bytes: int = 65536) -> ShellResult:
        if self._paused:
            raise SandboxError(f"sandbox {self._name!r} is paused; resume it first")
        return await self._running().run(command, timeout_s, output_bytes)

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

    async def pause(self) -> None:
        self._running()
        self._paused = True
        self._signal(processes.freeze)

    async def resume(self) -> None:
        self._running()
        self._signal(processes.thaw)
        self._paused = False

    def _signal(self, sweep: Callable[[int], object]) -> None:
        if self._launcher is not None:
            try:
                sweep(self._launcher.pid)
            except TimeoutError as exc:
                raise SandboxError(f"sandbox {self._name!r}: {exc}") from exc

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
        await anyio.to_thread.run_sync(self._folder.remove)
        self._gone = True

    def end_now(self) -> None:
        """What `stop` does, without an await: for ways out on which nothing more can be awaited."""
        if not self._gone:
            self._kill()
            self._reap()
            self._folder.remove()
            self._gone = True

    def _kill(self) -> None:
        launcher = self._launcher
        if launcher is None:
            return
        if launcher.poll() is not None:
            end_marked(self._folder.path)  # whoever killed a supervisor has orphaned what it watched
        elif self._shell is None:
            # Half started: its children may not yet be bound to die with it.
            processes.end_tree(launcher.pid)
        else:
            launcher.send_signal(self._end_signal)

    def _reap(self) -> None:
        """Wait for the launcher, which the kernel or `_kill` has ended; then nothing of it is left."""
        if self._launcher is not None:
            try:
                self._launcher.wait(_END_S)
            except subprocess.TimeoutExpired:
                processes.end_tree(self._launcher.pid)
                self._launcher.wait(_END_S)
        handles, self._pidfds = self._pidfds, []
        processes.await_death(handles)
        self._channel.close()


def check_blueprint(name: str, blueprint: Blueprint) -> None:
    """Raise ConfigError or SandboxError for what no backend could start."""
    if blueprint.shell not in SHELLS:
        raise ConfigError(f"sandbox {name!r}: shell {blueprint.shell!r}; known: {', '.join(SHELLS)}")
    for variable, value in blueprint.environment.items():
        if not variable.isidentifier() or "\0" in value:
            raise ConfigError(f"sandbox {name!r}: {variable!r} cannot be an environment variable")
    if blueprint.template is not None and not Path(blueprint.template).is_dir():
        raise SandboxError(f"sandbox {name!r}: template {blueprint.template!r} is not a folder")


async def start_local(
    folder: Folder, name: str, blueprint: Blueprint, plan: Callable[[Folder], Launch]
) -> LocalSandbox:
    """Fill the folder, launch, wait for the shell; on any failure nothing is left, the folder included."""
    sandbox: LocalSandbox | None = None
    try:
        sandbox = LocalSandbox(name, folder)
        await _fill(folder, blueprint)
        sandbox.launch(plan(folder))
        await sandbox.start_shell()
    except BaseException:
        if sandbox is not None:
            sandbox.end_now()
        folder.remove()
        raise
    return sandbox


async def _fill(folder: Folder, blueprint: Blueprint) -> None:
    if blueprint.template is None and sum(map(len, blueprint.files.values())) <= _INLINE_BYTES:
        folder.fill(blueprint)
    else:
        await anyio.to_thread.run_sync(folder.fill, blueprint)
