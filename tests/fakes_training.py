"""An environment whose reward a model without any skill meets half of the time; workers import it by name."""

from pydantic import BaseModel

from sostenuto.envs.environment import Environment
from sostenuto.envs.later import Later, later
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.tools.decorator import tool
from sostenuto.types import Episode


class Number(BaseModel):
    number: int


class Parity(Environment[Number]):
    """Say something of even length."""

    sandbox = SandboxSpec()

    async def reset(self, task: Number) -> str:
        await self.sandbox.write("number", str(task.number))
        return f"Say something about {task.number}."

    @tool
    async def look(self) -> str:
        """Look at the number."""
        return await self.sandbox.read("number")

    async def reward(self, episode: Episode) -> float:
        assert await self.sandbox.read("number") == str(self.task.number)
        return float(len(episode.answer) % 2 == 0)


class ParityByTurn(Environment[Number]):
    """Each turn earns its place, and the last one what it says."""

    async def reset(self, task: Number) -> str:
        return f"Say something about {task.number}."

    @tool
    async def look(self) -> str:
        """Look at the number."""
        return str(self.task.number)

    async def reward(self, episode: Episode) -> dict[str, list[float]]:
        last = float(len(episode.answer) % 2 == 0)
        return {"turns": [float(turn) for turn in range(episode.turns - 1)] + [last]}


class ParityLater(Parity):
    """Somebody else says what it earns."""

    async def reward(self, episode: Episode) -> Later:  # pyright: ignore[reportIncompatibleMethodOverride]
        return later(length=float(len(episode.answer)))


def numbers(count: int) -> list[Number]:
    return [Number(number=number) for number in range(count)]
