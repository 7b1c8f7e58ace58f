"""Sums: tasks, the Python tool in real sandboxes, reward and demonstrations."""

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes import ISOLATING, running
from sostenuto.envs.arithmetic import ChainSum, SumTask, held_out_tasks, training_tasks
from sostenuto.envs.arithmetic.demonstrations import USES_THE_TOOL
from sostenuto.envs.environment import bind
from sostenuto.envs.testing import Trial, so_test
from sostenuto.errors import ConfigError, SandboxError
from sostenuto.runtime.job_file import load_train_file
from sostenuto.types import Episode, Message, StopReason, ToolStatus

TASK = SumTask(question="What is 12 - 30 ?", expression="12 - 30", answer=-18)


def reward(answer: str, stop_reason: StopReason = StopReason.ANSWERED, task: SumTask = TASK) -> float:
    environment = ChainSum()
    bind(environment, task, 0, {}, None)
    return environment.reward(Episode((Message("assistant", answer),), stop_reason))


# ---- tasks ----


@pytest.fixture
def collection() -> None:
    pytest.importorskip("reasoning_gym")


@pytest.mark.usefixtures("collection")
def test_no_held_out_question_is_a_training_question_whatever_the_seeds():
    trained = {task.question for seed in range(3) for task in training_tasks(700, seed)}
    held_out = {task.question for seed in range(3) for task in held_out_tasks(100, seed)}
    assert not trained & held_out


@pytest.mark.usefixtures("collection")
def test_equal_seeds_give_equal_tasks_and_no_list_repeats_a_question():
    assert training_tasks(600, 4) == training_tasks(600, 4)
    assert training_tasks(600, 4) != training_tasks(600, 5)
    assert len({task.question for task in training_tasks(600, 4)}) == 600
    assert len({task.question for task in held_out_tasks(150, 4)}) == 150


@pytest.mark.usefixtures("collection")
def test_the_answer_is_what_the_expression_comes_to():
    for task in held_out_tasks(50, 2):
        terms = task.expression.replace("- ", "-").replace("+ ", "").split()
        assert sum(map(int, terms)) == task.answer
        assert task.expression in task.question


def test_fewer_than_one_task_is_refused():
    with pytest.raises(ConfigError, match="count"):
        training_tasks(0, 1)


def test_without_the_collection_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'sostenuto\[examples\]'"):
        training_tasks(1, 1)


# ---- the tool ----


@asynccontextmanager
async def trial_in(kind: str) -> AsyncGenerator[Trial]:
    async with (
        running(kind, ChainSum.sandbox.blueprint(Path())) as (sandbox, _),
        so_test(ChainSum, TASK, sandbox) as trial,
    ):
        yield trial


async def run(trial: Trial, code: str) -> str:
    result = await trial.call("python", {"code": code})
    assert result.status is ToolStatus.OK
    return result.content


@pytest.mark.parametrize("kind", ISOLATING)
async def test_code_shows_what_it_prints_and_its_last_value(kind: str):
    async with trial_in(kind) as trial:
        assert await run(trial, "12 - 30") == "-18"
        assert await run(trial, "x = 2\nprint(x)\nx + 1") == "2\n3"
        assert await run(trial, "x = 2") == "(no output)"
        assert await run(trial, "") == "(no output)"
        assert await run(trial, "print('\N{SNOWMAN}')") == "\N{SNOWMAN}"
        assert await trial.reward("The answer is -18.") == 1.0


@pytest.mark.parametrize("kind", ISOLATING)
async def test_what_is_wrong_with_code_is_an_observation(kind: str):
    async with trial_in(kind) as trial:
        lines = (await run(trial, "def f():\n    return 1 / 0\nf()")).splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[-2:] == ["ZeroDivisionError: division by zero", "[exit code 1]"]
        assert not [line for line in lines if "run.py" in line]
        assert "SyntaxError" in await run(trial, "12 +")
        assert "null bytes" in await run(trial, "1\0")
        assert "ModuleNotFoundError" in await run(trial, "import numpy")
        assert "[exit code 3]" in await run(trial, "raise SystemExit(3)")
        assert "SyntaxError" in await run(trial, "(" * 50_000)
        assert "RecursionError" in await run(trial, "def f(): f()\nf()")
        assert "MemoryError" in await run(trial, "'x' * (1 << 40)")


