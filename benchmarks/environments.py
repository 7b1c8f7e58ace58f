"""Storerooms that make something hard: text that looks like control tokens, tools that take their time."""

import anyio

from sostenuto.envs.storeroom.environment import Storeroom
from sostenuto.envs.storeroom.world import StoreroomTask
from sostenuto.tools.decorator import tool


class MarkedStoreroom(Storeroom):
    """Ends everything a tool says, and one question in four, with the text of a control token.

    Each time with the next one.  Not every question: a model that never saw such a thing often gives up.
    """

    def __init__(self, marks: list[str]) -> None:
        self._marks = marks
        self._said = 0

    async def reset(self, task: StoreroomTask) -> str:
        """The question, marked or not."""
        question = await super().reset(task)
        return question if self.seed % 4 else self._mark(question)

    async def _show(self, command: str, if_empty: str) -> str:
        return self._mark(await super()._show(command, if_empty))

    def _mark(self, text: str) -> str:
        self._said += 1
        return text + self._marks[(self.seed + self._said) % len(self._marks)]


class SlowStoreroom(Storeroom):
    """Takes `wait_s` to find a file, without using the processor."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    @tool(timeout_s=60)
    async def find(self, word: str) -> str:
        """Name the file that has a word."""
        await anyio.sleep(self._wait_s)
        return await super().find(word)
