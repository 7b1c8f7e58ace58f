"""Traffic with a process in a container: what it prints goes to a sink, what it reports comes as lines.

Output is its stdout and lines are its stderr, which the daemon carries side by side: a line may overtake
output that was printed before it.  So whoever wants all of the output has a mark printed behind it.
"""

import secrets
from collections import deque

import anyio

from sostenuto.errors import SandboxError
from sostenuto.sandbox.docker.wire import STDERR, STDOUT, Frames, Wire
from sostenuto.sandbox.output import HeadTail

_LINE_BYTES = 65536
"""A report is shorter than a hundred bytes; this much without an end is none."""
_FREE_FLOW_BYTES = 16 << 20
_BRAKE_S = 0.002
"""Beyond the free flow one chunk is read per brake: a flood then costs little, and the writer waits."""


class Marks:
    """Finds a mark in a stream and takes it out, also where it is cut in two."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._held = b""
        """The beginning of a mark, perhaps."""
        self.seen = 0

    def pass_on(self, data: bytes, sink: HeadTail) -> None:
        data = self._held + data
        while (at := data.find(self._mark)) >= 0:
            sink.add(data[:at])
            data = data[at + len(self._mark) :]
            self.seen += 1
        keep = self._beginning(data)
        self._held = data[len(data) - keep :]
        sink.add(data[: len(data) - keep])

    def _beginning(self, data: bytes) -> int:
        """How many bytes at the end of `data` may begin a mark."""
        for size in range(min(len(self._mark) - 1, len(data)), 0, -1):
            if self._mark.startswith(data[-size:]):
                return size
        return 0


class Stream:
    """Reads for one task at a time; any may send.  Owns its wire."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._frames = Frames()
        self.mark = secrets.token_hex(16)
        """To be printed on stdout once for every `awaited_mark`."""
        self._marks = Marks(self.mark.encode())
        self._marks_due = 0
        self._lines: deque[str] = deque()
        self._partial = b""
        self._ended = False

    def move_to(self, wire: Wire) -> None:
        """Go on over another connection to the same process; the present one has ended."""
        self._wire.close()
        self._wire, self._frames = wire, Frames()
        self._partial, self._ended = b"", False

    @property
    def ended(self) -> bool:
        return self._ended or self._wire.ended

    async def send(self, text: str) -> None:
        await self._wire.send(text.encode(errors="replace"))

    async def line(self, sink: HeadTail) -> str:
        """The next line; SandboxError when there is none any more."""
        while not self._lines:
            if self._ended:
                raise SandboxError("the sandbox has ended")
            await self._read(sink)
        return self._lines.popleft()

    def mark_due(self) -> None:
        """One more mark has been asked for."""
        self._marks_due += 1

    async def drain(self, sink: HeadTail) -> None:
        """Read until every mark that was asked for has come, or the end."""
        while self._marks.seen < self._marks_due and not self._ended:
            await self._read(sink)

    async def _read(self, sink: HeadTail) -> None:
        data = await self._wire.receive()
        self._ended = not data
        for kind, piece in self._frames.feed(data):
            if kind == STDOUT:
                self._marks.pass_on(piece, sink)
            elif kind == STDERR:
                self._report(piece)
        if sink.total_bytes > _FREE_FLOW_BYTES:
            await anyio.sleep(_BRAKE_S)

    def _report(self, piece: bytes) -> None:
        *lines, self._partial = (self._partial + piece).split(b"\n")
        self._lines.extend(line.decode(errors="replace") for line in lines)
        if len(self._partial) > _LINE_BYTES:
            self._ended = True

    def last_words(self) -> str:
        """Lines that nobody has taken: where something gave up, it says why."""
        return " ".join([*self._lines, self._partial.decode(errors="replace")]).strip()

    def close(self) -> None:
        self._wire.close()
