"""One of several tool servers, and which of them a new program goes to."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeVar

import anyio

from sostenuto.errors import ToolServerError
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.wire import EnvironmentRef, Supply
from sostenuto.types import ProgramId

T = TypeVar("T")

_PROGRAMS_A_CPU = 8.0
"""With so many a processor counts as full: most of them wait for the model."""
_CLEARLY_FULLER = 0.25
"""Of what a server can take: so much more load outweighs layers that are there already."""


@dataclass(eq=False, slots=True)
class Place:
    """A server from the time it answers to its loss."""

    url: str
    client: ToolServerClient
    supply: Supply
    claims: dict[ProgramId, int] = field(default_factory=dict[ProgramId, int])
    """Bytes that the sandbox of each program here may take."""
    prepared: set[bytes] = field(default_factory=set[bytes])
    """Environments whose layers are there, or are being made."""
    avoided_until_s: float = 0.0
    lost: str = ""
    """Why it is gone."""
    asks: set[anyio.CancelScope] = field(default_factory=set[anyio.CancelScope])

    @property
    def load(self) -> float:
        """The larger share of what it can take: 1 is full."""
        memory = self.supply.sandbox_memory_bytes or self.supply.memory_bytes
        by_cpu = len(self.claims) / (self.supply.cpus * _PROGRAMS_A_CPU)
        return max(by_cpu, sum(self.claims.values()) / memory)

    async def ask(self, ask: Callable[[ToolServerClient], Awaitable[T]]) -> T:
        """The answer, or a ToolServerError as soon as the server is known to be gone."""
        if not self.lost:
            with anyio.CancelScope() as scope:
                self.asks.add(scope)
                try:
                    return await ask(self.client)
                finally:
                    self.asks.discard(scope)
        raise ToolServerError(f"tool server {self.url} was lost, with all programs on it: {self.lost}")

    def lose(self, why: str) -> None:
        """Fail what was asked of it and what is to come."""
        self.lost = why
        self.client.give_up(why)
        for scope in self.asks:
            scope.cancel()


def best(places: Sequence[Place], key: bytes, *, now_s: float) -> Place:
    """The least loaded; one where the layers are unless it is clearly fuller; one to avoid if all are."""
    able = [place for place in places if place.avoided_until_s <= now_s] or places
    least = min(place.load for place in able)
    with_layers = [p for p in able if key in p.prepared and p.load <= least + _CLEARLY_FULLER]
    return min(with_layers or able, key=lambda place: place.load)


def key_of(environment: EnvironmentRef) -> bytes:
    """Equal for environments that need the same layers."""
    content = environment.model_dump_json(exclude={"memory_bytes"})
    return blake2b(content.encode(), digest_size=16).digest()
