"""Work for one program: within its time, and with every failure attributed."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from sostenuto.errors import ProgramError, SostenutoError, ToolServerError, boundary

T = TypeVar("T")


async def outcome_of(work: Callable[[], Awaitable[T]]) -> T | SostenutoError:
    """What `work` returned, or the error it raised on purpose, as a value."""
    try:
        return await work()
    except SostenutoError as error:
        return error


def value_of(outcome: T | SostenutoError) -> T:
    """The value, or raise the error that took its place."""
    if isinstance(outcome, SostenutoError):
        raise outcome
    return outcome


async def bounded(
    work: Callable[[], Awaitable[T]],
    *,
    timeout_s: float,
    late: type[ProgramError],
    broken: type[ProgramError] = ToolServerError,
    doing: str,
) -> T:
    """What `work` returns; a missed deadline is `late`, an error not raised on purpose is `broken`."""
    try:
        with anyio.fail_after(timeout_s), boundary(broken, doing):
            outcome = await outcome_of(work)
    except TimeoutError:
        raise late(f"{doing}: not done within {timeout_s:.3g} s") from None
    return value_of(outcome)
