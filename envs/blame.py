"""Whose an exception is that came out of an author's code, and where in that code it came up."""

import asyncio
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import cast

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
    group = isinstance(error, BaseExceptionGroup)
    inner = cast("Sequence[BaseException]", getattr(error, "exceptions", ())) if group else ()
    return _single(inner[0]) if len(inner) == 1 else error


def _describe(error: BaseException, file: str) -> str:
    """Type, message and the innermost line in `file`, or in any file when none is in it."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or frames
    return f"{what} ({own[-1].filename}:{own[-1].lineno})" if own else what
