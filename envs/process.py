"""Starting and ending the process of one worker.

The process has a session of its own: Ctrl-C in a terminal ends the server, and the server its workers.
Ending one ends its process group, so that what an environment started goes with it.
"""

import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from logging import getLogger

import anyio
from anyio.abc import Process

from sostenuto.envs.occupancy import PAGE_BYTES, Page

log = getLogger(__name__)

_LINE_CHARS = 500
_KEPT_LINES = 20
_LONGEST_LINE_BYTES = 1 << 16


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A started worker: its process, our end of the socket, and the page shared with it."""

    process: Process
    connection: socket.socket
    page: Page
    last_lines: deque[str] = field(default_factory=lambda: deque[str](maxlen=_KEPT_LINES))
    """The end of what it wrote to stderr."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """End the process group, if anything of it is left."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def follow(self, redact: Callable[[str], str]) -> None:
        """Log what the worker writes, without secrets, until it ends."""
        assert self.process.stderr is not None
        rest = b""
        async for chunk in self.process.stderr:
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LONGEST_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._take(redact(line.decode(errors="replace")))
        if rest:
            self._take(redact(rest.decode(errors="replace")))

    def epitaph(self) -> str:
        """How it ended, and its last words."""
        code = self.process.returncode
        if code is None:
            how = "it hung up"
        else:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"{how}; it wrote last: {' | '.join(list(self.last_lines)[-5:]) or 'nothing'}"

    def _take(self, line: str) -> None:
        self.last_lines.append(line[:_LINE_CHARS])
        log.info("worker %d: %s", self.pid, line)


async def start_process(python: str, entering: Sequence[str] = ()) -> WorkerProcess:
    """Start a worker under this interpreter that serves our end of a new socket pair.

    `entering`: what comes before its command line, so that a cgroup bounds it.
    """
    ours, theirs = socket.socketpair()
    page_fd = os.memfd_create("sostenuto-occupancy", os.MFD_CLOEXEC)
    try:
        os.ftruncate(page_fd, PAGE_BYTES)
        page = Page(page_fd)
        arguments = (str(theirs.fileno()), str(page_fd), str(os.getpid()))
        process = await anyio.open_process(
            [*entering, python, "-P", "-m", "sostenuto.envs.worker", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(), page_fd),
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(page_fd)
    ours.setblocking(False)
    return WorkerProcess(process, ours, page)
