"""What makes sandboxes start alike, as text that is equal when it is."""

import hashlib
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import anyio
from anyio import to_thread

from sostenuto.errors import SandboxError
from sostenuto.sandbox.fingerprint import fingerprint
from sostenuto.sandbox.protocol import Blueprint
from sostenuto.tools.setup import Setup

FRESH_S = 1.0
"""A template that was looked at so lately is not looked at again."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Sandboxes that start alike."""

    blueprint: Blueprint
    setup: Setup
    content: str
    """Of all that decides what set-up commands come to: the backend, the commands, and the blueprint with its
    template as it is now."""

    @property
    def key(self) -> str:
        return f"{self.content} {self.setup.health}"


@dataclass(slots=True)
class _Look:
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    at_s: float = -inf
    digest: str = ""


class Kinds:
    """Of one backend."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._looks: dict[str, _Look] = {}

    async def of(self, blueprint: Blueprint, setup: Setup) -> Kind:
        """SandboxError when the template cannot be read."""
        template = await self._template(blueprint.template)
        parts = (
            self._backend,
            template,
            sorted(blueprint.files.items()),
            sorted(blueprint.environment.items()),
            blueprint.limits,
            blueprint.shell,
            blueprint.image,
            blueprint.network,
            setup.commands,
            setup.timeout_s,
        )
        return Kind(blueprint, setup, hashlib.sha256(repr(parts).encode()).hexdigest())

    async def _template(self, template: str | None) -> str:
        if template is None:
            return ""
        look = self._looks.setdefault(template, _Look())
        async with look.lock:
            if anyio.current_time() >= look.at_s + FRESH_S:
                look.digest = await to_thread.run_sync(_digest, Path(template))
                look.at_s = anyio.current_time()
            return look.digest


def _digest(template: Path) -> str:
    try:
        return fingerprint(template)
    except OSError as error:
        raise SandboxError(f"template {template} cannot be read: {error}") from error
