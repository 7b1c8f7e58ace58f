"""The interpreter of an environment's workers: ours, one that it names, or a virtual environment made for it.

    FOLDER/DIGEST/          a virtual environment with the requirements of that digest
    FOLDER/DIGEST/complete  written last; touched at each use.  Without it the folder is half made
    FOLDER/DIGEST.lock      held by who makes it, pip included, so that two servers do not make it at once

- It stands where it will be used from the first moment, as paths in it are absolute: hence a mark, no rename.
- It sees what this interpreter has, below what it was given itself, and pip installs only what is missing.
- A build outlives whoever waits for it: the next program finds it done.
"""

import fcntl
import hashlib
import os
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from sostenuto.errors import ConfigError, ToolServerError
from sostenuto.tools.wire import EnvironmentRef

_BUILD_S = 1800.0
_LOCK_POLL_S = 0.2
_SAID_BYTES = 4096
_COMPLETE = "complete"
_OURS = "_sostenuto.pth"


def default_folder() -> Path:
    """`sostenuto/interpreters` in the user's cache folder."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "sostenuto" / "interpreters"


@dataclass(slots=True, eq=False)
class _Build:
    path: Path
    requirements: tuple[str, ...]
    error: str = ""
    done: anyio.Event = field(default_factory=anyio.Event)


class Interpreters:
    """Finds interpreters, and makes those that are missing in tasks of `group`."""

    def __init__(self, folder: Path, group: TaskGroup, redact: Callable[[str], str]) -> None:
        """`redact` takes secrets out of what pip says."""
        self._folder = folder
        self._group = group
        self._redact = redact
        self._builds: dict[Path, _Build] = {}

    async def of(self, environment: EnvironmentRef) -> str:
        """Path of the interpreter for this environment's workers.

        ConfigError when the one that it names is none; ToolServerError, with the last words of pip, when its
        requirements cannot be installed.
        """
        if environment.interpreter is not None:
            if not os.access(environment.interpreter, os.X_OK):
                raise ConfigError(
                    f"environment {environment.name}: `interpreter` is {environment.interpreter!r}, which "
                    "cannot be run here; name the python of a virtual environment of this machine"
                )
            return environment.interpreter
        return await self._venv(environment) if environment.requirements else sys.executable

    async def _venv(self, environment: EnvironmentRef) -> str:
        path = self._folder / _digest(environment.requirements)
        if not (path / _COMPLETE).exists():
            await self._built(path, environment)
        with suppress(OSError):
            os.utime(path / _COMPLETE)  # for whoever removes the least recently used
        return str(_python_of(path))

    async def _built(self, path: Path, environment: EnvironmentRef) -> None:
        build = self._builds.get(path)
        if build is None:
            build = self._builds[path] = _Build(path, environment.requirements)
            self._group.start_soon(self._build, build)
        await build.done.wait()
        if build.error:
            raise ToolServerError(
                f"environment {environment.name}: its requirements: {self._redact(build.error)}"
            )

    async def _build(self, build: _Build) -> None:
        build.error = "the tool server ended while they were installed"
        try:
            with anyio.fail_after(_BUILD_S):
                await _make(build.path, build.requirements)
            build.error = ""
        except TimeoutError:
            build.error = f"they were not installed within {_BUILD_S:.0f} s"
        except (OSError, _Failed) as exc:
            build.error = str(exc)
        finally:
            del self._builds[build.path]
            build.done.set()


class _Failed(Exception):  # noqa: N818 - reads as the fact it states
    """A program said why it could not do its work."""


async def _make(path: Path, requirements: tuple[str, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    async with _locked(path.parent / f"{path.name}.lock") as lock_fd:
        if (path / _COMPLETE).exists():
            return
        await anyio.to_thread.run_sync(lambda: shutil.rmtree(path, ignore_errors=True))
        make = ["-m", "venv", "--system-site-packages", "--without-pip", str(path)]
        await _run([sys.executable, *make], lock_fd)
        _show_ours(path)
        python = str(_python_of(path))
        if find_spec("pip") is None:  # what we have, it sees
            await _run([python, "-m", "ensurepip"], lock_fd)
        install = ["-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--", *requirements]
        await _run([python, *install], lock_fd)
        (path / _COMPLETE).touch()


@asynccontextmanager
async def _locked(path: Path) -> AsyncGenerator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await anyio.sleep(_LOCK_POLL_S)
        yield fd
    finally:
        os.close(fd)


def _show_ours(path: Path) -> None:
    """Let it see our packages, of which `--system-site-packages` shows those of the base alone."""
    lines = [f"import site; site.addsitedir({packages!r})\n" for packages in _our_packages()]
    (_packages_of(path) / _OURS).write_text("".join(lines))


async def _run(argv: list[str], lock_fd: int) -> None:
    """Raises _Failed with the last lines of what it printed; cancelled, it ends the process group."""
    process = await anyio.open_process(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        pass_fds=(lock_fd,), start_new_session=True,
    )  # fmt: skip
    said = b""
    try:
        assert process.stdout is not None
        async for chunk in process.stdout:
            said = (said + chunk)[-_SAID_BYTES:]
        code = await process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True):
            await process.aclose()
    if code:
        lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
        raise _Failed(f"exit code {code}: {' | '.join(lines[-5:])}")


def _digest(requirements: tuple[str, ...]) -> str:
    """Of the requirements and of all that they are installed beside."""
    words = [sys.version, sys.base_prefix, *_our_distributions(), *sorted(requirements)]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]


@cache
def _our_distributions() -> tuple[str, ...]:
    """Names and versions, as their folders are called."""
    found = (folder for packages in _our_packages() for folder in Path(packages).glob("*.dist-info"))
    return tuple(sorted(folder.name for folder in found))


def _our_packages() -> list[str]:
    return [path for path in site.getsitepackages() if Path(path).is_dir()]


def _packages_of(path: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(path)}))


def _python_of(path: Path) -> Path:
    return Path(sysconfig.get_path("scripts", "venv", {"base": str(path)})) / "python"
