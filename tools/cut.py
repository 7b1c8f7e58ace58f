"""Long text loses its middle, and a line in its place says how much."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    text: str
    cut_bytes: int


def cut_middle(text: str, max_bytes: int) -> Cut:
    """Keep the head and the tail of `text` within `max_bytes` of UTF-8, the naming line included.

    No character is split.  A cap too small for the line itself keeps the line alone.
    """
    data = text.encode()
    if len(data) <= max_bytes:
        return Cut(text, 0)
    # The line is at its longest when all is cut; what this wastes is a few digits.
    room_bytes = max(0, max_bytes - len(_line(len(data))))
    head = data[: room_bytes - room_bytes // 2].decode(errors="ignore")
    tail = _tail(data, room_bytes // 2)
    cut_bytes = len(data) - len(head.encode()) - len(tail.encode())
    return Cut(head + _line(cut_bytes) + tail, cut_bytes)


def is_cut(text: str) -> bool:
    """Whether a line in the text says that some of it is gone; sandboxes write the same line."""
    return " bytes cut ...]" in text


def _tail(data: bytes, size_bytes: int) -> str:
    start = len(data) - size_bytes
    while start < len(data) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:].decode()


def _line(cut_bytes: int) -> str:
    return f"\n[... {cut_bytes} bytes cut ...]\n"
