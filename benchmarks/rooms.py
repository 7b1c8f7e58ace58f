"""The storeroom with questions of two domains: what there is in all, and of what parts."""

import re
from random import Random
from typing import Literal, cast

from sostenuto.envs.environment import Environment
from sostenuto.envs.storeroom.demonstrations import demonstrate
from sostenuto.envs.storeroom.environment import Storeroom
from sostenuto.envs.storeroom.world import StoreroomTask
from sostenuto.types import Episode, Message, StopReason, ToolCall

Domain = Literal["total", "parts"]
DOMAINS: tuple[Domain, ...] = ("total", "parts")

_KNOWS_THE_FILE = 0.5


class RoomTask(StoreroomTask):
    """A world, and what is asked of one of its records."""

    domain: Domain

    @property
    def question(self) -> str:
        return super().question if self.domain == "total" else f"What has {self.word}?"


# Its tasks are also tasks of a storeroom, which the type of a base class cannot say.
class Rooms(Storeroom, Environment[RoomTask]):  # pyright: ignore[reportGeneralTypeIssues]
    """Totals have to be calculated; their parts stand in the record."""

    async def reward(self, episode: Episode) -> float:
        """1 for the right number or the right two, else 0."""
        task = cast("RoomTask", self.task)
        if task.domain == "total":
            return await super().reward(episode)
        wanted = [str(task.record.old), str(task.record.new)]
        answered = episode.stop_reason is StopReason.ANSWERED
        return float(answered and re.findall(r"-?[0-9]+", episode.answer) == wanted)

    @classmethod
    def demonstrate(cls, task: StoreroomTask, rng: Random) -> list[Message]:
        """Right, with shortcuts that the student cannot take."""
        if cast("RoomTask", task).domain == "total":
            return demonstrate(task, rng)
        calls = [] if rng.random() < _KNOWS_THE_FILE else [_call("find", "word", task.word, task.file)]
        calls.append(_call("read", "file", task.file, task.record.line))
        shown = [message for exchange in calls for message in exchange]
        said = f"It has {task.record.old} and {task.record.new}."
        return [Message("user", task.question), *shown, Message("assistant", said)]


def room_tasks(tasks: list[StoreroomTask], domain: Domain) -> list[RoomTask]:
    """The same worlds with the questions of a domain."""
    return [RoomTask(word=task.word, files=task.files, domain=domain) for task in tasks]


def _call(tool: str, argument: str, value: str, result: str) -> tuple[Message, Message]:
    call = ToolCall(tool, f'{{"{argument}":"{value}"}}')
    return Message("assistant", "", tool_calls=(call,)), Message("tool", result, name=tool)
