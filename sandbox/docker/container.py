"""A sandbox that is a container."""

import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, TypeVar

import anyio

from sostenuto.errors import PathError, SandboxError
from sostenuto.sandbox.cgroup_files import Memory
from sostenuto.sandbox.cgroup_tree import Tree
from sostenuto.sandbox.docker.calls import Calls
from sostenuto.sandbox.docker.execs import Site, execute
from sostenuto.sandbox.docker.files import Files
from sostenuto.sandbox.docker.images import Images
from sostenuto.sandbox.docker.memory import memory_of_container
from sostenuto.sandbox.docker.removal import remove_container, restore_container
from sostenuto.sandbox.docker.shell import ContainerShell
from sostenuto.sandbox.docker.stream import Stream
from sostenuto.sandbox.docker.tars import Packer
from sostenuto.sandbox.docker.typed import Conflict, ContainerPlan, Daemon
from sostenuto.sandbox.docker.wire import Wire
from sostenuto.sandbox.egress.egress import Door, Egress, describe_network
from sostenuto.sandbox.protocol import SandboxUsage, ShellResult, Snapshot

T = TypeVar("T")
_COMMIT_S = 600.0
_TRANSFER_S = 300.0
_STOP_S = 60.0
_COUNT_S = 10.0


@dataclass(frozen=True, slots=True)
class Ground:
    """What the sandboxes of one backend share."""

    daemon: Daemon
    calls: Calls
    images: Images
    uid: int


