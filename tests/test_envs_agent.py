"""What `agent` makes of a function, and what it refuses."""

from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

import sostenuto as so
from fakes_agents import Riddle, in_a_thread, two_turns, with_sandbox
from hosts import with_pool
from sostenuto.envs.agent import Agent
from sostenuto.envs.declaration import author_file, declaration
from sostenuto.envs.pool import WorkerPool
from sostenuto.envs.registry import environment_ref, load_environment
from sostenuto.errors import ConfigError, EnvironmentFailure
from sostenuto.tools.wire import PrepareRequest, RewardRequest
from sostenuto.types import Episode, ModelAccess, ProgramId, StopReason


async def plain(task: Riddle, *, base_url: str, api_key: str) -> float:
    del task
    return float(base_url == "http://gateway/v1" and api_key == "so-1")


def shown(task: Riddle, rng: Random) -> list[so.Message]:
    return [so.Message("user", task.question), so.Message("assistant", str(rng.random()))]


def test_a_decorated_function_is_an_environment_that_travels_by_its_import_path():
    ref = environment_ref(two_turns)
    assert (ref.name, ref.import_path, ref.pickled) == ("two_turns", "fakes_agents:two_turns", None)
    declared = declaration(load_environment(ref).cls)
    assert declared.task_type is Riddle
    assert declared.tools == {}
    assert declared.blueprint() is None
    assert issubclass(two_turns, Agent)
    assert two_turns.__doc__ == "Ask, and ask whether it is sure."
    assert author_file(two_turns).name == "fakes_agents.py"


def test_a_function_that_is_passed_to_it_stays_a_function_and_travels_by_value():
    made = so.agent(plain, demonstrate=shown)
    ref = environment_ref(made)
    assert ref.import_path is None
    loaded = load_environment(ref).cls
    assert declaration(loaded).task_type.__name__ == "Riddle"
    assert author_file(loaded) == Path(__file__)
    assert made.demonstrate(Riddle(question="?"), Random(1))[0].content == "?"


def test_a_plain_function_blocks_and_an_async_one_does_not():
    assert "reward" in declaration(in_a_thread).blocking()
    assert "reward" not in declaration(two_turns).blocking()


def test_a_declared_sandbox_is_that_of_its_programs():
    assert declaration(with_sandbox).blueprint() is not None
    assert environment_ref(with_sandbox).memory_bytes == so.SandboxSpec().memory_bytes


def test_an_agent_is_the_env_of_a_job_and_no_other_environment_is_an_agent(tmp_path: Path):
    class Other(so.Environment[Riddle]):
        def reset(self, task: Riddle) -> str:
            return task.question

        def reward(self, episode: Episode) -> float:
            return float(bool(episode.answer))

    tasks = [Riddle(question="?")]
    assert so.EvalJob(env=two_turns, model=tmp_path, tasks=tasks).agents
    assert not so.EvalJob(env=Other, model=tmp_path, tasks=tasks).agents


@with_pool
async def test_the_host_calls_it_with_what_it_is_to_be_given(pool: WorkerPool):
    ref = environment_ref(so.agent(plain))
    host, program = await pool.choose(ref), ProgramId("p")
    await host.prepare(
        program, PrepareRequest(owner="o", environment=ref, task={"question": "?"}, seed=1), None
    )
    episode = Episode((), StopReason.ANSWERED, model=ModelAccess("http://gateway/v1", "so-1"))
    assert (await host.reward(program, RewardRequest(call_id="run", episode=episode))).value == 1.0
    no_model = RewardRequest(call_id="again", episode=Episode((), StopReason.ANSWERED))
    with pytest.raises(EnvironmentFailure, match="was given no model; run it as the env of a job"):
        await host.reward(program, no_model)
    await host.release(program)


def test_a_key_is_not_shown():
    assert "so-1" not in repr(
        Episode((), StopReason.ANSWERED, model=ModelAccess("http://gateway/v1", "so-1"))
    )


async def no_task(*, base_url: str, api_key: str) -> float: ...
async def untyped(task, *, base_url: str, api_key: str) -> float: ...  # noqa: ANN001  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]
async def text_task(task: str, *, base_url: str, api_key: str) -> float: ...
async def keyless(task: Riddle, *, base_url: str) -> float: ...
async def urlless(task: Riddle, *, api_key: str) -> float: ...
async def more(task: Riddle, *, base_url: str, api_key: str, model: str) -> float: ...
async def boxed(task: Riddle, *, base_url: str, api_key: str, sandbox: object) -> float: ...


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (no_task, "agent no_task takes no task; write `async def no_task"),
        (cast("object", untyped), "agent untyped: its task type is nothing; make it a pydantic model"),
        (text_task, "agent text_task: its task type is <class 'str'>"),
        (keyless, "agent keyless takes no 'api_key'"),
        (urlless, "agent urlless takes no 'base_url'"),
        (more, "agent more: nobody gives it 'model'"),
        (boxed, "agent boxed: it declares a sandbox and takes one, both or neither"),
        (print, "is no function; give one made with `def` or `async def`"),
        (Riddle, "is no function"),
    ],
)  # fmt: skip
def test_a_function_of_another_form_is_refused_with_the_remedy(run: Any, message: str):  # noqa: ANN401
    with pytest.raises(ConfigError) as told:
        so.agent(run)
    assert message in str(told.value)


def test_a_sandbox_that_nobody_takes_is_refused():
    with pytest.raises(ConfigError, match="both or neither"):
        so.agent(plain, sandbox=so.SandboxSpec())
