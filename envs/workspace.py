"""An environment's sandbox, as its author declares it and as its methods use it.

`sandbox = SandboxSpec(...)` in a class body is a declaration; `self.sandbox` on an instance is the
handle of the sandbox that the tool server lent to that program.
"""

import inspect
import io
import tarfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
from pathlib import Path, PurePosixPath
from typing import Self, overload

from sostenuto.errors import ConfigError, PathError, SandboxError, ToolError
from sostenuto.sandbox.egress.allowed import AllowList
from sostenuto.sandbox.protocol import Blueprint, Sandbox, SandboxLimits, ShellResult
from sostenuto.tools.setup import Setup

DEFAULT_SHELL_S = 30.0
_LIMITS = SandboxLimits()
SANDBOX = "__sostenuto_sandbox__"
"""Attribute of an instance that holds its Workspace."""

deadline_s: ContextVar[float | None] = ContextVar("deadline_s", default=None)
"""When the tool that runs in this context is ended, on the monotonic clock."""


class ShellDeadline(TimeoutError):  # noqa: N818 - reads as the fact it states
    """A command was ended because its tool's time is over; `output` is what it had written."""

    def __init__(self, output: str) -> None:
        super().__init__("a shell command ran until the tool's deadline")
        self.output = output


class Workspace:
    """The sandbox of one program.

    Every method raises SandboxError when the sandbox is gone.  A path without a file is a ToolError: where
    the policy named it, that is its observation; elsewhere catch it, or it is the environment's failure.
    """

    def __init__(self, sandbox: Sandbox, memory_bytes: int = _LIMITS.memory_bytes) -> None:
        self._sandbox = sandbox
        self._out_of_memory = f"[ended: out of memory (limit {memory_bytes / (1 << 20):g} MiB)]"

    async def shell(self, command: str, timeout_s: float | None = None) -> str:
        """Run a command in the persistent shell and return stdout and stderr as they came.

        A line `[exit code N]`, `[timed out after N s]` or `[ended: out of memory (limit N MiB)]` is appended
        unless it exited with 0.  A command that still runs just before its tool's deadline is ended there, so
        that what it wrote is not lost.
        """
        allowed_s = _allowed_s(timeout_s)
        result = await self.run(command, timeout_s=allowed_s)
        if result.out_of_memory:
            return _with_line(result.output, self._out_of_memory)
        if not result.timed_out:
            return _with_line(result.output, f"[exit code {result.exit_code}]" if result.exit_code else "")
        if deadline_s.get() is not None and (timeout_s is None or allowed_s < timeout_s):
            raise ShellDeadline(result.output)
        return _with_line(result.output, f"[timed out after {allowed_s:g} s]")

    async def run(
        self, command: str, *, timeout_s: float | None = None, output_bytes: int = 65536
    ) -> ShellResult:
        """Like `shell`, with exit code and output apart."""
        return await self._sandbox.shell(command, timeout_s=_allowed_s(timeout_s), output_bytes=output_bytes)

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> str:
        """Content of a workspace file as UTF-8, with replacement characters for what is not."""
        return (await self.read_bytes(path, max_bytes=max_bytes)).decode(errors="replace")

    async def read_bytes(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        with _observed():
            return await self._sandbox.read(path, max_bytes=max_bytes)

    async def write(self, path: str, content: str | bytes) -> None:
        """Create or replace a workspace file, folders included."""
        with _observed():
            await self._sandbox.write(path, _bytes(content))

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str | bytes = b"",
        timeout_s: float | None = None,
        output_bytes: int = 65536,
    ) -> ShellResult:
        """Run a program in the workspace, beside the shell: no quoting, and several at once.

        It has the sandbox's own variables, and none that commands of the shell have set.  Its whole process
        tree is ended at the deadline, at the tool's own, and when the tool is cancelled.
        """
        if isinstance(argv, str):
            raise TypeError(f"exec: argv is one str, {argv!r:.80}; give a sequence of words, or use `shell`")
        return await self._sandbox.exec(
            argv, stdin=_bytes(stdin), timeout_s=_allowed_s(timeout_s), output_bytes=output_bytes
        )

    async def upload(self, files: bytes | Mapping[str, str | bytes], path: str = ".") -> None:
        """Unpack a tar (plain, gzip or bzip2), or create files by name, in the folder `path`, which is made.

        One request, however many files.  A ToolError, with nothing written, for an archive that leads out
        of the folder, holds devices, or is larger than the sandbox's limits allow.
        """
        with _observed():
            await self._sandbox.upload(files if isinstance(files, bytes) else _tar_of(files), path)

    async def download(self, path: str = ".", *, max_bytes: int = 64 << 20) -> bytes:
        """A tar of a file or a folder of the workspace; a ToolError when it is missing or larger."""
        with _observed():
            return await self._sandbox.download(path, max_bytes=max_bytes)


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What an environment needs of its sandbox."""

    template: str | None = None
    """Folder whose content the workspace starts with: a path, or a name next to the environment's file."""
    image: str | None = None
    """Image of its container; only where the tool server's sandboxes are containers.  None: the server's."""
    files: Mapping[str, str | bytes] = field(default_factory=dict[str, str | bytes])
    """Written into the workspace before the shell starts; relative paths."""
    memory_bytes: int = _LIMITS.memory_bytes
    call_memory_bytes: int | None = None
    """Of one program beside the shell (`exec`), where cgroups bound memory; None: `memory_bytes`."""
    processes: int = _LIMITS.processes
    file_bytes: int = _LIMITS.file_bytes
    """The largest file that can be written."""
    network: Sequence[str] = ()
    """Servers that its programs may reach by HTTP or CONNECT, such as `pypi.org`, `*.example.org` or
    `10.0.0.5:8080`; a name without a port means 80 and 443.  None: no network at all."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    shell: str = "sh"
    """`sh` or `bash`."""
    setup: Sequence[str] = ()
    """Commands that run once, before the first program: every workspace starts with what they leave in it.
    They have the sandbox's own network and limits."""
    setup_timeout_s: float = 600.0
    """For all of them together."""
    health: str | None = None
    """Command that exits with 0 in a sandbox that is fit; one that is not is replaced."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "call_memory_bytes", "processes", "file_bytes"):
            value: int | None = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"SandboxSpec: {name} is {value}; give a positive number")
        if isinstance(self.network, str):
            raise ConfigError(f"SandboxSpec: network is one str, {self.network!r}; give a tuple of hosts")
        AllowList(self.network)
        if isinstance(self.setup, str):
            raise ConfigError(f"SandboxSpec: setup is one str, {self.setup!r}; give a tuple of commands")
        if not 0 < self.setup_timeout_s < inf:
            raise ConfigError(
                f"SandboxSpec: setup_timeout_s is {self.setup_timeout_s}; give a positive number of seconds"
            )
        for path in self.files:
            parts = PurePosixPath(path)
            if not path or parts.is_absolute() or ".." in parts.parts:
                raise ConfigError(f"SandboxSpec: files[{path!r}] leaves the workspace; give a relative path")

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Workspace: ...

    def __get__(self, instance: object | None, owner: type) -> Self | Workspace:
        if instance is None:
            return self
        workspace = vars(instance).get(SANDBOX)
        if not isinstance(workspace, Workspace):
            raise SandboxError(f"{owner.__name__}.sandbox: no sandbox yet; it is there from `reset` on")
        return workspace

    def blueprint(self, folder: Path) -> Blueprint:
        """The spec as backends take it; a template that is not a path is looked for in `folder`."""
        return Blueprint(
            template=None if self.template is None else str(_find_template(self.template, folder)),
            files={path: _bytes(content) for path, content in self.files.items()},
            environment=dict(self.environment),
            limits=SandboxLimits(
                memory_bytes=self.memory_bytes,
                call_memory_bytes=self.call_memory_bytes,
                processes=self.processes,
                file_bytes=self.file_bytes,
            ),
            shell=self.shell,
            image=self.image,
            network=tuple(self.network),
        )

    def to_run(self) -> Setup:
        """What is done in each sandbox, or once for all of them, before programs come."""
        return Setup(tuple(self.setup), self.setup_timeout_s, self.health)


def lend(instance: object, sandbox: Sandbox) -> None:
    """Make `sandbox` what `self.sandbox` is on this instance."""
    spec = inspect.getattr_static(type(instance), "sandbox", None)
    limit_bytes = spec.memory_bytes if isinstance(spec, SandboxSpec) else _LIMITS.memory_bytes
    vars(instance)[SANDBOX] = Workspace(sandbox, limit_bytes)


@contextmanager
def _observed() -> Generator[None]:
    try:
        yield
    except PathError as error:
        raise ToolError(str(error)) from error


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _tar_of(files: Mapping[str, str | bytes]) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as tar:
        for name, content in files.items():
            data = _bytes(content)
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return memory.getvalue()


def _find_template(template: str, folder: Path) -> Path:
    places = (folder / template, folder / "templates" / template, Path.cwd() / template)
    for place in places:
        if place.is_dir():
            return place.resolve()
    looked = ", ".join(dict.fromkeys(str(place) for place in places))
    raise ConfigError(f"SandboxSpec: template {template!r} is not a folder; looked at {looked}")


def _allowed_s(wanted_s: float | None) -> float:
    """No longer than until just before the tool's own deadline."""
    ends_s = deadline_s.get()
    if ends_s is None:
        return DEFAULT_SHELL_S if wanted_s is None else wanted_s
    left_s = max(0.05, (ends_s - time.monotonic()) * 0.95 - 0.1)
    return left_s if wanted_s is None else min(wanted_s, left_s)


def _with_line(output: str, line: str) -> str:
    if not line:
        return output
    return f"{output}{'' if not output or output.endswith(chr(10)) else chr(10)}{line}"
