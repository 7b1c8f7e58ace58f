"""What an environment class declares before anything of it runs, checked as a whole."""

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, cast, get_args, get_origin

from pydantic import BaseModel

from sostenuto.envs.environment import Environment, tool_functions
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.errors import ConfigError
from sostenuto.sandbox.protocol import Blueprint
from sostenuto.tools.decorator import arguments_of
from sostenuto.tools.remote.declared import HttpTool, McpServer, Remote
from sostenuto.tools.schema import Tool, read_tool, resolve_hints
from sostenuto.tools.setup import Setup

AUTHOR_FILE = "__sostenuto_file__"
"""The attribute of a class that has the file it was written in, where its code does not say."""


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """A tool, and the attribute of the class it is reached by; None for a plain function."""

    tool: Tool
    attribute: str | None

    def bound_to(self, environment: Environment[Any]) -> Callable[..., Any]:
        return self.tool.function if self.attribute is None else getattr(environment, self.attribute)


@dataclass(frozen=True, slots=True)
class Declaration:
    """An environment class that can run."""

    cls: type[Environment[Any]]
    task_type: type[BaseModel]
    tools: dict[str, DeclaredTool]
    remote: tuple[Remote, ...]

    @property
    def name(self) -> str:
        return self.cls.__name__

    def blueprint(self) -> Blueprint | None:
        """ConfigError when its template is not there."""
        spec = _sandbox(self.cls)
        return spec.blueprint(author_file(self.cls).parent) if spec else None

    def setup(self) -> Setup:
        """What is done in its sandboxes before programs come."""
        spec = _sandbox(self.cls)
        return spec.to_run() if spec else Setup()

    def blocking(self) -> tuple[str, ...]:
        """Names of what runs in threads, tools and the steps of a program's life alike."""
        steps = [name for name in _STEPS if not is_async(getattr(self.cls, name))]
        return (*steps, *(name for name, tool in self.tools.items() if not tool.tool.is_async))


_STEPS = ("reset", "reward", "close", "save", "resume")


@dataclass(frozen=True, slots=True)
class Needs:
    """What the workers of a class run in; nothing: as the server itself does."""

    requirements: tuple[str, ...]
    interpreter: str | None
    """An absolute path."""


def needs(cls: type[Environment[Any]]) -> Needs:
    """What the class needs, or ConfigError for what cannot be given to pip or run."""
    given: object = cls.requirements
    interpreter = cls.interpreter
    if not isinstance(given, list | tuple):
        raise ConfigError(f"environment {cls.__name__}: `requirements` is {given!r}; make it a tuple of str")
    requirements = cast("tuple[object, ...]", tuple(given))
    for requirement in requirements:
        if not isinstance(requirement, str) or not requirement.strip() or requirement.startswith("-"):
            raise ConfigError(
                f"environment {cls.__name__}: `requirements` has {requirement!r}; write each as pip has it, "
                'such as "numpy==2.1.0"; options of pip go into its configuration'
            )
    if interpreter is None:
        return Needs(cast("tuple[str, ...]", requirements), None)
    if requirements:
        raise ConfigError(
            f"environment {cls.__name__} has `requirements` and `interpreter`; keep one of them"
        )
    # Not resolved: the python of a virtual environment is a link to another's.
    return Needs((), str(author_file(cls).absolute().parent / Path(interpreter).expanduser()))


@cache
def declaration(cls: type[Environment[Any]]) -> Declaration:
    """Read the class, or raise ConfigError that names what it lacks and the remedy."""
    for name, remedy in (
        ("reward", "async def reward(self, episode: Episode) -> float"),
        ("reset", "async def reset(self, task: YourTask) -> str"),
    ):
        if getattr(cls, name) is getattr(Environment, name):
            raise ConfigError(f"environment {cls.__name__} has no `{name}`; write `{remedy}`")
    system: object = vars(cls).get("system", "")
    if not isinstance(system, str):
        raise ConfigError(f"environment {cls.__name__}: `system` is not a str but {type(system).__name__}")
    _sandbox(cls)
    needs(cls)
    tools = {
        name: DeclaredTool(read_tool(function), attribute)
        for name, (attribute, function) in tool_functions(cls).items()
    }
    return Declaration(cls, _task_type(cls), tools, _remote(cls, tools))


def _remote(cls: type[Environment[Any]], tools: Collection[str]) -> tuple[Remote, ...]:
    """What other services offer; the names of an MCP server's tools are known when it has been asked."""
    declared = tuple(cast("Sequence[object]", cls.remote))
    for one in declared:
        if not isinstance(one, HttpTool | McpServer):
            kind = type(one).__name__
            raise ConfigError(
                f"environment {cls.__name__}: `remote` has a {kind}; it takes HttpTool and McpServer"
            )
    names = [*tools, *(one.name for one in declared if isinstance(one, HttpTool))]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"environment {cls.__name__}: two tools are called {name!r}; rename one of them"
            )
    return cast("tuple[Remote, ...]", declared)


def is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function)


def author_file(cls: type[Environment[Any]]) -> Path:
    """The file that the class was written in, as its code remembers it or as it was noted."""
    noted = vars(cls).get(AUTHOR_FILE)
    if isinstance(noted, str):
        return Path(noted)
    reset = cast("FunctionType", inspect.unwrap(cls.reset))
    return Path(reset.__code__.co_filename)


def note_author_file(cls: type[Environment[Any]]) -> None:
    """Keep the file with the class: cloudpickle takes it out of the code that it sends."""
    setattr(cls, AUTHOR_FILE, str(author_file(cls)))


def _task_type(cls: type[Environment[Any]]) -> type[BaseModel]:
    """The parameter of `Environment[...]`, else the annotation of `reset`'s task."""
    found = _generic_argument(cls) or _annotated_task(cls)
    if isinstance(found, type) and issubclass(cast("type[object]", found), BaseModel):
        return cast("type[BaseModel]", found)
    said = "nothing" if found is None else repr(found)
    raise ConfigError(
        f"environment {cls.__name__}: its task type is {said}; make it a pydantic model and write "
        "`async def reset(self, task: YourTask)`"
    )


def _generic_argument(cls: type) -> object:
    for base in cls.__mro__:
        for original in vars(base).get("__orig_bases__", ()):
            origin: object = get_origin(original)
            is_ours = isinstance(origin, type) and issubclass(cast("type[object]", origin), Environment)
            if is_ours and isinstance(get_args(original)[0], type):
                return get_args(original)[0]
    return None


def _annotated_task(cls: type[Environment[Any]]) -> object:
    parameters = arguments_of(cls.reset)
    if not parameters:
        raise ConfigError(
            f"environment {cls.__name__}: `reset` takes no task; write `reset(self, task: YourTask)`"
        )
    hints = resolve_hints(cls.reset, f"environment {cls.__name__}: reset")
    return hints.get(parameters[0].name)


def memory_bytes(cls: type[Environment[Any]]) -> int:
    """What its sandbox may take at most; 0 without one."""
    spec = _sandbox(cls)
    return spec.memory_bytes if spec else 0


def _sandbox(cls: type[Environment[Any]]) -> SandboxSpec | None:
    spec = inspect.getattr_static(cls, "sandbox", None)
    if spec is None or isinstance(spec, SandboxSpec):
        return spec
    raise ConfigError(
        f"environment {cls.__name__}: `sandbox` is not a SandboxSpec but {type(spec).__name__}; "
        "write `sandbox = SandboxSpec(...)`"
    )
