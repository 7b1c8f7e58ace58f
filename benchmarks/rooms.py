"""The storeroom with questions of two domains: what there is in all, and what there was before."""

from random import Random
from typing import Literal, cast

from sostenuto.envs.environment import Environment
from sostenuto.envs.storeroom.demonstrations import demonstrate
from sostenuto.envs.storeroom.environment import Storeroom
from sostenuto.envs.storeroom.world import StoreroomTask
from sostenuto.types import Message, ToolCall

Domain = Literal["total", "old"]
DOMAINS: tuple[Domain, ...] = ("total", "old")

_KNOWS_THE_FILE = 0.5


class RoomTask(StoreroomTask):
    """A world, and what is asked of one of its records."""

    domain: Domain

    @property
    def question(self) -> str:
        return super().question if self.domain == "total" else f"How many old {self.word}?"

    @property
    def answer(self) -> int:
        return self.record.total if self.domain == "total" else self.record.old


# Its tasks are also tasks of a storeroom, which the type of a base class cannot say.
class Rooms(Storeroom, Environment[RoomTask]):  # pyright: ignore[reportGeneralTypeIssues]
    """Totals have to be calculated; what is old stands in the record."""

    @classmethod
    def demonstrate(cls, task: StoreroomTask, rng: Random) -> list[Message]:
        """Right, with shortcuts that the student cannot take."""
        if cast("RoomTask", task).domain == "total":
            return demonstrate(task, rng)
        calls = [] if rng.random() < _KNOWS_THE_FILE else [_call("find", "word", task.word, task.file)]
        calls.append(_call("read", "file", task.file, task.record.line))
        shown = [message for exchange in calls for message in exchange]
        return [Message("user", task.question), *shown, Message("assistant", f"The total is {task.answer}.")]


def room_tasks(tasks: list[StoreroomTask], domain: Domain) -> list[RoomTask]:
    """The same worlds with the questions of a domain."""
    return [RoomTask(word=task.word, files=task.files, domain=domain) for task in tasks]


def _call(tool: str, argument: str, value: str, result: str) -> tuple[Message, Message]:
    call = ToolCall(tool, f'{{"{argument}":"{value}"}}')
    return Message("assistant", "", tool_calls=(call,)), Message("tool", result, name=tool)
