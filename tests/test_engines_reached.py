"""Jobs on engines that run elsewhere: the fake servers, with a real trainer, tool server and runtime."""

from pathlib import Path

import pytest

from elsewhere import LIMITS, Serve, build_model, evaluating, sglang, until, vllm, with_other_weights
from fakes_sglang import FakeSGLang
from fakes_training import Parity, numbers
from sostenuto.records import Producer, Trajectory, validate
from sostenuto.runtime.config import RuntimeConfig
from sostenuto.runtime.jobs.events import StepTrained
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.runtime import JobCancelled, Runtime
from sostenuto.trainer.algorithms import GRPO
from sostenuto.types import Purpose, Version

each_kind = pytest.mark.parametrize("serve", [vllm, sglang])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_other_weights(model, tmp_path_factory.mktemp("models") / "other")


def training(model: Path, *, steps: int) -> RLJob:
    return RLJob(
        name="rl", env=Parity, model=model, tasks=numbers(64), steps=steps, groups_per_step=2,
        algorithm=GRPO(group_size=2, zero_spread="keep"), limits=LIMITS, save_every=10_000,
    )  # fmt: skip


def sampled_versions(trajectory: Trajectory) -> set[str]:
    return {
        str(version.version)
        for span in trajectory.spans()
        if span.producer is Producer.POLICY
        for version in span.versions
    }


@each_kind
async def test_a_job_trains_on_it_and_publishes_its_weights_to_it(
    tmp_path: Path, model: Path, other: Path, serve: Serve
):
    async with serve(other) as elsewhere:
        async with Runtime(RuntimeConfig(directory=tmp_path, engines=(elsewhere.entry(),))) as runtime:
            handle = await runtime.submit(training(model, steps=2))
            steps = [event async for event in handle.events() if isinstance(event, StepTrained)]
            result = await handle.result()
        assert [step.version for step in steps] == [Version(0, 1), Version(0, 2)]
        assert result.ledger.closes
        assert result.ledger.outcomes["trained"] == 8
        assert elsewhere.label == "0.2"
        with read_journal(tmp_path / "journal.db") as reader:
            records = list(reader.trajectories(purpose=Purpose.TRAIN))
        for record in records:
            validate(record)
            assert sampled_versions(record) <= {"0.0", "0.1", "0.2"}
        (published,) = (tmp_path / "weights" / f"{elsewhere.kind}-0").iterdir()
        assert published.name == "weights-0.2"
        assert elsewhere.weights == elsewhere.weights_in(published)


@pytest.mark.parametrize(("serve", "label"), [(vllm, "0.0"), (sglang, "mine")])
async def test_what_a_server_says_of_its_weights_is_not_believed_but_replaced(
    tmp_path: Path, model: Path, other: Path, serve: Serve, label: str
):
    async with serve(other, version=label) as elsewhere:
        if isinstance(elsewhere.fake, FakeSGLang):
            elsewhere.fake.start_again()
        assert elsewhere.label == label
        config = RuntimeConfig(directory=tmp_path / "run", engines=(elsewhere.entry(weights=tmp_path / "w"),))
        async with Runtime(config) as runtime:
            handle = await runtime.submit(evaluating(model))
            result = await handle.result()
        assert result.ledger.outcomes == {"evaluated": 8}
        assert elsewhere.label == "0.0"
        assert elsewhere.weights == elsewhere.weights_in(model)
        (given,) = (tmp_path / "w").glob("*/weights-*")
        assert (given / "model.safetensors").samefile(model / "model.safetensors")


@pytest.mark.parametrize(("serve", "label"), [(vllm, "default"), (sglang, "0.0")])
async def test_a_server_that_others_start_anew_gets_the_weights_before_it_samples_again(
    tmp_path: Path, model: Path, other: Path, serve: Serve, label: str
):
    async with serve(other, version=label) as elsewhere:
        config = RuntimeConfig(directory=tmp_path, engines=(elsewhere.entry(id="far"),))
        async with Runtime(config) as runtime:
            handle = await runtime.submit(evaluating(model, programs=400))
            name = f"{handle.name}-far"
            await until(runtime, lambda views: views[name].token_s is not None)
            elsewhere.fake.start_again()
            assert elsewhere.weights == elsewhere.weights_in(other)
            await until(runtime, lambda views: views[name].restarts == 1)
            before = elsewhere.samples
            views = await until(runtime, lambda views: views[name].state == "serving")
            assert elsewhere.weights == elsewhere.weights_in(model)
            await until(runtime, lambda _: elsewhere.samples > before)
            handle.cancel()
            with pytest.raises(JobCancelled):
                await handle.result()
            assert runtime.ledger.closes
        assert views[name].url == elsewhere.url
        assert not [outcome for outcome in runtime.ledger.outcomes if outcome.startswith("failed")]
