"""Stands where a compiled package is imported that does not exist for CPUs; whatever of it is called raises.

`sglang_environment` writes this file as the packages `sgl_kernel` and `torchvision` of the environment.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

__version__ = "0.0.1"


class Missing:
    """Any name of the package, also one that has names of its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> None:
        raise RuntimeError(f"{self._name} was called, and this machine has no compiled kernels")

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        """It may be subclassed."""
        return ()


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any module inside the package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def __getattr__(name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{__name__}.{name}")


sys.meta_path.insert(0, _Finder())
