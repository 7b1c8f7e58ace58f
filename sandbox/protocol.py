"""What a sandbox is to everyone above it.

A sandbox belongs to one program.  It has a workspace, one persistent shell, no network but to servers that
it lists, and ends with its owner: `stop` is idempotent and leaves no process, mount or file behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Protocol


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Enforced with whatever the system offers; `sostenuto doctor` says with what."""

    memory_bytes: int = 1 << 30
    call_memory_bytes: int | None = None
    """Of one program beside the shell, with all that it starts, where cgroups bound memory; None: no less."""
    processes: int = 128
    file_bytes: int = 256 << 20
    """The largest file that can be written."""
    open_files: int = 256
    cpu_s: int = 600
    """CPU time of one process."""
    cpus: float | None = None
    """Cores that all of it may use together, where the backend can bound that; None: all there are."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a backend needs to start one sandbox."""

    template: str | None = None
    """Folder whose content the workspace starts with; None: an empty workspace.

    It may be mounted below the workspace instead of copied: it stays as it is while sandboxes or snapshots
    that started from it are there.
    """
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Written into the workspace before the shell starts; relative paths."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    limits: SandboxLimits = SandboxLimits()
    shell: str = "sh"
    """`sh` or `bash`.  After a deadline `sh` keeps its directory and variables; `bash` starts afresh."""
    image: str | None = None
    """What the file system of a container is; None: the backend's default.  Others than docker have none."""
    network: tuple[str, ...] = ()
    """Servers that it may reach, see `egress.allowed`; none: no network at all."""


@dataclass(frozen=True, slots=True)
class ShellResult:
    """What one shell command came to."""

    exit_code: int | None
    """None when the command was ended at its deadline."""
    output: str
    """stdout and stderr as they came, UTF-8 with replacement, cut in the middle to the cap."""
    cut_bytes: int = 0
    elapsed_s: float = 0.0
    out_of_memory: bool = False
    """A process of it was ended because the sandbox's memory was used up."""

    @property
    def timed_out(self) -> bool:
        return self.exit_code is None


@dataclass(frozen=True, slots=True)
class SandboxUsage:
    """What a sandbox takes now."""

    memory_bytes: int
    peak_memory_bytes: int
    """The most that was seen since the start; where only samples exist, of those."""
    cpu_s: float
    """Of all its processes since the start."""
    processes: int
    disk_bytes: int
    """What it has written to its workspace, without the template or the snapshot that it started from."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A workspace as it was, from which any number of sandboxes can start.

    Processes, and directory and variables of the shell, are not in it.  It may need the template that its
    sandbox was started from.
    """

    backend: str
    reference: str
    """The backend's own name for it: a folder, an image."""
    size_bytes: int


class Sandbox(Protocol):
    """One running sandbox.  Every method raises SandboxError when the sandbox is gone."""

    async def shell(self, command: str, *, timeout_s: float, output_bytes: int = 65536) -> ShellResult:
        """Run `command` in the persistent shell; directory and variables stay for the next one.

        At the deadline the whole process group of the command is ended and, if it took the shell with it, a
        new shell starts in the workspace.  Output beyond `output_bytes` is cut from the middle.
        """
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        output_bytes: int = 65536,
    ) -> ShellResult:
        """Run a program in the workspace, beside the shell, with the sandbox's own variables.

        Any number may run at once.  At the deadline, and when this is cancelled, its process tree is ended.
        """
        ...

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Content of a workspace file.

        PathError when it is missing, no regular file or larger, or when it or a link in it leaves the
        workspace.
        """
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a workspace file, folders included; PathError as for `read`."""
        ...

    async def upload(self, archive: bytes | IO[bytes], path: str = ".") -> None:
        """Unpack a tar, also compressed by gzip or bzip2, into the workspace folder `path`, which is created.

        Nothing is written through a link or outside of the workspace; devices, archives that grow beyond the
        largest file times a bound, and names that leave the workspace are a PathError.  A file can be
        larger than memory: it is read in pieces, from its beginning, and more than once.
        """
        ...

    async def download(self, path: str = ".", *, max_bytes: int = 64 << 20) -> bytes:
        """A tar of a workspace file or folder; PathError when it is missing or larger."""
        ...

    async def download_to(self, target: IO[bytes], path: str = ".", *, max_bytes: int) -> None:
        """`download` into an empty file, in pieces."""
        ...

    async def pause(self) -> None:
        """Stop every process of the sandbox where it stands.  Safe to call twice."""
        ...

    async def reclaim(self) -> None:
        """Pause it and move its memory out; raises Unsupported where the system cannot."""
        ...

    async def resume(self) -> None:
        """Let its processes go on.  Safe to call twice."""
        ...

    async def snapshot(self) -> Snapshot:
        """Its workspace as it is now; the sandbox stands still meanwhile and goes on as before."""
        ...

    async def usage(self) -> SandboxUsage: ...

    async def is_quiet(self) -> bool:
        """Whether nothing runs in it but its shell, which waits for a command."""
        ...

    async def stop(self) -> None:
        """End everything and remove the workspace.  Safe to call twice and under cancellation."""
        ...


@dataclass(frozen=True, slots=True)
class Probe:
    """What running a backend once has shown."""

    backend: str
    works: bool
    isolation: str
    """One phrase for people, such as "namespaces, seccomp, Landlock, rlimits"."""
    remedy: str = ""
    """What to do when it does not work."""
    details: dict[str, str] = field(default_factory=dict[str, str])


class Backend(Protocol):
    """Starts sandboxes of one kind."""

    @property
    def name(self) -> str: ...

    async def probe(self) -> Probe:
        """Run a trial sandbox, with a deadline; never raises for a system that cannot."""
        ...

    async def start(self, name: str, blueprint: Blueprint, *, snapshot: Snapshot | None = None) -> Sandbox:
        """Start a sandbox; a start that fails or is cancelled leaves nothing behind.

        With `snapshot` the workspace is that one's instead of the template and files of the blueprint.
        """
        ...

    async def forget(self, snapshot: Snapshot) -> None:
        """Remove a snapshot; sandboxes that were started from it go on.  Safe to call twice."""
        ...
