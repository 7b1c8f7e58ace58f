"""The tool server's workers: `tools.host.Hosts` over processes of this machine.

- Programs go to the worker that holds the fewest; one that died is replaced when the next is chosen.
- Environments with the same interpreter share workers; each interpreter has places of its own.
- Leaving the block ends every worker with its process group.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import anyio
from anyio.abc import TaskGroup

from sostenuto.envs.bounding import UNBOUNDED, Bounding, WorkerBounds
from sostenuto.envs.host import HostConfig, WorkerHost
from sostenuto.envs.interpreters import Interpreters, default_folder
from sostenuto.envs.process import start_process
from sostenuto.errors import ConfigError
from sostenuto.sandbox.cgroups import find_cgroups
from sostenuto.tools.host import EnvironmentFacts, Host
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.wire import EnvironmentRef


@dataclass(slots=True, eq=False)
class _Place:
    """Room for one worker."""

    number: int
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
        bounds: WorkerBounds = UNBOUNDED,
        interpreters: Path | None = None,
    ) -> None:
        """`size` workers for each interpreter; virtual environments are kept in the folder `interpreters`.

        `secrets` are `self.secrets` of every environment; `import_paths` default to this process's own.

        A worker whose tool is silent for `grace_s` after its deadline is ended; a class has `load_s` to load.
        """
        if size < 1:
            raise ConfigError(f"hosts: size is {size}; give at least 1")
        values = dict(secrets or {})
        paths = list(sys.path if import_paths is None else import_paths)
        self._config = HostConfig(values, Secrets(values).redact, paths, grace_s, load_s)
        self._size = size
        self._bounds = bounds
        self._folder = interpreters or default_folder()
        self._interpreters: Interpreters | None = None
        self._places: dict[str, list[_Place]] = {}
        """By interpreter."""
        self._choices = 0
        self._group: TaskGroup | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._group = await self._stack.enter_async_context(anyio.create_task_group())
        self._interpreters = Interpreters(self._folder, self._group, self._config.redact)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._group is not None
        self._group.cancel_scope.cancel()
        await self._stack.aclose()
        self._group = None

    @property
    def count(self) -> int:
        """Workers that are alive."""
        return len(self.pids)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the workers that are alive."""
        places = (place for each in self._places.values() for place in each)
        return tuple(place.living.pid for place in places if place.living)

    async def describe(self, environment: EnvironmentRef) -> EnvironmentFacts:
        """Load the class in a worker and read what it declares, or raise its ConfigError."""
        return await (await self._choose(environment)).describe(environment)

    async def choose(self, environment: EnvironmentRef) -> Host:
        """The worker with the fewest programs, of several the one not chosen for longest."""
        return await self._choose(environment)

    async def _choose(self, environment: EnvironmentRef) -> WorkerHost:
        if self._interpreters is None:
            raise RuntimeError("the pool of workers is not open; use `async with`")
        python = await self._interpreters.of(environment)
        places = self._places.setdefault(python, [_Place(number) for number in range(self._size)])
        place = min(places, key=lambda p: (p.living.load if p.living else 0, p.chosen))
        self._choices += 1
        place.chosen = self._choices
        async with place.starting:
            return place.living or await self._start(place, python)

    async def _start(self, place: _Place, python: str) -> WorkerHost:
        assert self._group is not None
        bounding = Bounding(self._bounds, find_cgroups())
        try:
            worker = await start_process(python, bounding.entering)
        except BaseException:
            bounding.remove()
            raise
        bounding.pin(worker.pid, place.number)
        host = WorkerHost(worker, self._config, bounding)
        await self._group.start(host.run)
        place.host = host
        return host
