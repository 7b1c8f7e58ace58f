"""Containers started before they are asked for.

For each kind of sandbox that was wanted lately some wait, and the background fills up what is taken.  Each is
used once: none comes back, so there is nothing to be cleaned that a program has had.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
from anyio.abc import TaskGroup

from sostenuto.errors import SandboxError
from sostenuto.sandbox.docker.backend import DockerBackend
from sostenuto.sandbox.docker.container import DockerSandbox
from sostenuto.sandbox.protocol import Blueprint, Probe, Snapshot

_log = logging.getLogger(__name__)
_CANARY_S = 2.0


@dataclass(slots=True, eq=False)
class _Kind:
    """Sandboxes of one blueprint, without its files."""

    blueprint: Blueprint
    ready: deque[DockerSandbox] = field(default_factory=deque[DockerSandbox])
    starting: int = 0


class WarmPool:
    """A backend in front of another, that keeps `warm` started sandboxes of each of the last `kinds` kinds.

    Used as an async context manager; at its end those that nobody took are stopped.
    """

    def __init__(self, backend: DockerBackend, *, warm: int, kinds: int = 8) -> None:
        self._backend = backend
        self._warm = warm
        self._most_kinds = kinds
        self._kinds: OrderedDict[str, _Kind] = OrderedDict()
        """The one that was wanted last is the last."""
        self._group: TaskGroup | None = None
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> "WarmPool":
        self._group = await self._exits.enter_async_context(anyio.create_task_group())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._group is not None:
            self._group.cancel_scope.cancel()
        try:
            await self._exits.aclose()
        finally:
            await self._discard_all()

    async def _discard_all(self) -> None:
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for kind in self._kinds.values():
                    for sandbox in kind.ready:
                        group.start_soon(_discard, sandbox)

    @property
    def name(self) -> str:
        return self._backend.name

    @property
    def waiting(self) -> int:
        """Sandboxes that are ready and that nobody has taken."""
        return sum(len(kind.ready) for kind in self._kinds.values())

    async def probe(self) -> Probe:
        return await self._backend.probe()

    async def start(
        self, name: str, blueprint: Blueprint, *, snapshot: Snapshot | None = None
    ) -> DockerSandbox:
        """One that waits, when there is one; the files of the blueprint are written into it then."""
        if snapshot is not None:
            return await self._backend.start(name, blueprint, snapshot=snapshot)
        kind = self._wanted(await self._backend.fingerprint(blueprint), blueprint)
        sandbox = await self._take(kind)
        self._fill(kind)
        if sandbox is None:
            return await self._backend.start(name, blueprint)
        sandbox.name = name
        if blueprint.files:
            try:
                await sandbox.place(blueprint.files)
            except BaseException:
                sandbox.end_soon()
                raise
        return sandbox

    async def forget(self, snapshot: Snapshot) -> None:
        await self._backend.forget(snapshot)

    async def prepare(self, blueprint: Blueprint) -> None:
        """Have sandboxes of this kind wait before the first is asked for."""
        await self._backend.prepare(blueprint)
        self._fill(self._wanted(await self._backend.fingerprint(blueprint), blueprint))

    def _wanted(self, key: str, blueprint: Blueprint) -> _Kind:
        kind = self._kinds.setdefault(key, _Kind(replace(blueprint, files={})))
        self._kinds.move_to_end(key)
        if len(self._kinds) > self._most_kinds:
            _, oldest = self._kinds.popitem(last=False)
            self._spawn(self._drop, oldest)
        return kind

    async def _drop(self, kind: _Kind) -> None:
        while kind.ready:
            await _discard(kind.ready.popleft())

    async def _take(self, kind: _Kind) -> DockerSandbox | None:
        while kind.ready:
            sandbox = kind.ready.popleft()
            try:
                if (await sandbox.shell("true", timeout_s=_CANARY_S)).exit_code == 0:
                    return sandbox
            except SandboxError as error:
                _log.warning("a waiting sandbox was lost: %s", error)
            except BaseException:
                sandbox.end_soon()
                raise
            self._spawn(_discard, sandbox)
        return None

    def _fill(self, kind: _Kind) -> None:
        for _ in range(self._warm - len(kind.ready) - kind.starting):
            kind.starting += 1
            self._spawn(self._add, kind)

    async def _add(self, kind: _Kind) -> None:
        """When it fails, the next one that is wanted tries again."""
        try:
            kind.ready.append(await self._backend.start("waiting", kind.blueprint))
        except SandboxError as error:
            _log.warning("no sandbox could be started ahead: %s", error)
        finally:
            kind.starting -= 1
        if kind not in self._kinds.values():  # no longer wanted
            await self._drop(kind)

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: object) -> None:
        if self._group is None:
            raise RuntimeError("enter the pool before it is used")
        self._group.start_soon(work, *arguments)


async def _discard(sandbox: DockerSandbox) -> None:
    try:
        await sandbox.stop()
    except SandboxError as error:
        _log.warning("a waiting sandbox could not be stopped: %s", error)
