"""A whole job whose engine has a draft model that learns along."""

import subprocess
import sys
from pathlib import Path

import pytest

from fakes_training import Parity, numbers
from scripted import TINY, children, write_tokenizer_folder
from sostenuto.runtime.config import EngineSettings, RuntimeConfig
from sostenuto.runtime.engine_view import EngineView
from sostenuto.runtime.jobs.events import StepTrained
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.quickstart.recipe import ModelShape
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.algorithms import GRPO
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.types import Limits, Version
from test_engines_several import until

TEACHING = LearnerSettings(draft_learning_rate=1e-2)
SHALLOW = TINY.model_copy(update={"layers": 1, "hidden": 16, "feed_forward": 16})
LIMITS = Limits(turns=1, turn_tokens=10)


def built(folder: Path, shape: ModelShape, seed: int) -> Path:
    write_tokenizer_folder(folder, shape)
    command = [sys.executable, "-m", "sostenuto.trainer.build", "--folder", str(folder), "--seed", str(seed)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


async def test_a_job_teaches_the_draft_model_and_swaps_it_with_each_version(tmp_path: Path):
    before = children()
    model, small = built(tmp_path / "model", TINY, 1), built(tmp_path / "small", SHALLOW, 2)
    engine = EngineSettings(speculation="draft", draft_model=small, draft_tokens=2)
    job = RLJob(
        name="rl", env=Parity, model=model, tasks=numbers(64), steps=10_000, groups_per_step=2,
        algorithm=GRPO(group_size=2, zero_spread="keep"), limits=LIMITS, save_every=10_000, learner=TEACHING,
    )  # fmt: skip
    async with Runtime(RuntimeConfig(directory=tmp_path / "run", engine=engine)) as runtime:
        handle = await runtime.submit(job)
        async for event in handle.events():
            if isinstance(event, StepTrained):
                assert event.report.draft_loss is not None
                if event.step == 3:
                    break
        (view,) = (await until(runtime, has_been_updated)).values()
        assert Version.parse(view.draft_version).number >= 2
        handle.cancel()
        with pytest.raises(Exception, match="was cancelled"):
            await handle.result()
    assert children() == before


def has_been_updated(views: dict[str, EngineView]) -> bool:
    """Whether guesses pay, and are made, is a matter of the machine; the drafter's version is not."""
    return any(view.draft_version not in {"", "0.0", "0.1"} for view in views.values())
