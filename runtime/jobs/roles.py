"""Several roles in one episode of an agent: who speaks besides the policy.  Values."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from sostenuto.errors import ConfigError
from sostenuto.runtime.config import EngineEntry

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_POLICY = "default"
"""By which an agent calls the policy, in no role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Calls of an agent in which `model` is its name are of this role, and its conversations are its own.

    Trained: the policy speaks, and learns from what it has said here, too.  Not trained: what was said is
    context of nobody, and in the record without a token to train.
    """

    name: str
    trained: bool = True
    model: str | Path | None = None
    """Folder of a model that never changes, with the policy's tokenizer and chat format; None: the policy."""
    engine: EngineEntry = field(default_factory=EngineEntry)
    """Of `model`: one of our own, or one that serves it already."""
    temperature: float | None = None
    """Of a role that is not trained; None: what the agent asks for."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name == _POLICY:
            raise ConfigError(
                f"roles: {self.name!r} cannot be a name; give 1 to 64 letters, digits, '.', '_' or '-', and "
                f"another than {_POLICY!r}, which is the policy"
            )
        if self.trained and (self.model is not None or self.temperature is not None):
            raise ConfigError(
                f"roles: {self.name}: model and temperature are of a role that is not trained; give "
                "trained = false"
            )
        if self.model is None and self.engine != EngineEntry():
            raise ConfigError(f"roles: {self.name}: engine is given without a model; give the model's folder")
        if self.temperature is not None and self.temperature < 0:
            raise ConfigError(f"roles: {self.name}: temperature is {self.temperature}; give 0 or more")


def check_roles(roles: Sequence[Role], agents: frozenset[str]) -> None:
    """ConfigError for roles that nobody could speak in, or that cannot be told apart."""
    names = [role.name for role in roles]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"roles: the name {min(twice)!r} is there twice; give each its own")
    if roles and not agents:
        raise ConfigError(
            "roles: an environment whose turns are driven has one speaker; give an agent, which calls each "
            "role by its name as the model"
        )
