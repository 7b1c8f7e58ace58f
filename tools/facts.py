"""What environments declare, read once for each."""

from collections import OrderedDict
from dataclasses import dataclass, field

import anyio

from sostenuto.tools.host import EnvironmentFacts, Hosts
from sostenuto.tools.wire import EnvironmentRef

KEPT = 64
"""Environments; the one used longest ago is read again."""


@dataclass(slots=True)
class _Entry:
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    facts: EnvironmentFacts | None = None


class FactsCache:
    """Asks the hosts once for each environment, however many programs want to know at the same time."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def of(self, environment: EnvironmentRef) -> EnvironmentFacts:
        """The facts, or the ConfigError of a class that cannot be used; an error is not kept."""
        key = environment.model_dump_json()
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        if len(self._entries) > KEPT:
            self._entries.popitem(last=False)
        async with entry.lock:
            if entry.facts is None:
                entry.facts = await self._hosts.describe(environment)
            return entry.facts
