"""Environments by name, and how their classes travel to the processes that run them.

A class that a worker can import travels as `module:Class`; one of a script, a notebook or a local
scope travels by value.
"""

import base64
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar, cast

from pydantic import JsonValue

from sostenuto.envs.declaration import declaration, memory_bytes, needs, note_author_file
from sostenuto.envs.environment import Environment
from sostenuto.envs.pickling import dumps, loads
from sostenuto.errors import ConfigError, nearest
from sostenuto.tools.wire import EnvironmentRef

E = TypeVar("E", bound=type[Environment[Any]])


class Registry:
    """Environments by the names that configuration files use.  A value: whoever builds one passes it on."""

    def __init__(self, entries: Mapping[str, type[Environment[Any]] | str] | None = None) -> None:
        """Entries are classes or import paths `module:Class`; a path is imported when it is asked for."""
        self._entries = dict(entries or {})

    def add(self, name: str, environment: type[Environment[Any]] | str) -> None:
        """Enter a class or import path; ConfigError when the name is taken."""
        if name in self._entries:
            raise ConfigError(f"environment {name!r} is registered already; give the second another name")
        self._entries[name] = environment

    def __getitem__(self, name: str) -> type[Environment[Any]]:
        """The class under this name, or one that is named by import path; ConfigError names the nearest."""
        entry = self._entries.get(name, name)
        if isinstance(entry, type):
            return entry
        if ":" not in entry:
            hint = nearest(name, list(self._entries))
            raise ConfigError(f"no environment {name!r}; {hint} (or give it as `module:Class`)")
        return import_environment(entry)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)


@dataclass(frozen=True, slots=True)
class LoadedEnvironment:
    """A class and what it is made with."""

    cls: type[Environment[Any]]
    options: Mapping[str, JsonValue]

    def make(self) -> Environment[Any]:
        return self.cls(**self.options)


def environment_ref(cls: type[Environment[Any]], **options: JsonValue) -> EnvironmentRef:
    """The class as it travels; ConfigError when it cannot run, takes no such option or cannot be sent."""
    declaration(cls)
    _check_options(cls, options)
    path = f"{cls.__module__}:{cls.__qualname__}"
    needed = needs(cls)
    ref = EnvironmentRef(
        name=cls.__name__, options=options,
        requirements=needed.requirements, interpreter=needed.interpreter, memory_bytes=memory_bytes(cls),
    )  # fmt: skip
    if _is_importable(cls):
        return ref.model_copy(update={"import_path": path})
    note_author_file(cls)
    try:
        pickled = base64.b64encode(dumps(cls)).decode()
    # Pickling runs code of whatever the class refers to, and that raises what it likes.
    except Exception as error:
        raise ConfigError(
            f"environment {path} cannot be sent by value ({type(error).__name__}: {error}); "
            "move it into a module, or open what it refers to inside its methods"
        ) from error
    return ref.model_copy(update={"pickled": pickled})


def load_environment(ref: EnvironmentRef) -> LoadedEnvironment:
    """The class behind a reference, checked, or ConfigError."""
    if (ref.import_path is None) == (ref.pickled is None):
        raise ConfigError(f"environment {ref.name}: give import_path or pickled, one of them")
    cls = import_environment(ref.import_path) if ref.import_path else _unpickle(ref.name, ref.pickled or "")
    declaration(cls)
    _check_options(cls, ref.options)
    return LoadedEnvironment(cls, ref.options)


def import_environment(path: str) -> type[Environment[Any]]:
    """The class at `module:Class`, or ConfigError that names the nearest."""
    module_name, _, qualname = path.partition(":")
    module = _import(module_name, path)
    found: object = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, Environment):
        return cast("type[Environment[Any]]", found)
    hint = nearest(qualname, _environments_in(module))
    what = "there is no such name" if found is None else "it is not an Environment class"
    raise ConfigError(f"environment {path}: {what} in {module_name}; {hint}")


def _import(module_name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"environment {path}: no module {error.name!r} here; install it, "
            "or start from the folder that has it"
        ) from error
    # Importing runs the author's module, and that raises what it likes.
    except Exception as error:
        raise ConfigError(f"environment {path}: importing it: {type(error).__name__}: {error}") from error


def _unpickle(name: str, pickled: str) -> type[Environment[Any]]:
    try:
        found: object = loads(base64.b64decode(pickled, validate=True))
    # Unpickling imports what the class refers to, and that raises what it likes.
    except Exception as error:
        raise ConfigError(
            f"environment {name}, sent by value, cannot be read: {type(error).__name__}: {error}; "
            "what it imports must be installed where environments run"
        ) from error
    if isinstance(found, type) and issubclass(found, Environment):
        return cast("type[Environment[Any]]", found)
    raise ConfigError(f"environment {name}, sent by value, is not an Environment class but {found!r}")


def _is_importable(cls: type) -> bool:
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        return False
    try:
        found: object = importlib.import_module(cls.__module__)
    except ImportError:
        return False
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is cls


def _environments_in(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Environment) and value is not Environment
    ]


def _check_options(cls: type[Environment[Any]], options: Mapping[str, JsonValue]) -> None:
    if cls.__init__ is object.__init__:
        known: list[str] = []
        fits = not options
    else:
        signature = inspect.signature(cls)
        known = list(signature.parameters)
        fits = _binds(signature, options)
    if not fits:
        unknown = next((name for name in options if name not in known), None)
        what = (
            f"there is no option {unknown!r}; {nearest(unknown, known)}" if unknown else f"it needs {known}"
        )
        raise ConfigError(f"environment {cls.__name__}: {what}")


def _binds(signature: inspect.Signature, options: Mapping[str, JsonValue]) -> bool:
    try:
        signature.bind(**options)
    except TypeError:
        return False
    return True
