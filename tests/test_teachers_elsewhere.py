"""Whole jobs whose teachers and reward models are vLLM and SGLang servers (fake ones, real wire)."""

import json
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from tokenizers import Tokenizer

import fakes_sglang
import fakes_sglang_core
import fakes_vllm_model
from elsewhere import LIMITS, Elsewhere, Serve, build_model, vllm, with_other_weights
from fakes_sglang import FakeSGLang
from fakes_training import Parity, numbers
from real_jobs import train
from sostenuto.errors import SostenutoError
from sostenuto.records import Trajectory, validate
from sostenuto.runtime.config import RuntimeConfig, ToolServerSettings
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.reward_model import RewardModel
from sostenuto.runtime.jobs.teacher import Teacher
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.algorithms import GRPO, OPD, Algorithm
from sostenuto.trainer.parts import Teaching


@asynccontextmanager
async def sglang(folder: Path) -> AsyncGenerator[Elsewhere]:
    """It has to be told what its weights are called."""
    fake = FakeSGLang(folder, version="0.0")
    async with fakes_sglang.serve(fake) as url:
        yield Elsewhere("sglang", url, fake)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def teacher(student: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_other_weights(student, tmp_path_factory.mktemp("teacher") / "model")


def row(there: Elsewhere, folder: Path, context: list[int]) -> np.ndarray:
    """What the server finds likely after it."""
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    if there.kind == "vllm":
        return fakes_vllm_model.logprobs_after(there.weights, context[-1], size=size)
    return fakes_sglang_core.log_softmax(fakes_sglang_core.logits(there.weights, context, size))


def a_job(student: Path, algorithm: Algorithm, **more: object) -> RLJob:
    return RLJob(
        env=Parity, model=student, tasks=numbers(8), steps=1, groups_per_step=2, limits=LIMITS, seed=1,
        algorithm=algorithm, **more,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def assert_taught(record: Trajectory, there: Elsewhere, folder: Path, top_k: int) -> int:
    """What was said of each token is what the server finds in the student's own context; how many."""
    told = 0
    for sequence, taught in zip(record.sequences, record.taught, strict=True):
        ids = np.concatenate([span.token_ids for span in sequence]).tolist()
        mask = np.concatenate([span.mask for span in sequence])
        if taught is None:
            assert not mask.any()
            continue
        assert np.isfinite(taught.logprobs).tolist() == mask.tolist()
        for place in np.flatnonzero(mask).tolist():
            wanted = row(there, folder, ids[:place])
            assert taught.logprobs[place] == pytest.approx(wanted[ids[place]], abs=1e-4)
            told += 1
            if not top_k:
                continue
            assert taught.top_ids is not None
            assert taught.top_logprobs is not None
            best = np.argsort(-wanted)[:top_k]
            assert taught.top_ids[place].tolist() == best.tolist()
            np.testing.assert_allclose(taught.top_logprobs[place], wanted[best], atol=1e-4)
    return told


@pytest.mark.parametrize(("serve", "top_k"), [(vllm, 3), (sglang, 3), (sglang, None)])
async def test_a_student_is_taught_by_a_server_that_runs_already(
    tmp_path: Path, student: Path, teacher: Path, serve: Serve, top_k: int | None
):
    teaching = Teaching(signal="distribution", top_k=top_k) if top_k else Teaching()
    async with serve(teacher) as there:
        master = Teacher(model=teacher, place="engine", engine=there.entry())
        job = a_job(student, OPD(group_size=2, teaching=teaching), teachers=(master,))
        steps, records = await train(tmp_path, job)
        records = [record for record in records if record.reward is not None]
        assert len(records) >= 4
        for record in records:
            validate(record)
            assert {taught.version for taught in record.taught if taught} == {"0.0"}
            assert assert_taught(record, there, teacher, top_k or 0)
        # It was never given the student's weights.
        assert there.weights == there.weights_in(teacher)
    (step,) = steps
    assert step.report.teacher_kl is not None
    assert step.report.teacher_kl > 0.01
    assert step.report.grad_norm > 0


@pytest.mark.parametrize("serve", [sglang])
async def test_a_server_that_stops_to_answer_fails_programs_and_teaches_nothing_wrong(
    tmp_path: Path, student: Path, teacher: Path, serve: Serve
):
    async with serve(teacher) as there:
        master = Teacher(model=teacher, place="engine", engine=there.entry())

        route = "/generate" if there.kind == "sglang" else "/inference/v1/generate"

        async def broken(_request: web.Request) -> web.Response:
            return web.json_response({"error": {"message": "out of memory"}}, status=500)

        config = RuntimeConfig(directory=tmp_path, tool_server=ToolServerSettings(unsafe=True))
        async with Runtime(config) as runtime:
            job = a_job(student, OPD(group_size=2), teachers=(master,), refills=0)
            handle = await runtime.submit(job)
            async for event in handle.events():
                if type(event).__name__ == "JobStarted":
                    there.fake.broken[route] = broken
            with pytest.raises(SostenutoError, match="look at why their programs fail"):
                await handle.result()
            outcomes = runtime.ledger.outcomes
        assert not any(name.startswith("trained") for name in outcomes)
        failed = {name for name in outcomes if name.startswith("failed")}
        assert failed
        assert all(name.startswith("failed(infrastructure, teacher teacher: ") for name in failed)


@pytest.mark.parametrize("serve", [vllm])
async def test_a_server_that_runs_already_says_how_good_an_answer_is(
    tmp_path: Path, student: Path, teacher: Path, serve: Serve
):
    tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    yes, no = (tokenizer.encode(text, add_special_tokens=False).ids for text in (" yes", " no"))
    async with serve(teacher) as there:
        fair = RewardModel(
            name="fair", model=teacher, kind="likelihood", template="Task $task_number. Fair?", chat=False,
            label=" yes", against=(" no",), weight=2.0, engine=there.entry(),
        )  # fmt: skip
        job = a_job(student, GRPO(group_size=2, zero_spread="keep"), reward_models=(fair,))
        _, records = await train(tmp_path, job)
        records = [record for record in records if record.reward is not None]
        assert len(records) >= 4
        wanted: set[float] = set()
        for number in range(8):
            before = tokenizer.encode(f"Task {number}. Fair?").ids
            found: list[float] = []
            for label in (yes, no):
                context, total = list(before), 0.0
                for token in label:
                    total += row(there, teacher, context)[token]
                    context.append(token)
                found.append(total)
            wanted.add(round(1 / (1 + math.exp(found[1] - found[0])), 4))
    for record in records:
        score = record.metrics["fair"]
        assert min(abs(score - known) for known in wanted) < 2e-4
        assert record.reward == pytest.approx(record.metrics["environment_reward"] + 2.0 * score)
