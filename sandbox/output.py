"""Keeps the head and the tail of a stream of any length in bounded memory."""


class HeadTail:
    """Of what was added: the first half of `cap_bytes` and the last half, at least one byte each."""

    def __init__(self, cap_bytes: int) -> None:
        self._head_bytes = max(1, cap_bytes // 2)
        self._tail_bytes = max(1, cap_bytes - self._head_bytes)
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    @property
    def total_bytes(self) -> int:
        return len(self._head) + len(self._tail) + self._dropped

    def add(self, chunk: bytes) -> None:
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        # Trimmed only when it has doubled, so that a flood is moved once, not once per chunk.
        if len(self._tail) > 2 * self._tail_bytes + 65536:
            self._trim()

    def droppable(self, waiting: int) -> int:
        """Of so many bytes that come next, how many are surely neither of the head nor of the tail."""
        return max(0, waiting - self._tail_bytes) if len(self._head) == self._head_bytes else 0

    def drop(self, count: int) -> None:
        """So many of `droppable` are gone; the others, which replace the tail, are to be added."""
        self._dropped += count + len(self._tail)
        self._tail.clear()

    def _trim(self) -> None:
        excess = len(self._tail) - self._tail_bytes
        if excess > 0:
            del self._tail[:excess]
            self._dropped += excess

    def text(self) -> tuple[str, int]:
        """What was kept, with a note of what was cut, and the number of bytes cut."""
        self._trim()
        head, tail = bytes(self._head), bytes(self._tail)
        if not self._dropped:
            return (head + tail).decode(errors="replace"), 0
        note = f"\n[... {self._dropped} bytes cut ...]\n"
        return head.decode(errors="replace") + note + tail.decode(errors="replace"), self._dropped
