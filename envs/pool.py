"""The tool server's workers: `tools.host.Hosts` over processes of this machine.

- Programs go to the worker that holds the fewest; one that died is replaced when the next is chosen.
- Leaving the block ends every worker with its process group.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Self

import anyio
from anyio.abc import TaskGroup

from sostenuto.envs.host import HostConfig, WorkerHost
from sostenuto.envs.process import start_process
from sostenuto.errors import ConfigError
from sostenuto.tools.host import EnvironmentFacts, Host
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.wire import EnvironmentRef


@dataclass(slots=True, eq=False)
class _Place:
    """Room for one worker."""

    host: WorkerHost | None = None
    chosen: int = 0
    """When it was chosen last, in choices."""
    starting: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def living(self) -> WorkerHost | None:
        return self.host if self.host and self.host.alive else None


class WorkerPool:
    """An async context manager; workers start when they are first chosen."""

    def __init__(
        self,
        *,
        size: int = 1,
        secrets: Mapping[str, str] | None = None,
        import_paths: Sequence[str] | None = None,
        grace_s: float = 1.0,
        load_s: float = 60.0,
    ) -> None:
        """`secrets` are `self.secrets` of every environment; `import_paths` default to this process's own.

        A worker whose tool is silent for `grace_s` after its deadline is ended; a class has `load_s` to load.
        """
        if size < 1:
            raise ConfigError(f"hosts: size is {size}; give at least 1")
        values = dict(secrets or {})
        paths = list(sys.path if import_paths is None else import_paths)
        self._config = HostConfig(values, Secrets(values).redact, paths, grace_s, load_s)
        self._places = [_Place() for _ in range(size)]
        self._choices = 0
        self._group: TaskGroup | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._group = await self._stack.enter_async_context(anyio.create_task_group())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._group is not None
        self._group.cancel_scope.cancel()
        await self._stack.aclose()
        self._group = None

    @property
    def count(self) -> int:
        """Workers that are alive."""
        return sum(place.living is not None for place in self._places)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the workers that are alive."""
        return tuple(place.living.pid for place in self._places if place.living)

    async def describe(self, environment: EnvironmentRef) -> EnvironmentFacts:
        """Load the class in a worker and read what it declares, or raise its ConfigError."""
        return await (await self._choose()).describe(environment)

    async def choose(self, environment: EnvironmentRef) -> Host:
        """The worker with the fewest programs, of several the one not chosen for longest."""
        return await self._choose()

    async def _choose(self) -> WorkerHost:
        place = min(self._places, key=lambda p: (p.living.load if p.living else 0, p.chosen))
        self._choices += 1
        place.chosen = self._choices
        async with place.starting:
            return place.living or await self._start(place)

    async def _start(self, place: _Place) -> WorkerHost:
        if self._group is None:
            raise RuntimeError("the pool of workers is not open; use `async with`")
        worker = await start_process()
        host = WorkerHost(worker, self._config)
        await self._group.start(host.run)
        place.host = host
        return host
