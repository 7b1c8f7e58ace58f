"""Which call has a worker's event loop, kept where the server can read it while the worker is stuck.

A page of memory is shared with the server: word 0 is the call whose coroutine runs this very moment (0:
none), word 1 the highest call that was begun.  Writing a word costs nothing and needs no cooperation later.
"""

import inspect
import math
import mmap
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from functools import partial
from typing import Any, Self, TypeVar, cast

import anyio
import anyio.lowlevel
import anyio.to_thread

T = TypeVar("T")

PAGE_BYTES = mmap.PAGESIZE


class Page:
    """Both sides' view of the shared words."""

    def __init__(self, fd: int) -> None:
        self._words = memoryview(mmap.mmap(fd, PAGE_BYTES)).cast("Q")

    @property
    def running(self) -> int:
        return self._words[0]

    @running.setter
    def running(self, call: int) -> None:
        self._words[0] = call

    @property
    def begun(self) -> int:
        return self._words[1]

    @begun.setter
    def begun(self, call: int) -> None:
        self._words[1] = call


current: ContextVar[tuple[Page, int] | None] = ContextVar("current", default=None)
"""The call that this context works for."""


async def run_author_code(function: Callable[..., Any], *arguments: object) -> object:
    """Call an async function in the loop, a sync one in a thread, and return what it returned."""
    if _is_async(function):
        return await _watched(function(*arguments))
    returned = await run_in_thread(partial(function, *arguments))
    # A decorator around a coroutine function often is a plain function.
    return await _watched(returned) if inspect.isawaitable(returned) else returned


async def run_in_thread(function: Callable[[], T]) -> T:
    """Call a sync function in a thread; however many hang, the next one starts."""
    return await anyio.to_thread.run_sync(function, limiter=_limiter())


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function)


_threads: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar("author_threads")


def _limiter() -> anyio.CapacityLimiter:
    try:
        return _threads.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(math.inf)
        _threads.set(limiter)
        return limiter


async def _watched(work: Awaitable[object]) -> object:
    mark = current.get()
    return await work if mark is None else await _Steps(work, *mark)


class _Steps:
    """An awaitable that notes its call on the page while a step of it runs."""

    def __init__(self, work: Awaitable[Any], page: Page, call: int) -> None:
        self._inner: Generator[Any, Any, Any] = work.__await__()
        self._page = page
        self._call = call

    def __await__(self) -> Generator[Any, Any, Any]:
        return cast("Generator[Any, Any, Any]", self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> object:
        self._page.running = self._call
        try:
            return next(self._inner)
        finally:
            self._page.running = 0

    def send(self, value: object) -> object:
        self._page.running = self._call
        try:
            return self._inner.send(value)
        finally:
            self._page.running = 0

    def throw(self, error: BaseException) -> object:
        self._page.running = self._call
        try:
            return self._inner.throw(error)
        finally:
            self._page.running = 0

    def close(self) -> None:
        self._inner.close()