class DockerSandbox:
    """See `sostenuto.sandbox.protocol.Sandbox`."""

    def __init__(self, ground: Ground, name: str, container: str, plan: ContainerPlan) -> None:
        self.name = name
        self._ground = ground
        self._container = container
        self._plan = plan
        self._files = Files(ground.daemon, container, ground.uid)
        self._stream = Stream(Wire(ground.daemon.socket))
        self._shell = ContainerShell(self._stream, self._awake)
        self._changing = anyio.Lock()
        """Held while it is paused, resumed or committed, and while it must not be."""
        self._door: Door | None = None
        self._paused = False
        self._moved_out: Memory | None = None
        """The memory that is to be let back before its processes go on."""
        self._checkpoint: str | None = None
        """From which it has to be started again."""
        self._can_checkpoint = plan.checkpoints
        """Once: a second time Docker no longer knows that the container has ended, and leaks its shim."""
        self._peak_bytes = 0
        self._at_rest = 0
        """Processes while the shell waits for its first command."""
        self._removal: Future[None] | None = None

    async def open(self) -> None:
        """Attach to the running container and start the shell."""
        await self._attach()
        await self._shell.start()
        self._at_rest = await self._tasks() or 0

    async def _attach(self) -> None:
        wire = Wire(self._ground.daemon.socket)
        self._stream.move_to(wire)
        version = await self._ground.calls.run(self._ground.daemon.version_path)
        target = f"{version}/containers/{self._container}/attach?stream=1&stdin=1&stdout=1&stderr=1"
        await wire.upgrade(target)

    async def open_network(self, egress: Egress, network: tuple[str, ...]) -> None:
        """Let it reach the servers of the list."""
        self._door = await egress.open(*await self._network_of(), network)

    async def describe_network(self) -> dict[str, str]:
        """What could be opened to it, for people."""
        return {"network": await describe_network(*await self._network_of())}

    async def _network_of(self) -> tuple[int, str]:
        """A process in its network, as the daemon counts, and what it calls that network itself."""
        pid = await self._ground.calls.run(partial(self._ground.daemon.main_pid, self._container))
        seen = await self._shell.run("readlink /proc/self/ns/net", _COUNT_S, 64)
        return pid, seen.output.strip()

    async def _tasks(self) -> int | None:
        """Processes inside, the one that counts them among them; None: they could not be counted."""
        counted = await self._shell.run("(set -- /proc/[0-9]*; echo $#)", _COUNT_S, 64)
        return int(counted.output) if counted.output.strip().isdigit() else None

    async def is_quiet(self) -> bool:
        self._check_running()
        tasks = await self._tasks()
        return tasks is not None and tasks <= self._at_rest

    async def shell(self, command: str, *, timeout_s: float, output_bytes: int = 65536) -> ShellResult:
        self._check_running()
        return await self._shell.run(command, timeout_s, output_bytes)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        output_bytes: int = 65536,
    ) -> ShellResult:
        self._check_running()
        ground = self._ground
        site = Site(ground.daemon, ground.calls, self._container, self._order, self._awake)
        return await execute(site, argv, stdin=stdin, timeout_s=timeout_s, output_bytes=output_bytes)

    async def _order(self, order: str) -> None:
        await self._stream.send(f"{order}\n")

    def _check_running(self) -> None:
        self._check_there()
        if self._paused:
            raise SandboxError(f"sandbox {self.name!r} is paused; resume it first")
        if self._door is not None:
            self._door.check()

    def _check_there(self) -> None:
        if self._removal is not None or (self._stream.ended and self._checkpoint is None):
            raise SandboxError(f"sandbox {self.name!r} has ended")

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        return await self._transfer(partial(self._files.read, path, max_bytes))

    async def write(self, path: str, data: bytes) -> None:
        await self._transfer(partial(self._files.write, path, data))

    async def upload(self, archive: bytes | IO[bytes], path: str = ".") -> None:
        await self._transfer(partial(self._files.upload, archive, path, self._plan.rlimits["fsize"]))

    async def download(self, path: str = ".", *, max_bytes: int = 64 << 20) -> bytes:
        return await self._transfer(partial(self._files.download, path, max_bytes))

    async def download_to(self, target: IO[bytes], path: str = ".", *, max_bytes: int) -> None:
        await self._transfer(partial(self._files.download_to, target, path, max_bytes))

    async def _transfer(self, work: Callable[[], T]) -> T:
        self._check_there()
        return await self._ground.calls.run(work, _TRANSFER_S)

    async def pause(self) -> None:
        async with self._changing:
            self._check_there()
            self._paused = True
            if self._checkpoint is None:
                await self._change(self._ground.daemon.pause)

    async def reclaim(self) -> None:
        async with self._changing:
            self._check_there()
            if self._can_checkpoint:
                await self._put_on_disk()
                return
            if self._checkpoint is not None:
                return
            memory = await self._ground.calls.run(self._memory)
            self._paused = True
            await self._change(self._ground.daemon.pause)
            self._moved_out = memory
            await self._written(memory.move_out)

    async def _put_on_disk(self) -> None:
        self._can_checkpoint = False
        with anyio.CancelScope(shield=True):
            if self._paused:
                await self._change(self._ground.daemon.unpause)
            self._paused = False
            name = secrets.token_hex(8)
            await self._ground.calls.run(partial(self._ground.daemon.checkpoint, self._container, name))
            self._paused, self._checkpoint = True, name

    def _memory(self) -> Memory:
        main = self._ground.daemon.main_pid(self._container)
        return memory_of_container(Tree(main), self._container, self._plan.memory_bytes)

    async def _written(self, write: Callable[[], None]) -> None:
        """To the files of its cgroup."""
        try:
            await self._ground.calls.run(write)
        except OSError as error:
            raise SandboxError(f"sandbox {self.name!r}: its cgroup: {error}") from error

    async def resume(self) -> None:
        async with self._changing:
            self._check_there()
            await self._go_on()
            self._paused = False

    async def _go_on(self) -> None:
        if self._moved_out is not None:
            await self._written(self._moved_out.let_back)
            self._moved_out = None
        if self._checkpoint is None:
            await self._change(self._ground.daemon.unpause)
            return
        with anyio.CancelScope(shield=True):
            restore = partial(restore_container, self._ground.daemon, self._container, self._checkpoint)
            await self._ground.calls.run(restore)
            self._checkpoint = None
            await self._attach()

    async def _change(self, change: Callable[[str], None]) -> None:
        """Not given up half-way: nobody would know which of the two it then is."""
        with anyio.CancelScope(shield=True), suppress(Conflict):  # it is so already
            await self._ground.calls.run(partial(change, self._container))

    @asynccontextmanager
    async def _awake(self) -> AsyncGenerator[None]:
        """Its processes are not paused inside."""
        async with self._changing:
            if self._paused:
                await self._go_on()
            try:
                yield
            finally:
                if self._paused and not self._stream.ended:
                    await self._change(self._ground.daemon.pause)

    async def snapshot(self) -> Snapshot:
        ground = self._ground
        reference = ground.images.new_reference()
        async with self._changing:
            self._check_there()
            commit = ground.calls.begin(partial(self._commit, reference))
            try:
                size_bytes = await ground.calls.wait(commit, _COMMIT_S)
            except BaseException:
                ground.calls.begin(partial(self._forget_after, commit, reference))
                raise
        return Snapshot("docker", reference, size_bytes)

    def _commit(self, reference: str) -> int:
        self._ground.daemon.commit(self._container, reference, self._plan.labels)
        return self._ground.daemon.layer_bytes(reference)

    def _forget_after(self, commit: "Future[int]", reference: str) -> None:
        commit.exception()
        self._ground.images.forget(reference)

    async def usage(self) -> SandboxUsage:
        self._check_there()
        return await self._ground.calls.run(self._usage)

    def _usage(self) -> SandboxUsage:
        seen = self._ground.daemon.counters(self._container)
        self._peak_bytes = max(self._peak_bytes, seen.peak_memory_bytes)
        written_bytes = self._ground.daemon.written_bytes(self._container)
        return SandboxUsage(seen.memory_bytes, self._peak_bytes, seen.cpu_s, seen.processes, written_bytes)

    async def stop(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._ground.calls.wait(self.end_soon(), _STOP_S)

    def end_soon(self) -> "Future[None]":
        """Begin what `stop` waits for; it goes on although nobody waits."""
        failed = self._removal is not None and self._removal.done() and self._removal.exception()
        if self._removal is None or failed:
            self._removal = self._ground.calls.begin(partial(remove_of, self._ground, self._container))
        self._stream.close()
        if self._door is not None:
            self._door.close()
        return self._removal


def remove_of(ground: Ground, container: str) -> None:
    """End and remove it, and then the images that only it still used.  Blocks."""
    remove_container(ground.daemon, container)
    ground.images.sweep()


def place_files(ground: Ground, container: str, files: dict[str, bytes], file_bytes: int) -> None:
    """Write the files of a blueprint; SandboxError when one of them cannot be.  Blocks."""
    with Packer(ground.uid) as packer:
        for name, content in files.items():
            packer.file(name, content)
        try:
            Files(ground.daemon, container, ground.uid).upload(packer.archive(), ".", file_bytes)
        except PathError as error:
            raise SandboxError(f"a file that the workspace starts with: {error}") from error
