"""Whose an exception is that came out of an author's code, and where in that code it came up."""

import asyncio
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

from sostenuto.envs.pickling import SENT_BY_VALUE
from sostenuto.envs.workspace import ShellDeadline
from sostenuto.errors import EnvironmentFailure, ProgramError, ToolError


@contextmanager
def authored(doing: str, file: str, *, tool: bool = False) -> Generator[None]:
    """Turn what escapes the block into a ProgramError; of a tool, what it says on purpose passes.

    A cancellation passes when somebody asked for it; one that the author's code made up is a failure.
    """
    try:
        yield
    # Even `sys.exit()` in an environment is its failure, not the end of the worker.
    except BaseException as raised:
        error = _single(raised)
        if error is raised and _passes(error, tool=tool):
            raise
        if _passes(error, tool=tool):
            raise error from None
        message = f"{doing}: {_describe(error, file)}"
        if isinstance(error, ProgramError) and not isinstance(error, EnvironmentFailure):
            raise type(error)(message) from error
        raise EnvironmentFailure(message) from error


def _passes(error: BaseException, *, tool: bool) -> bool:
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit) or (tool and isinstance(error, ToolError | ShellDeadline))


def _single(error: BaseException) -> BaseException:
    """What a task group raised, when it is one error."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    inner = cast("tuple[BaseException, ...]", error.exceptions)  # pyright: ignore[reportUnknownMemberType]
    return _single(inner[0]) if len(inner) == 1 else cast("BaseException", error)


def _describe(error: BaseException, file: str) -> str:
    """Type, message and the innermost line in `file`, or in any file when none is in it."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    lines = [
        (file if frame.filename == SENT_BY_VALUE else frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    own = [line for line in lines if line[0] == file] or lines
    return f"{what} ({own[-1][0]}:{own[-1][1]})" if own else what
