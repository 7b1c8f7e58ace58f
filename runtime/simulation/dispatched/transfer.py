"""How a simulated engine takes in versions, and what goes wrong with that."""

import random
from dataclasses import dataclass, field

import anyio

from sostenuto.errors import EngineError


@dataclass(slots=True)
class Transfer:
    """A version comes in chunks, which are checked one by one."""

    slowness: float = 1.0
    """Times what the engine's profile says."""
    chunks: int = 16
    fails: float = 0.0
    """The share of versions that come to grief: half of them at a random chunk, half in the swap."""
    seed: int = 0
    failures: int = 0
    _random: random.Random = field(init=False, repr=False)
    _tears: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    async def stage(self, version: str, stage_s: float) -> None:
        """EngineError at the chunk that is torn."""
        is_torn = self._random.random() < self.fails
        self._tears = is_torn and self._random.random() < 0.5
        last = self._random.randrange(self.chunks) if is_torn and not self._tears else self.chunks
        for chunk in range(self.chunks):
            await anyio.sleep(self.slowness * stage_s / self.chunks)
            if chunk == last:
                self.failures += 1
                raise EngineError(f"{version}: chunk {chunk} of {self.chunks} does not have its checksum")

    async def swap(self, version: str, swap_s: float) -> None:
        """What a slow engine takes beyond standing still; EngineError when it ends half way."""
        await anyio.sleep(max(0.0, self.slowness - 1.0) * swap_s)
        if self._tears:
            self.failures += 1
            raise EngineError(f"{version}: the swap ended half way")
