"""Copies between the tiers, beside the engine's thread.

Beside a GPU they are queued on a stream of their own, after what the engine's stream has by then.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch


class Copier:
    """One thread, one copy after the other.  What is to follow a copy happens in `settle`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-copies")
        self._pending: deque[tuple[Future[None], Callable[[], None]]] = deque()

    def __repr__(self) -> str:
        return f"<Copier {len(self)} pending>"

    def __len__(self) -> int:
        """Copies whose end was not settled yet."""
        return len(self._pending)

    def start(self, copy: Callable[[], None], landed: Callable[[], None]) -> None:
        """Run `copy` on the thread; `landed` is called by `settle` after it."""
        if self._stream is None:
            future = self._thread.submit(copy)
        else:
            computed = torch.cuda.Event()
            computed.record(torch.cuda.current_stream(self._stream.device))
            future = self._thread.submit(_on, self._stream, computed, copy)
        self._pending.append((future, landed))

    def settle(self, *, wait: bool = False) -> None:
        """Follow up on the copies that have ended; with `wait`, on one at least, if there is one."""
        while self._pending and (wait or self._pending[0][0].done()):
            future, landed = self._pending.popleft()
            future.result()
            landed()
            wait = False


def _on(stream: torch.cuda.Stream, computed: torch.cuda.Event, copy: Callable[[], None]) -> None:
    with torch.cuda.stream(stream):
        stream.wait_event(computed)
        copy()
