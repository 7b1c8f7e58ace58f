"""The tool server as a process: serve until told to end, and leave nothing."""

import os
import signal
import sys
from collections.abc import Callable

import anyio

from sostenuto.sandbox.protocol import Backend
from sostenuto.tools.config import ServerConfig
from sostenuto.tools.host import Hosts
from sostenuto.tools.logs import json_logs
from sostenuto.tools.secrets import redacted_logs, secrets_from_environment
from sostenuto.tools.server import listen

WATCH_S = 0.5


async def serve(
    config: ServerConfig, backend: Backend, hosts: Hosts, *, ready: Callable[[str], None]
) -> None:
    """Give `ready` the URL, and return after SIGTERM or the parent's death, with every program released.

    Belongs in the main thread of a process of its own: it takes signals, and logs of the whole process go to
    stderr as JSON, redacted.  With a parent to watch, SIGINT is ignored: Ctrl-C reaches the parent too, which
    still needs the server to release its programs.  The values of secrets are read from the environment of
    this process.
    """
    secrets = secrets_from_environment(config.secret_names, os.environ)
    with (
        redacted_logs(secrets),
        json_logs(sys.stderr, config.log_level, secrets.redact),
        anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals,
    ):
        async with listen(config, backend, hosts, secrets) as url, anyio.create_task_group() as group:
            if config.parent_pid is not None:
                group.start_soon(_until_orphaned, config.parent_pid, group.cancel_scope)
            ready(url)
            async for received in signals:
                if received == signal.SIGTERM or config.parent_pid is None:
                    break
            group.cancel_scope.cancel()


async def _until_orphaned(parent_pid: int, scope: anyio.CancelScope) -> None:
    # The system tells nobody of a parent's death in a way that a loop could wait for.
    while os.getppid() == parent_pid:  # noqa: ASYNC110
        await anyio.sleep(WATCH_S)
    scope.cancel()
