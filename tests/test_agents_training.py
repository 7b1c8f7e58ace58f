"""A whole job on an agent function, with a tiny real model: engine, trainer, tool server, gateway."""

from pathlib import Path
from random import Random
from runpy import run_path

import pytest

from fakes_agents import questions, says_something_even
from real_jobs import build_weights
from scripted import TINY, children, write_tokenizer_folder
from sostenuto.envs.registry import environment_ref, load_environment
from sostenuto.envs.task import task_id
from sostenuto.records import Producer, Trajectory, validate
from sostenuto.runtime.config import RuntimeConfig, ToolServerSettings
from sostenuto.runtime.jobs.events import JobEvent, StepTrained
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.algorithms import GRPO
from sostenuto.types import Limits, Purpose, Version


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer_folder(tmp_path_factory.mktemp("model"), TINY)
    return build_weights(folder)


async def test_a_job_trains_through_an_agent_function(tmp_path: Path, model: Path):
    before = children()
    job = RLJob(
        name="agents", env=says_something_even, model=model, tasks=questions(16), eval_tasks=questions(2),
        steps=2, groups_per_step=2, algorithm=GRPO(group_size=4, zero_spread="keep"), seed=1,
        limits=Limits(turns=2, turn_tokens=6),
    )  # fmt: skip
    config = RuntimeConfig(directory=tmp_path, tool_server=ToolServerSettings(unsafe=True))
    async with Runtime(config) as runtime:
        handle = await runtime.submit(job)
        told = [event async for event in handle.events()]
        result = await handle.result()
    assert children() == before
    assert (result.steps, result.version) == (2, Version(0, 2))
    assert result.ledger.closes
    assert (result.ledger.running, result.ledger.sealed) == (0, 0)
    assert result.ledger.outcomes["trained"] == 16
    assert result.ledger.outcomes["evaluated"] == 8
    assert result.checkpoint is not None
    weights = "model.safetensors"
    assert (result.checkpoint / weights).read_bytes() != (model / weights).read_bytes()
    _assert_the_trainer_saw_what_was_sampled(told)
    with read_journal(tmp_path / "journal.db") as reader:
        assert reader.ledger().statistics().closes
        _assert_records(list(reader.trajectories(purpose=Purpose.TRAIN)))


def test_the_agent_of_the_example_travels_and_is_tested_on_what_it_never_saw():
    example = run_path(str(Path(__file__).parents[1] / "examples" / "agent_function.py"))
    assert load_environment(environment_ref(example["larger"])).cls.__name__ == "larger"
    training, held_out = example["tasks"]()
    assert not {task_id(task) for task in training} & {task_id(task) for task in held_out}
    conversations = [example["demonstrate"](task, Random(1)) for task in training]
    assert {len(messages) for messages in conversations} == {2, 4}
    assert all(
        messages[-1].content == task.larger for task, messages in zip(training, conversations, strict=True)
    )


def _assert_the_trainer_saw_what_was_sampled(told: list[JobEvent]) -> None:
    """At equal weights, the trainer finds the log-probabilities that the engine gave to the gateway."""
    first = next(event for event in told if isinstance(event, StepTrained))
    assert first.report.max_abs_dlogp is not None
    assert first.report.max_abs_dlogp < 1e-4


def _assert_records(trained: list[Trajectory]) -> None:
    groups: dict[str, set[tuple[int, ...]]] = {}
    for trajectory in trained:
        validate(trajectory)
        assert trajectory.metrics["turns"] == 2
        assert trajectory.trained_tokens > 0
        sampled = [
            id_
            for span in trajectory.spans()
            if span.producer is Producer.POLICY
            for id_ in span.token_ids.tolist()
        ]
        assert len(sampled) == trajectory.trained_tokens
        groups.setdefault(trajectory.group_id, set()).add(tuple(sampled))
    # The seed that the agent asks with makes no member of a group the same as another.
    assert all(len(members) == 4 for members in groups.values())
