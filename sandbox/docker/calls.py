"""Blocking calls to the daemon, in a few threads, each with a deadline.

A call that is given up goes on in its thread until the daemon's silence ends it; who began something that
has to be undone says so with another call, which waits for the first.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import anyio

from sostenuto.errors import SandboxError
from sostenuto.sandbox.docker.typed import SILENCE_S

T = TypeVar("T")


class Calls:
    """Calls begin in the order in which they were asked for."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="docker")

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Made whether or not anybody waits for it."""
        return self._threads.submit(work)

    async def wait(self, call: Future[T], within_s: float = SILENCE_S) -> T:
        """Its result; SandboxError when there is none in time."""
        with anyio.move_on_after(within_s):
            return await asyncio.shield(asyncio.wrap_future(call))
        raise SandboxError(f"the docker daemon gave no answer within {within_s:.0f} s")

    async def run(self, work: Callable[[], T], within_s: float = SILENCE_S) -> T:
        """Given up before it has begun, the call is not made."""
        call = self.begin(work)
        try:
            return await self.wait(call, within_s)
        finally:
            call.cancel()
