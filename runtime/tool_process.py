"""The tool server as a process of its own: composed here, launched from here.

`python -m sostenuto.runtime.tool_process` reads its settings as JSON from stdin (a token has no place on a
command line) and writes one line to stdout: where it listens, or what is wrong.
"""

import os
import secrets as randomness
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from pydantic import BaseModel, ConfigDict, ValidationError

from sostenuto.envs.bounding import WorkerBounds
from sostenuto.envs.pool import WorkerPool
from sostenuto.errors import ConfigError, SostenutoError, ToolServerError, Unsupported, lone_error
from sostenuto.runtime.config import ToolServerSettings
from sostenuto.runtime.tool_backend import open_backend
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.config import ServerConfig
from sostenuto.tools.process import serve
from sostenuto.tools.secrets import secrets_from_environment

_READY_S = 60.0
_END_S = 20.0
_LINE_BYTES = 1 << 16


class _Orders(BaseModel):
    """What the process is told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: ServerConfig
    settings: ToolServerSettings
    import_paths: tuple[str, ...]


class _FirstWord(BaseModel):
    """What the process says before it serves."""

    url: str = ""
    isolation: str = ""
    error: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class RunningToolServer:
    """A tool server that lives as long as its `run_tool_server` block, or dies before."""

    url: str
    token: str = field(repr=False)
    isolation: str
    """What its sandboxes are separated by, for people."""
    pid: int
    ended: Callable[[], Awaitable[str]]
    """Returns how it ended, once it has."""
    kill: Callable[[], None]
    """Ends it at once, also when it hangs."""


@asynccontextmanager
async def run_tool_server(
    settings: ToolServerSettings, *, sandbox_root: Path, log: Path
) -> AsyncGenerator[RunningToolServer]:
    """Run a tool server while the block runs, on what one before it has left there.

    Raises Unsupported when no sandbox works here, ConfigError for a port in use; both name the remedy.
    """
    orders = _orders(settings, sandbox_root)
    async with _process(orders, log) as (process, word):

        async def ended() -> str:
            code = await process.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return f"the tool server ended ({how}); see {log}"

        def kill() -> None:
            with suppress(ProcessLookupError):
                process.kill()

        token = orders.server.token
        yield RunningToolServer(word.url, token, word.isolation, process.pid, ended, kill)


@dataclass(frozen=True, slots=True)
class LaunchedToolServer:
    """A tool server that lives as long as its `launch_tool_server` block."""

    client: ToolServerClient
    isolation: str
    """What its sandboxes are separated by, for people."""
    pid: int


@asynccontextmanager
async def launch_tool_server(
    settings: ToolServerSettings, *, sandbox_root: Path, log: Path
) -> AsyncGenerator[LaunchedToolServer]:
    """`run_tool_server`, with a client whose heartbeats keep its programs alive.

    When the process ends on its own, every request of the client says so, and the block goes on.
    """
    async with run_tool_server(settings, sandbox_root=sandbox_root, log=log) as server:
        client = ToolServerClient(server.url, server.token, new_owner(), lease_s=settings.lease_s)

        async def watch() -> None:
            client.give_up(await server.ended())

        with lone_error():
            async with client, anyio.create_task_group() as group:
                group.start_soon(client.heartbeats)
                group.start_soon(watch)
                yield LaunchedToolServer(client, server.isolation, server.pid)
                group.cancel_scope.cancel()


def new_owner() -> str:
    """A name that no other runtime has."""
    return f"runtime-{os.getpid()}-{randomness.token_hex(4)}"


def _orders(settings: ToolServerSettings, sandbox_root: Path) -> _Orders:
    server = ServerConfig(
        port=settings.port,
        token=randomness.token_urlsafe(32),
        lease_s=settings.lease_s,
        secret_names=settings.secrets,
        sandbox_root=str(sandbox_root.absolute()),
        state_dir=sandbox_root.absolute().with_name("tool_server"),
        sandbox_memory_bytes=settings.sandbox_memory_bytes,
        warm=settings.warm,
        layer_bytes=settings.layer_bytes,
        snapshot_idle_s=settings.snapshot_idle_s,
        parent_pid=os.getpid(),
    )
    return _Orders(
        server=server,
        settings=settings,
        import_paths=import_paths_here(),
    )


def import_paths_here() -> tuple[str, ...]:
    """Where this process imports from."""
    return tuple(path or str(Path.cwd()) for path in sys.path)


@asynccontextmanager
async def _process(orders: _Orders, log: Path) -> AsyncGenerator[tuple[Process, _FirstWord]]:
    with log.open("ab") as stderr:
        process = await anyio.open_process(
            [sys.executable, "-m", "sostenuto.runtime.tool_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        yield process, await _introduce(process, orders, log)
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _introduce(process: Process, orders: _Orders, log: Path) -> _FirstWord:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with anyio.fail_after(_READY_S):
            await process.stdin.send(orders.model_dump_json().encode())
            await process.stdin.aclose()
            reader = BufferedByteReceiveStream(process.stdout)
            word = _FirstWord.model_validate_json(await reader.receive_until(b"\n", _LINE_BYTES))
    except (TimeoutError, anyio.EndOfStream, anyio.IncompleteRead, OSError, ValidationError) as error:
        raise ToolServerError(f"the tool server did not start ({type(error).__name__}); see {log}") from error
    if word.error:
        kinds = {kind.__name__: kind for kind in (ConfigError, Unsupported)}
        raise kinds.get(word.error, ToolServerError)(word.message)
    return word


async def _end(process: Process) -> None:
    for end in (process.terminate, process.kill):
        if process.returncode is None:
            end()
        with anyio.move_on_after(_END_S):
            await process.wait()
            break
    await process.aclose()


async def serve_tools(
    server: ServerConfig,
    settings: ToolServerSettings,
    import_paths: Sequence[str],
    ready: Callable[[str, str], None],
) -> None:
    """Serve in this process until it is told to end; `ready` is given the URL and what isolates sandboxes."""
    assert server.sandbox_root is not None
    secrets_from_environment(settings.secrets, os.environ)
    secrets = {name: os.environ[name] for name in settings.secrets}
    async with (
        open_backend(settings, Path(server.sandbox_root)) as backend,
        WorkerPool(
            size=settings.hosts,
            secrets=secrets,
            import_paths=list(import_paths),
            bounds=WorkerBounds(settings.host_memory_bytes, settings.host_cpus),
        ) as hosts,
    ):
        isolation = (await backend.probe()).isolation
        await serve(server, backend, hosts, ready=lambda url: ready(url, isolation))


async def _serve(orders: _Orders) -> None:
    def ready(url: str, isolation: str) -> None:
        _say(_FirstWord(url=url, isolation=isolation))

    await serve_tools(orders.server, orders.settings, orders.import_paths, ready)


def _say(word: _FirstWord) -> None:
    sys.stdout.write(word.model_dump_json() + "\n")
    sys.stdout.flush()


def main() -> None:
    orders = _Orders.model_validate_json(sys.stdin.read())
    try:
        anyio.run(_serve, orders)
    except SostenutoError as error:
        _say(_FirstWord(error=type(error).__name__, message=str(error)))
        sys.exit(2)


if __name__ == "__main__":
    main()
