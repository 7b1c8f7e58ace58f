"""The engines of one job: each has a keeper, and engines can be added and removed while the job runs."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from sostenuto.errors import ConfigError, EngineError
from sostenuto.runtime.dispatcher import Dispatcher
from sostenuto.runtime.engines.opened import Source
from sostenuto.runtime.engines.suits import Requirements
from sostenuto.runtime.keeper import Keeper, Standing
from sostenuto.types import EngineId


class Crew:
    """Use `open_crew`."""

    def __init__(self, needs: Requirements, running: TaskGroup) -> None:
        self._needs = needs
        self._running = running
        self._keepers: dict[EngineId, Keeper] = {}

    def __repr__(self) -> str:
        return f"<Crew {list(self._keepers.values())}>"

    @property
    def keepers(self) -> list[Keeper]:
        return list(self._keepers.values())

    async def begin(self, dispatcher: Dispatcher, sources: Sequence[Source]) -> None:
        """Open all of them; go on with those that join.  EngineError, with every reason, when none does."""
        self.dispatcher = dispatcher
        begun = [self._begin(source, promised_tokens=0) for source in sources]
        for keeper in begun:
            await keeper.tried.wait()
        if all(keeper.standing is not Standing.MEMBER for keeper in begun):
            raise EngineError("; ".join(dict.fromkeys(keeper.reason for keeper in begun)))
        for keeper in begun:
            keeper.promised_tokens = self.dispatcher.fleet.context_tokens

    async def add(self, source: Source) -> None:
        """Take in one more; EngineError, and nothing has changed, when it does not join."""
        if source.id in self._keepers:
            raise ConfigError(f"engine {source.id} is there already; give another id, or remove it first")
        keeper = self._begin(source, promised_tokens=self.dispatcher.fleet.context_tokens)
        await keeper.tried.wait()
        if keeper.standing is not Standing.MEMBER:
            await self.remove(source.id, within_s=0)
            raise EngineError(keeper.reason or f"engine {source.id}: its job was over before it had joined")

    async def remove(self, engine_id: EngineId, *, within_s: float) -> None:
        """Let it go; what decodes there may end within the deadline, and goes on elsewhere if it does not."""
        keeper = self._keepers.get(engine_id)
        if keeper is None:
            raise ConfigError(f"engine {engine_id} is not there; {_known(self._keepers)}")
        serving = [k for k in self._keepers.values() if k.standing is Standing.MEMBER]
        if serving == [keeper]:
            raise ConfigError(f"engine {engine_id} is the last that serves; add another one first")
        await keeper.dismiss(within_s=within_s)
        self._keepers.pop(engine_id, None)

    def _begin(self, source: Source, *, promised_tokens: int) -> Keeper:
        keeper = Keeper(source, self.dispatcher, self._needs)
        keeper.promised_tokens = promised_tokens
        self._keepers[source.id] = keeper
        self._running.start_soon(self._keep, keeper)
        return keeper

    async def _keep(self, keeper: Keeper) -> None:
        await keeper.run()
        if all(other.over.is_set() for other in self._keepers.values()):
            self.dispatcher.give_up(f"no engine is left; {keeper.reason}")


@asynccontextmanager
async def open_crew(needs: Requirements) -> AsyncGenerator[Crew]:
    """Keep engines while the block runs.  The dispatcher is opened and closed within it.

    So what the dispatcher still asks of an engine is answered, whatever ends the block.
    """
    async with anyio.create_task_group() as running:
        crew = Crew(needs, running)
        try:
            yield crew
        finally:
            for keeper in crew.keepers:
                keeper.close()


def _known(keepers: dict[EngineId, Keeper]) -> str:
    return f"there are {', '.join(sorted(keepers))}" if keepers else "there is none"
