"""Worlds and demonstrations: two sides that never meet, teachers that are always right."""

import json
from itertools import islice, pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from sostenuto.envs.storeroom import held_out_tasks, training_tasks
from sostenuto.envs.storeroom.demonstrations import (
    answers_to_check,
    demonstrate,
    demonstrate_in_full,
    lessons_to_check,
    warm_start,
)
from sostenuto.envs.storeroom.world import NOUNS, PLACES, Record, StoreroomTask
from sostenuto.types import Message

SEEDS = st.integers(0, 2**32)


@given(training_seed=SEEDS, held_out_seed=SEEDS)
def test_no_record_of_a_held_out_world_is_ever_in_a_training_world(training_seed: int, held_out_seed: int):
    training = list(islice(training_tasks(training_seed), 5))
    held_out = held_out_tasks(5, held_out_seed)
    assert not any(record.is_held_out for task in training for record in task.files.values())
    assert all(record.is_held_out for task in held_out for record in task.files.values())


def test_the_side_of_a_record_is_the_same_on_every_machine():
    sides = [Record(word="plum", old=old, new=23).is_held_out for old in range(2, 18)]
    assert [old for old, side in zip(range(2, 18), sides, strict=True) if side] == [4, 5, 10, 13, 14]


def test_about_one_record_in_eight_is_held_out():
    records = [Record(word=w, old=a, new=b) for w in NOUNS[:8] for a in range(2, 50) for b in range(2, 50)]
    assert 0.10 < sum(record.is_held_out for record in records) / len(records) < 0.15


@given(seed=SEEDS)
def test_equal_seeds_give_equal_tasks(seed: int):
    assert list(islice(training_tasks(seed), 3)) == list(islice(training_tasks(seed), 3))
    assert held_out_tasks(3, seed) == held_out_tasks(3, seed)


def test_two_hundred_held_out_tasks_are_all_different():
    tasks = held_out_tasks(200, seed=0)
    assert len({task.model_dump_json() for task in tasks}) == 200
    assert held_out_tasks(200, seed=1) != tasks


def test_words_and_places_are_distinct():
    assert len({*NOUNS, *PLACES}) == 64 + 20


def replay(task: StoreroomTask, messages: list[Message]) -> str:
    """Check every tool result of a demonstration against the world, and return its last answer."""
    for message, result in pairwise(messages):
        for call in message.tool_calls:
            arguments = json.loads(call.arguments)
            assert result.name == call.name
            assert result.content == answer_of(task, call.name, arguments)
    return messages[-1].content


def answer_of(task: StoreroomTask, tool: str, arguments: dict[str, str]) -> str:
    match tool:
        case "find":
            return next(name for name, record in task.files.items() if record.word == arguments["word"])
        case "read":
            return task.files[arguments["file"]].line
        case _:
            return str(sum(map(int, arguments["expr"].split("+"))))


@given(seed=SEEDS)
def test_every_demonstration_is_right(seed: int):
    task = next(training_tasks(seed))
    for messages in (demonstrate(task, Random(seed)), demonstrate_in_full(task)):
        assert replay(task, messages) == f"The total is {task.answer}."


def calls(messages: list[Message]) -> list[str]:
    return [call.name for message in messages for call in message.tool_calls]


def test_the_teacher_skips_find_in_a_third_and_calc_in_two_thirds():
    rng = Random(1)
    shown = [calls(demonstrate(task, rng)) for task in islice(training_tasks(1), 4000)]
    assert abs(sum("find" in names for names in shown) / 4000 - 0.70) < 0.03
    assert abs(sum("calc" in names for names in shown) / 4000 - 0.33) < 0.03
    assert all("read" in names for names in shown)


def test_the_share_of_lessons_falls_from_its_start_to_its_end_and_stays_there():
    shown = list(islice(warm_start(3, 4000, lessons_at_start=0.9, lessons_at_end=0.4), 6000))
    is_lesson = [not messages[0].content.startswith("How many") for messages in shown]
    assert sum(is_lesson[:400]) / 400 > 0.8
    assert abs(sum(is_lesson[4000:]) / 2000 - 0.4) < 0.05
    again = warm_start(3, 4000, lessons_at_start=0.9, lessons_at_end=0.4)
    assert shown[:50] == list(islice(again, 50))


def test_what_the_gate_checks_is_single_calls_and_answers_to_calc():
    assert all(len(calls(messages)) == 1 for messages in lessons_to_check(50, seed=1))
    assert {name for messages in lessons_to_check(50, seed=1) for name in calls(messages)} == {
        "find", "read", "calc",
    }  # fmt: skip
    for messages in answers_to_check(20, seed=1):
        assert calls(messages) == ["find", "read", "calc"]
        assert messages[-1].content == f"The total is {messages[-2].content}."
