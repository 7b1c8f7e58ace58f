"""The engine's thread: it steps the model while there is work, and between steps does what it is asked.

`run` returns when `stop` was called, and raises what a step raised; nothing else ends it.
"""

import asyncio
import queue
from collections.abc import Callable
from typing import TypeVar

import torch

from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.refusal import Refusal

T = TypeVar("T")


class Worker:
    """Owns a Core.  `run` belongs to the engine's thread; everything else may be called from the loop."""

    def __init__(self, core: Core, *, threads: int) -> None:
        self._core = core
        self._threads = threads
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def run(self) -> None:
        torch.set_num_threads(self._threads)
        while self._drain():
            if self._core.busy:
                self._core.step()

    def stop(self) -> None:
        """End the thread after the step it is in."""
        self._inbox.put(None)

    async def ask(self, question: Callable[[Core], T]) -> T:
        """What `question` returns or raises, between two steps."""
        return await self.request(lambda core, answer: answer(question(core)))

    async def request(self, submit: Callable[[Core, Callable[[T | Refusal], None]], None]) -> T:
        """What the engine answers, later, to what `submit` gives it; a Refusal is raised."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def answer(result: T | Refusal) -> None:
            loop.call_soon_threadsafe(_settle, future, result)

        def ask() -> None:
            try:
                submit(self._core, answer)
            except Refusal as refusal:
                answer(refusal)

        self._inbox.put(ask)
        return await future

    def post(self, act: Callable[[Core], None]) -> None:
        """Do it between two steps; nobody waits."""
        self._inbox.put(lambda: act(self._core))

    def _drain(self) -> bool:
        """Do all that is asked, waiting for it when there is no other work; False to end."""
        while not self._inbox.empty() or not self._core.busy:
            ask = self._inbox.get()
            if ask is None:
                return False
            ask()
        return True


def _settle(future: "asyncio.Future[T]", result: T | Refusal) -> None:
    if future.done():
        return
    if isinstance(result, Refusal):
        future.set_exception(result)
    else:
        future.set_result(result)
