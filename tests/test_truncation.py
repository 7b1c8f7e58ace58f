"""What leaves tokens out of the distribution: evaluations may ask for it, training may not."""

from dataclasses import replace
from pathlib import Path

import pytest

from fakes import FakeEngine, FakeRenderer, FakeTools, spec
from fakes_training import numbers
from sostenuto.errors import ConfigError
from sostenuto.runtime.dispatcher import open_dispatcher
from sostenuto.runtime.job_file import load_eval_file, load_train_file
from sostenuto.runtime.jobs.evaluate import Evaluation
from sostenuto.runtime.journal import open_journal
from sostenuto.runtime.ledger import Ledger
from sostenuto.runtime.rollouts import Rollouts
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.types import EngineId, Limits, Purpose, Truncation

FILE = """
directory = "runs/one"
environment = "chain_sum"
model = "models/mine"
tasks.factory = "module:function"
"""
CUTS = [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}]


@pytest.mark.parametrize("cut", CUTS)
def test_a_program_that_is_trained_refuses_it_by_field_and_remedy(cut: dict[str, float]):
    ((name, value),) = cut.items()
    evaluated = replace(spec("a", purpose=Purpose.EVALUATE), truncation=Truncation(**cut))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=rf"^truncation\.{name}: is {value}, .* the support is not in the"):
        replace(evaluated, purpose=Purpose.TRAIN)


@pytest.mark.parametrize("cut", CUTS)
def test_a_file_of_a_training_job_refuses_it_and_one_of_an_evaluation_takes_it(
    tmp_path: Path, cut: dict[str, float]
):
    ((name, value),) = cut.items()
    file = tmp_path / "job.toml"
    section = f"\n[truncation]\n{name} = {value}\n"
    file.write_text(f"{FILE}steps = 1\n{section}")
    with pytest.raises(ConfigError, match=rf"truncation\.{name}: .*leave it out, or set it in an evaluation"):
        load_train_file(file)
    file.write_text(FILE + section)
    assert getattr(load_eval_file(file).truncation, name) == value


@pytest.mark.parametrize("cut", [{"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"min_p": 2}])
def test_what_is_no_truncation_is_refused(cut: dict[str, float]):
    (name,) = cut
    with pytest.raises(ConfigError, match=f"truncation: {name} is .*; give top_p above 0"):
        Truncation(**cut)  # pyright: ignore[reportArgumentType]


@pytest.mark.looptime
async def test_an_evaluation_is_sampled_with_it_and_training_beside_it_is_not(tmp_path: Path):
    engine = FakeEngine()
    held_out = Evaluation(
        numbers(1), EnvironmentRef(name="fake", import_path="fake:Fake"), Limits(),
        seed=1, name="held-out", truncation=Truncation(top_p=0.9, top_k=20, min_p=0.05),
    )  # fmt: skip
    engines = {EngineId("e0"): engine}
    async with (
        open_journal(tmp_path / "journal.db") as journal,
        open_dispatcher(SchedulerSettings(), engines, FakeTools(), FakeRenderer()) as dispatcher,
    ):
        rollouts = Rollouts(dispatcher, Ledger(), journal)
        await rollouts.run(spec("training"))
        await held_out.run(rollouts, temperature=0.7, step=0, version=dispatcher.version)
    trained, evaluated = (request.sampling for request in engine.requests)
    assert not trained.truncates
    assert not trained.penalises
    assert (evaluated.top_p, evaluated.top_k, evaluated.min_p) == (0.9, 20, 0.05)
    assert evaluated.temperature == 0.7
