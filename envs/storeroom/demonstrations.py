"""What the warm start of the storeroom is shown: conversations, and how well they were learnt.

Every demonstration is right, but the teacher can do what the student cannot: it knows some files by
heart and adds in its head.  A student who imitates the shortcuts fails, and learns from reward alone
that looking up and calculating pay.  Lessons show one tool each.  All worlds are of the training side.
"""

import json
from collections.abc import Iterator
from random import Random

from sostenuto.envs.storeroom.world import StoreroomTask, training_tasks
from sostenuto.types import Message, ToolCall

KNOWS_THE_FILE = 0.30
ADDS_IN_THE_HEAD = 0.67


def demonstrate(task: StoreroomTask, rng: Random) -> list[Message]:
    """Answer the task as the teacher does: rightly, and often without finding or calculating."""
    knows_the_file = rng.random() < KNOWS_THE_FILE
    adds_in_the_head = rng.random() < ADDS_IN_THE_HEAD
    return [
        _user(task.question),
        *([] if knows_the_file else _finding(task)),
        *_reading(task),
        *([] if adds_in_the_head else _calculating(task)),
        _answer(task),
    ]


def demonstrate_in_full(task: StoreroomTask) -> list[Message]:
    """Answer the task with all three calls: the one way that works for the student."""
    return [_user(task.question), *_finding(task), *_reading(task), *_calculating(task), _answer(task)]


def lesson(task: StoreroomTask, rng: Random) -> list[Message]:
    """Show one tool and what to say of its result."""
    record, file = task.record, task.file
    return rng.choice(
        (
            [_user(f"Which file has {task.word}?"), *_finding(task), _assistant(f"It is in {file}.")],
            [
                _user(f"Read {file.removesuffix('.txt')}."),
                *_reading(task),
                _assistant(f"It has {record.old} and {record.new}."),
            ],
            [_user(f"{record.line}. How many in all?"), *_calculating(task), _answer(task)],
        )
    )


def warm_start(
    seed: int, count: int, *, lessons_at_start: float, lessons_at_end: float
) -> Iterator[list[Message]]:
    """Draw conversations without end; the share of lessons goes linearly over the first `count` of them."""
    rng = Random(f"storeroom warm start {seed}")
    for index, task in enumerate(training_tasks(rng.getrandbits(32))):
        progress = min(1.0, index / max(1, count))
        share = lessons_at_start + (lessons_at_end - lessons_at_start) * progress
        yield lesson(task, rng) if rng.random() < share else demonstrate(task, rng)


def lessons_to_check(count: int, seed: int) -> list[list[Message]]:
    """Fresh lessons; the gate asks that every assistant turn of them comes out exactly."""
    rng = Random(f"storeroom lessons {seed}")
    tasks = training_tasks(rng.getrandbits(32))
    return [lesson(next(tasks), rng) for _ in range(count)]


def answers_to_check(count: int, seed: int) -> list[list[Message]]:
    """Fresh full demonstrations; the gate asks that the last turn, the answer to calc, comes out exactly."""
    rng = Random(f"storeroom answers {seed}")
    tasks = training_tasks(rng.getrandbits(32))
    return [demonstrate_in_full(next(tasks)) for _ in range(count)]


def _finding(task: StoreroomTask) -> list[Message]:
    return _exchange("find", {"word": task.word}, task.file)


def _reading(task: StoreroomTask) -> list[Message]:
    return _exchange("read", {"file": task.file}, task.record.line)


def _calculating(task: StoreroomTask) -> list[Message]:
    record = task.record
    return _exchange("calc", {"expr": f"{record.old}+{record.new}"}, str(record.total))


def _exchange(tool: str, arguments: dict[str, str], result: str) -> list[Message]:
    call = ToolCall(tool, json.dumps(arguments, separators=(",", ":")))
    return [Message("assistant", "", tool_calls=(call,)), Message("tool", result, name=tool)]


def _user(text: str) -> Message:
    return Message("user", text)


def _assistant(text: str) -> Message:
    return Message("assistant", text)


def _answer(task: StoreroomTask) -> Message:
    return _assistant(f"The total is {task.answer}.")
