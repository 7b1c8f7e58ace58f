"""`@tool` marks a function or method that a policy may call.

The function itself is returned unchanged, so its author can go on calling it.  What can be seen without
resolving types is checked here, at definition; `tools/schema.py` checks the rest.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from types import FunctionType
from typing import Any, TypedDict, TypeVar, Unpack, overload

from sostenuto.errors import ConfigError
from sostenuto.tools.limits import read_limits
from sostenuto.tools.wire import ToolLimits

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__sostenuto_tool__"
_places = count()
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_VARIADIC = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


class LimitOptions(TypedDict, total=False):
    """See `sostenuto.tools.wire.ToolLimits`."""

    queue: str
    concurrency: int
    rate_per_s: float
    burst: int
    cpus: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """What the decorator was told."""

    name: str
    timeout_s: float
    output_bytes: int
    serial: bool
    idempotent: bool
    limits: ToolLimits
    place: int
    """Tools defined later have higher ones."""


@overload
def tool(function: F, /) -> F: ...


@overload
def tool(
    *,
    timeout_s: float = 30.0,
    output_bytes: int = 16384,
    serial: bool = False,
    idempotent: bool = False,
    name: str | None = None,
    **limits: Unpack[LimitOptions],
) -> Callable[[F], F]: ...


def tool(
    function: F | None = None,
    /,
    *,
    timeout_s: float = 30.0,
    output_bytes: int = 16384,
    serial: bool = False,
    idempotent: bool = False,
    name: str | None = None,
    **limits: Unpack[LimitOptions],
) -> F | Callable[[F], F]:
    """Offer a sync or async function to the policy under its own or the given name.

    At `timeout_s` the call ends and the policy reads that it did; output beyond `output_bytes` loses its
    middle; of a program's `serial` tools one runs at a time; an `idempotent` one may be run again under
    the same call id when a tool server died while it ran.  Calls of all programs keep to `limits`: at most
    `concurrency` at a time, `rate_per_s` starts a second with up to `burst` at once, both shared by tools of
    one `queue`; each claims `cpus` and `memory_bytes` of the server.  ConfigError says what is wrong with it.
    """

    def mark(target: F) -> F:
        where = label(target)
        options = ToolOptions(
            _name_of(target, where) if name is None else name,
            timeout_s,
            output_bytes,
            serial,
            idempotent,
            read_limits(limits, f"tool {where}"),
            next(_places),
        )
        _check_options(options, where)
        _check_signature(target, where)
        vars(target)[_MARK] = options
        return target

    def mark_in_body(target: F) -> F:
        _refuse_redefinition(target)
        return mark(target)

    if function is None:
        return mark_in_body
    _refuse_redefinition(function)
    return mark(function)


def options_of(function: object) -> ToolOptions | None:
    """What `@tool` was told about this function; None when it is not a tool."""
    options = getattr(function, "__dict__", {}).get(_MARK)
    return options if isinstance(options, ToolOptions) else None


def place_of(function: object) -> int:
    """Sorts tools in the order of their definition."""
    options = options_of(function)
    return options.place if options else -1


def label(function: Callable[..., object]) -> str:
    """How messages name a tool: `Class.method`, without what encloses the class."""
    return str(getattr(function, "__qualname__", function)).rpartition("<locals>.")[2]


def arguments_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """The parameters that the policy fills in: all but a leading `self`."""
    parameters = list(inspect.signature(function).parameters.values())
    return parameters[1:] if parameters and parameters[0].name == "self" else parameters


def _name_of(target: Callable[..., object], where: str) -> str:
    if not isinstance(target, FunctionType):
        raise ConfigError(
            f"tool {where}: @tool goes on a function; under @staticmethod or @classmethod it is the inner one"
        )
    return target.__name__


def _check_options(options: ToolOptions, where: str) -> None:
    if not _NAME.fullmatch(options.name):
        raise ConfigError(
            f"tool {where}: name {options.name!r} is not made of letters, digits, _ and - (64 at most)"
        )
    if not 0 < options.timeout_s < float("inf"):
        raise ConfigError(
            f"tool {where}: timeout_s is {options.timeout_s}; give a positive number of seconds"
        )
    if options.output_bytes < 64:
        raise ConfigError(f"tool {where}: output_bytes is {options.output_bytes}; give at least 64")


def _check_signature(function: Callable[..., object], where: str) -> None:
    if not inspect.getdoc(function):
        raise ConfigError(f"tool {where}: no docstring; its first lines tell the model what the tool does")
    for parameter in arguments_of(function):
        _check_argument(parameter, f"tool {where}: argument {parameter.name!r}")


def _check_argument(parameter: inspect.Parameter, where: str) -> None:
    stars = _VARIADIC.get(parameter.kind)
    if stars:
        raise ConfigError(
            f"{where}: {stars}{parameter.name} cannot be described to a model; name each argument"
        )
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise ConfigError(f"{where}: positional-only; arguments come by name, take the / out")
    if parameter.annotation is inspect.Parameter.empty:
        raise ConfigError(f"{where}: no type; annotate it, as in `{parameter.name}: str`")


def _refuse_redefinition(function: Callable[..., object]) -> None:
    """Refuse a second tool of one name in one class body: Python would forget the first without a word."""
    frame = inspect.currentframe()
    body = frame.f_back.f_back if frame and frame.f_back else None
    if body is None or "__qualname__" not in body.f_locals:
        return
    if options_of(body.f_locals.get(getattr(function, "__name__", ""))) is not None:
        raise ConfigError(f"tool {label(function)}: defined twice in one class; rename one of them")
