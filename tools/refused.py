"""A refusal of the tool server itself, with its HTTP status, and how errors travel as Refusals."""

from collections.abc import Mapping
from types import MappingProxyType

from sostenuto.errors import (
    Blame,
    ConfigError,
    EnvironmentFailure,
    Overloaded,
    PathError,
    PolicyError,
    ProgramError,
    SandboxError,
    SostenutoError,
    ToolServerError,
    Unsupported,
)
from sostenuto.tools.wire import Refusal


class Refused(ToolServerError):  # noqa: N818 - reads as the fact it states
    """The server does not do this, now or ever; `status` says to HTTP which."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class WrongToken(ToolServerError):  # noqa: N818 - reads as the fact it states
    """The server does not know the token that the client was given."""


class Unreachable(ToolServerError):  # noqa: N818 - reads as the fact it states
    """The connection to the server was lost, and could not be made again in time."""


class OutcomeUnknown(ToolServerError):  # noqa: N818 - reads as the fact it states
    """The call was under way when its server died; it is not run again, and nobody knows how far it came."""


class Interrupted(ToolServerError):  # noqa: N818 - reads as the fact it states
    """The program ended with its server, which was started again since; perhaps it can be resumed."""


NAMED: Mapping[str, type[SostenutoError]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            ConfigError,
            EnvironmentFailure,
            Interrupted,
            OutcomeUnknown,
            Overloaded,
            PathError,
            PolicyError,
            SandboxError,
            ToolServerError,
            Unsupported,
        )
    }
)
"""The errors that keep their type across the wire."""

BLAMED: Mapping[Blame, type[ProgramError]] = MappingProxyType(
    {
        Blame.INFRASTRUCTURE: ToolServerError,
        Blame.ENVIRONMENT: EnvironmentFailure,
        Blame.POLICY: PolicyError,
    }
)


def status_of(error: SostenutoError) -> int:
    """4xx when the request or what it names is at fault, else 5xx."""
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, Overloaded):
        return 429
    if isinstance(error, Interrupted):
        return 410
    if isinstance(error, PathError) and isinstance(error.__cause__, FileNotFoundError):
        return 404
    if isinstance(error, ConfigError | PathError):
        return 400
    return 422 if blame_of(error) in {Blame.ENVIRONMENT, Blame.POLICY} else 503


def blame_of(error: SostenutoError) -> Blame | None:
    """Whose fault it is, for errors that end a program."""
    return error.blame if isinstance(error, ProgramError) else None


def kind_of(error: SostenutoError) -> str:
    """One word for it: whose fault it is, or that the request was refused."""
    blame = blame_of(error)
    return "refused" if blame is None or isinstance(error, Refused | Interrupted) else blame.value


def refusal(error: SostenutoError) -> Refusal:
    """The error as it goes over the wire, under the nearest name that the other side knows."""
    name = next((base.__name__ for base in type(error).__mro__ if base.__name__ in NAMED), "ToolServerError")
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
    return Refusal(error=name, message=str(error), blame=blame_of(error), retry_after_s=retry_after_s)


def raised(refusal: Refusal) -> SostenutoError:
    """The error that a refusal stands for: by its name, else by its blame."""
    kind = NAMED.get(refusal.error) or BLAMED[refusal.blame or Blame.INFRASTRUCTURE]
    if kind is Overloaded:
        return Overloaded(refusal.message, retry_after_s=refusal.retry_after_s)
    return kind(refusal.message)
