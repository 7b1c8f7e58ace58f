"""Command lines as agents, in sandboxes whose only network is the gateway."""

from pathlib import Path
from typing import Any

import pytest

import sostenuto as so
from agents import hosting
from fakes_agents import Riddle, answer_is_right, missing, script
from hosts import until
from scripted import says, specs_of, write_tokenizer_folder
from sostenuto.envs.declaration import author_file
from sostenuto.envs.registry import environment_ref
from sostenuto.errors import Blame, ConfigError, SostenutoError
from sostenuto.records import validate
from sostenuto.runtime.config import ToolServerSettings
from sostenuto.types import ProgramId


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("model"))


async def test_a_command_reaches_its_model_and_nothing_else_and_is_scored_by_what_it_left(
    tmp_path: Path, model: Path
):
    boxed = ToolServerSettings(sandbox="bubblewrap")
    task = Riddle(question="six; times $(seven)", answer="42")
    async with hosting(tmp_path / "run", model, lambda _: [says("42")], tools=boxed) as (stage, _):
        done = await stage.play([*specs_of(script, {"p": task}), *specs_of(missing, {"q": task})])
        assert done["p"].outcome is None
        assert done["p"].reward == 1.0
        assert done["p"].metrics["refused"] == 1.0
        validate(done["p"])
        (sequence,) = done["p"].sequences
        assert [i for span in sequence for i in span.token_ids] == stage.engine.contexts["p"]
        failed = done["q"].outcome
        assert failed is not None
        assert failed.blame is Blame.ENVIRONMENT
        assert "no-such-agent cannot be run in the sandbox: " in str(failed)
        with pytest.raises(SostenutoError, match="is there for agents alone; run it as the env of a job"):
            await stage.client.prepare(ProgramId("r"), environment_ref(script), task.model_dump())
        await until(lambda: not stage.engine.held)
        await stage.assert_nothing_is_held()


def test_what_a_command_leaves_out_of_its_description_is_found_out_at_once():
    assert script.__name__ == "python3"
    assert author_file(script).name == "fakes_agents.py"


@pytest.mark.parametrize(
    ("command", "reward", "message"),
    [
        ("mini -t x", answer_is_right, "command is 'mini -t x'; give a sequence of words"),
        ([], answer_is_right, "command is []"),
        (["mini", "{problem}"], answer_is_right, "names 'problem'; the fields of Riddle are question"),
        (["mini"], print, "give a function, and write `async def reward"),
        (["mini"], lambda: 0.0, "takes no task; write `async def reward"),
    ],
)  # fmt: skip
def test_a_command_that_cannot_run_is_refused_with_the_remedy(command: Any, reward: Any, message: str):  # noqa: ANN401
    with pytest.raises(ConfigError) as told:
        so.command_agent(command, reward=reward)
    assert message in str(told.value)
