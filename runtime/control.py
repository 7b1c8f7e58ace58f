"""The socket in a run directory on which a living runtime says how it is.  It can only be read.

    GET /engines -> Engines

For its owner alone.  Neither side names the socket by its whole path, which can be longer than the path of
a socket may be: it is found through the open folder.
"""

import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import anyio
from aiohttp import web
from pydantic import ValidationError

from sostenuto.errors import ConfigError
from sostenuto.runtime.engine_view import Engines, EngineView
from sostenuto.runtime.run_directory import RunDirectory

_ANSWER_S = 10.0

View = Callable[[], Awaitable[list[EngineView]]]


@asynccontextmanager
async def serve_control(run: RunDirectory, view: View) -> AsyncGenerator[None]:
    """Answer on the run's socket while the block runs.  Whoever holds the run directory calls this."""

    async def engines(_request: web.Request) -> web.Response:
        return web.Response(
            text=Engines(engines=tuple(await view())).model_dump_json(), content_type="application/json"
        )

    app = web.Application()
    app.router.add_get("/engines", engines)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2, handler_cancellation=True)
    await runner.setup()
    listener = _listen(run.control)
    try:
        await web.SockSite(runner, listener).start()
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()
        listener.close()
        run.control.unlink(missing_ok=True)


async def ask_engines(run: RunDirectory) -> Engines:
    """What the runtime of the run says of its engines; ConfigError when there is none, or no answer."""
    if not run.is_in_use:
        raise ConfigError(f"{run.path}: no runtime holds it; its engines are gone with their runtime")
    try:
        with _named(run.control) as path, anyio.fail_after(_ANSWER_S):
            connector = aiohttp.UnixConnector(path=path)
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.get("http://runtime/engines") as response,
            ):
                return Engines.model_validate_json(await response.read())
    except (aiohttp.ClientError, OSError, TimeoutError, ValidationError) as error:
        raise ConfigError(
            f"{run.control}: {str(error) or 'no answer'}; is its runtime of this version, and yours?"
        ) from error


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        # The run directory is ours alone: a socket that is there was left by a runtime that was killed.
        path.unlink(missing_ok=True)
        with _named(path) as name:
            listener.bind(name)
        listener.listen(16)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{path}: {error.strerror}; choose a run directory on a local disk") from error
    finally:
        os.umask(previous)
    return listener


@contextmanager
def _named(path: Path) -> Generator[str]:
    """A short name of the path, while the block runs."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
