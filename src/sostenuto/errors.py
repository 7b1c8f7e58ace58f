"""Every exception this project raises on purpose.

* SostenutoError
  - ConfigError            a value the user gave is wrong; names the field and the remedy
  - RecordError            a record breaks an invariant; the record is refused
  - InvalidTransition      a bug in the runtime; never caught
  - Unsupported            this system lacks something that was asked for; names the remedy
  - ProgramError           one program failed; recorded, never fatal to its siblings
    . EngineError          the inference engine refused or broke           (infrastructure)
      VersionRefused       it does not serve a version that was asked for  (infrastructure)
    . SandboxError         provisioning, exec or file I/O in the sandbox   (infrastructure)
    . Overloaded           too much waits already; says when to try again  (infrastructure)
      VersionUnavailable   no engine serves a version that is required     (infrastructure)
    . ToolServerError      the tool server refused, broke or went away     (infrastructure)
    . JudgeError           a model that was to score gave no score         (infrastructure)
    . EnvironmentFailure   code the environment's author wrote raised      (environment)
    . PolicyError          the policy's own output cannot be continued     (policy)
  - ToolError              raised by a tool on purpose; the model sees its text
  - PathError              a path in a sandbox that is missing, outside, no file or too large; whoever
                           named it is at fault, and the sandbox goes on
  - TrainerError           the trainer process broke, or cannot write what it has to

Code below a boundary raises what it likes; `boundary` names the side it came from.
A more specific ProgramError passes through unchanged.
"""

from collections.abc import Generator
from contextlib import contextmanager
from difflib import get_close_matches
from enum import StrEnum


class Blame(StrEnum):
    """Whose fault a failed program is."""

    INFRASTRUCTURE = "infrastructure"
    ENVIRONMENT = "environment"
    POLICY = "policy"


class SostenutoError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(SostenutoError, ValueError):
    """A value the user gave is wrong."""


class RecordError(SostenutoError, ValueError):
    """A record breaks an invariant."""


class InvalidTransition(SostenutoError):  # noqa: N818 - reads as the fact it states
    """The runtime asked for a move the lifecycle table does not have."""


class Unsupported(SostenutoError):  # noqa: N818 - reads as the fact it states
    """This system lacks something that was asked for."""


class ProgramError(SostenutoError):
    """One program failed.  The run goes on without it."""

    blame: Blame = Blame.INFRASTRUCTURE


class EngineError(ProgramError):
    """The inference engine refused or broke."""


class VersionRefused(EngineError):  # noqa: N818 - reads as the fact it states
    """The engine serves no version that the request may be of.  Another one may, or this one later."""


class EngineKilled(EngineError):  # noqa: N818 - reads as the fact it states
    """A signal ended the engine's process before it served: nothing is known against starting it again."""


class SandboxError(ProgramError):
    """Provisioning, exec or file I/O in the sandbox failed."""


class ToolServerError(ProgramError):
    """The tool server refused, broke or went away."""


class JudgeError(ProgramError):
    """A model that was to score an episode gave no score."""


class Overloaded(ProgramError):  # noqa: N818 - reads as the fact it states
    """Too much waits already.  Nothing of what was asked for was begun."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        """`retry_after_s`: when it may be worth asking again."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class VersionUnavailable(Overloaded):
    """No engine serves a version that the program requires, and none will.  Begun anew it may be served."""


class EnvironmentFailure(ProgramError):  # noqa: N818 - EnvironmentError is a builtin
    """Code that the environment's author wrote raised."""

    blame = Blame.ENVIRONMENT


class PolicyError(ProgramError):
    """The policy's own output cannot be continued."""

    blame = Blame.POLICY


class ToolError(SostenutoError):
    """Raised by a tool on purpose: its text becomes the observation."""


class PathError(SostenutoError):
    """No file that can be read or written is at this path of a workspace."""


class TrainerError(SostenutoError):
    """The trainer process broke, or cannot write what it has to."""


@contextmanager
def boundary(blame: type[ProgramError], doing: str) -> Generator[None]:
    """Attribute whatever escapes the block to `blame`."""
    try:
        yield
    except ProgramError:
        raise
    except Exception as exc:
        raise blame(f"{doing}: {type(exc).__name__}: {exc}") from exc


@contextmanager
def lone_error() -> Generator[None]:
    """Around a task group: when all that went wrong in it are errors of ours, raise the first of them.

    Siblings fail together; which of them was first is all that whoever reads the error needs.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        _, others = group.split(SostenutoError)
        if others is not None:
            raise
        raise _first(group) from group


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner  # pyright: ignore[reportUnknownArgumentType]


def nearest(name: str, known: list[str]) -> str:
    """A hint for an error message: the known names, the closest one first."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known)) or 'none'}"
