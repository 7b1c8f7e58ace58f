"""What a warm start is shown: every answer is right, but the teacher mostly calculates in the head.

A student that imitates this gets the form of both ways, and is wrong in its head; that the tool pays is
left for it to find out from reward.
"""

import json
from random import Random

from sostenuto.envs.arithmetic.tasks import SumTask
from sostenuto.types import Message, ToolCall

USES_THE_TOOL = 0.3


def demonstrate(task: SumTask, rng: Random) -> list[Message]:
    """Answer the task rightly, in one turn or with one call of the tool."""
    calls_the_tool = rng.random() < USES_THE_TOOL
    return [
        Message("user", task.question),
        *(_calculating(task) if calls_the_tool else []),
        Message("assistant", f"The answer is {task.answer}."),
    ]


def _calculating(task: SumTask) -> list[Message]:
    call = ToolCall("python", json.dumps({"code": task.expression}))
    return [Message("assistant", "", (call,)), Message("tool", str(task.answer), name="python")]
