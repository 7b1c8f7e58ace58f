"""The three pipes between this process and a shell: commands in, output out, status lines out.

Output and status are read together, so that a shell never blocks on one while we wait for the other.
"""

import array
import fcntl
import os
import select
import termios
from collections import deque
from contextlib import suppress
from functools import cache

import anyio

from sostenuto.errors import SandboxError
from sostenuto.sandbox.output import HeadTail

_CHUNK_BYTES = 65536
_STATUS_BYTES = 65536
"""A status line is shorter than a hundred bytes; this much without an end is no status."""
_FREE_FLOW_BYTES = 16 << 20
_BRAKE_S = 0.002
"""Beyond the free flow what a pipe holds is taken once per brake: the writer waits, and others have turns."""
_FLOOD_BYTES = 1 << 20
"""What a pipe that is flooded holds, where the system lets it, until its command is over."""
_PIPE_BYTES = 1 << 16


class Streams:
    """The reading ends of output and status; owns both.

    `close` is idempotent.  Methods raise SandboxError once the far end is gone.
    """

    def __init__(self, output: int, status: int) -> None:
        self._output, self._status = output, status
        self._poll = select.epoll()
        for fd in (output, status):
            os.set_blocking(fd, False)
            self._poll.register(fd, select.EPOLLIN)
        self._lines: deque[str] = deque()
        self._partial = b""
        self._ended = False
        self._closed = False
        self._wide = False

    @property
    def ended(self) -> bool:
        return self._ended or self._closed

    @property
    def closed(self) -> bool:
        """Whether it was closed here."""
        return self._closed

    def last_words(self) -> str:
        """What is left on the status pipe: where a launcher gave up, it says why."""
        with suppress(BlockingIOError):
            while not self._closed and (chunk := os.read(self._status, _CHUNK_BYTES)):
                self._read_status(chunk)
        return " ".join([*self._lines, self._partial.decode(errors="replace")]).strip()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            anyio.notify_closing(self._poll.fileno())
            self._poll.close()
            os.close(self._output)
            os.close(self._status)

    async def line(self, sink: HeadTail) -> str:
        """The next status line; what the shell prints until then goes to `sink`."""
        # Looked at before it is waited for: a quick command is often over when it has been written.
        if not self.ended:
            self._read_ready(sink)
        while not self._lines:
            if self.ended:
                raise SandboxError("the sandbox has ended")
            try:
                await anyio.wait_readable(self._poll.fileno())
            except anyio.ClosedResourceError:
                continue
            self._read_ready(sink)
            if sink.total_bytes > _FREE_FLOW_BYTES:
                self._discard(sink)
                await anyio.sleep(_BRAKE_S)
        return self._lines.popleft()

    def _discard(self, sink: HeadTail) -> None:
        """Let go of what a flood has brought, but for the end, without looking at it.

        A large pipe is filled in one go by its writer; one of the usual size would be emptied once per
        brake, at some 30 MB/s.
        """
        self._widen()
        left = sink.droppable(_waiting_bytes(self._output))
        while left > 0:
            gone = os.splice(self._output, _nowhere(), left)
            if not gone:
                return
            sink.drop(gone)
            left -= gone

    def _widen(self) -> None:
        if not self._wide:
            self._wide = True
            with suppress(OSError):  # what a user's pipes may hold together is used up
                fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, _FLOOD_BYTES)

    def _narrow(self) -> None:
        if self._wide:
            self._wide = False
            with suppress(OSError):  # a background process has filled it again
                fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def _read_ready(self, sink: HeadTail) -> None:
        for fd, _ in self._poll.poll(0):
            chunk = os.read(fd, _CHUNK_BYTES)
            if fd == self._output and chunk:
                sink.add(chunk)
            elif fd == self._output:
                self._poll.unregister(fd)
            else:
                self._read_status(chunk)

    def _read_status(self, chunk: bytes) -> None:
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        self._lines.extend(line.decode(errors="replace") for line in lines)
        if not chunk or len(self._partial) > _STATUS_BYTES:
            self._ended = True

    def drain(self, sink: HeadTail) -> None:
        """Take the output that is there now, and not what a background process goes on to write."""
        rest = _waiting_bytes(self._output)
        while rest > 0:
            chunk = os.read(self._output, min(rest, _CHUNK_BYTES))
            if not chunk:
                return
            sink.add(chunk)
            rest -= len(chunk)
        self._narrow()


def _waiting_bytes(pipe: int) -> int:
    waiting = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, waiting)
    return waiting[0]


@cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


class Channel(Streams):
    """The pipes of a process to start: its commands are written here, the rest is read."""

    def __init__(self) -> None:
        stdin, self._commands = os.pipe2(os.O_CLOEXEC)
        output, stdout = os.pipe2(os.O_CLOEXEC)
        status, stderr = os.pipe2(os.O_CLOEXEC)
        super().__init__(output, status)
        os.set_blocking(self._commands, False)
        self.far_ends = (stdin, stdout, stderr)
        """stdin, stdout and stderr of the process to start, until `close_far_ends`."""

    def close_far_ends(self) -> None:
        for fd in self.far_ends:
            os.close(fd)
        self.far_ends = (-1, -1, -1)

    def close(self) -> None:
        if not self.closed:
            super().close()
            anyio.notify_closing(self._commands)
            for fd in (self._commands, *self.far_ends):
                if fd >= 0:
                    os.close(fd)

    async def send(self, text: str) -> None:
        """Give the shell all of `text` to read."""
        rest = memoryview(text.encode(errors="replace"))
        while rest:
            if self.ended:
                raise SandboxError("the sandbox has ended")
            try:
                rest = rest[os.write(self._commands, rest) :]
            except BlockingIOError:
                with suppress(anyio.ClosedResourceError):
                    await anyio.wait_writable(self._commands)
            except BrokenPipeError:
                self._ended = True