async def test_code_that_is_no_text_is_refused_and_code_cannot_reach_the_shell():
    async with trial_in("bubblewrap") as trial:
        refused = await trial.call("python", '{"code": "\\ud800"}')
        assert refused.status in {ToolStatus.INVALID_ARGUMENTS, ToolStatus.OK, ToolStatus.TOOL_ERROR}
        quoted = """'; echo leaked; '$(echo leaked)`echo leaked`"""
        assert "SyntaxError" in await run(trial, quoted)
        assert await run(trial, f"len({json.dumps(quoted)})") == str(len(quoted))


async def test_code_that_never_ends_is_ended_and_the_next_call_works():
    async with trial_in("bubblewrap") as trial:
        endless = await trial.call("python", {"code": "print('began', flush=True)\nwhile True: pass"})
        assert endless.status in {ToolStatus.OK, ToolStatus.TIMEOUT}
        assert "began" in endless.content
        assert await run(trial, "1 + 1") == "2"


async def test_a_sandbox_without_python_is_the_fault_of_the_infrastructure():
    blueprint = replace(ChainSum.sandbox.blueprint(Path()), environment={"PATH": "/nowhere"})
    async with running("bubblewrap", blueprint) as (sandbox, _):
        with pytest.raises(SandboxError, match="python3"):
            async with so_test(ChainSum, TASK, sandbox):
                pass


# ---- reward ----


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The answer is -18.", 1.0),
        ("-18", 1.0),
        ("-18.0", 1.0),
        ("The answer is 18.", 0.0),
        ("12 - 30 = -18", 0.0),
        ("-18.5", 0.0),
        ("", 0.0),
        ("The answer is minus eighteen.", 0.0),
    ],
)
def test_an_answer_counts_when_its_one_number_is_right(answer: str, expected: float):
    assert reward(answer) == expected


def test_commas_between_thousands_are_read():
    task = SumTask(question="q", expression="1 + 1233", answer=1234)
    assert reward("It is 1,234.", task=task) == 1.0


@pytest.mark.parametrize("reason", [reason for reason in StopReason if reason is not StopReason.ANSWERED])
def test_only_an_answer_that_was_given_counts(reason: StopReason):
    assert reward("-18", reason) == 0.0


@given(st.text())
def test_whatever_the_policy_writes_has_a_score(answer: str):
    assert reward(answer) in {0.0, 1.0}


# ---- demonstrations ----


def test_every_demonstration_is_right_and_few_use_the_tool():
    shown = [ChainSum.demonstrate(TASK, Random(seed)) for seed in range(1000)]
    assert all(reward(messages[-1].content) == 1.0 for messages in shown)
    with_tool = [messages for messages in shown if len(messages) == 4]
    assert abs(len(with_tool) / 1000 - USES_THE_TOOL) < 0.05


async def test_what_a_demonstration_shows_of_the_tool_is_what_the_tool_says():
    shown = next(m for m in (ChainSum.demonstrate(TASK, Random(seed)) for seed in range(100)) if len(m) == 4)
    async with trial_in("bubblewrap") as trial:
        result = await trial.call(shown[1].tool_calls[0].name, shown[1].tool_calls[0].arguments)
        assert result.content == shown[2].content


# ---- the example's job file ----


@pytest.mark.usefixtures("collection")
def test_the_example_trains_and_evaluates_on_different_questions():
    settings = load_train_file(Path(__file__).parent.parent / "examples" / "smollm2.toml")
    assert settings.eval_tasks is not None
    assert settings.environment_class() is ChainSum
    trained = {task.question for task in settings.tasks.load(ChainSum)}
    held_out = {task.question for task in settings.eval_tasks.load(ChainSum)}
    assert len(held_out) >= 100
    assert not trained & held_out
    assert settings.engine.dtype == settings.learner.dtype
