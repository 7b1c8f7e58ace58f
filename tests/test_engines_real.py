"""A job and programs of several turns on a real server of vLLM or SGLang, which `make test-vllm` and
`make test-sglang` start.

SOSTENUTO_REAL_ENGINE is a JSON object with `kind`, `url` and `model`, the folder that it serves.  Figures are
added to the file that SOSTENUTO_FIGURES names.
"""

import json
import os
import random
from pathlib import Path

import anyio
import numpy as np
import pytest
from benchmarks.engine_suites import SMALL, make_model
from benchmarks.figure import Figure

from fakes_training import Parity, numbers
from sostenuto.records import validate
from sostenuto.runtime.config import EngineEntry, RuntimeConfig
from sostenuto.runtime.engines.opened import Ground, source_of
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.wire import CommitRequest, GenerateRequest, Sampling
from sostenuto.runtime.jobs.events import StepTrained
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.teacher import Teacher
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.algorithms import GRPO, OPD
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.parts import Teaching
from sostenuto.trainer.samples import trajectory_samples
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.types import Limits, ProgramId, Purpose, Version

REAL = json.loads(os.environ.get("SOSTENUTO_REAL_ENGINE", "{}"))
PROGRAMS, TURNS = 8, 4
TURN_TOKENS, RESULT_TOKENS = 16, 16
TOLERANCE = 2e-3
"""Of log-probabilities in float32: both sides compute, with other kernels."""

pytestmark = [
    pytest.mark.skipif(
        not REAL, reason="needs a real engine; `make test-vllm`, `make test-sglang` start one"
    ),
    pytest.mark.timeout(600),
]


def tell(name: str, value: float, unit: str, target: str | None = None) -> None:
    line = Figure(f"{REAL['kind']} on CPU: {name}", value, unit, target).line()
    with Path(os.environ.get("SOSTENUTO_FIGURES", os.devnull)).open("a") as file:
        file.write(f"{line}\n")


def entry() -> EngineEntry:
    return EngineEntry(kind=REAL["kind"], url=REAL["url"], id="real")


async def test_it_teaches_a_student_of_its_family(tmp_path: Path):
    """Before anything is published to it: a teacher is taken to serve its own folder."""
    model, student = Path(REAL["model"]), make_model(tmp_path / "student", 5, SMALL)
    teaching = Teaching(signal="distribution", top_k=4)
    teacher = Teacher(model=model, place="engine", engine=entry())
    job = RLJob(
        name="taught", env=Parity, model=student, tasks=numbers(8), steps=1, groups_per_step=2,
        algorithm=OPD(group_size=2, teaching=teaching), limits=Limits(turns=2, turn_tokens=12),
        save_every=10_000, teachers=(teacher,),
    )  # fmt: skip
    async with Runtime(RuntimeConfig(directory=tmp_path / "run")) as runtime:
        handle = await runtime.submit(job)
        (step,) = [event async for event in handle.events() if isinstance(event, StepTrained)]
        assert (await handle.result()).ledger.closes
    assert step.report.teacher_kl is not None
    assert step.report.teacher_kl > 0
    with read_journal(tmp_path / "run" / "journal.db") as reader:
        records = [record for record in reader.trajectories(purpose=Purpose.TRAIN) if record.taught]
    samples = [sample for record in records for sample in trajectory_samples(record, 0.0)]
    async with TrainerClient() as trainer:
        await trainer.open(model, LearnerSettings(), seed=1)
        wanted = await trainer.logprobs(samples)
    apart = [
        np.abs(sample.extras["teacher"] - known)[sample.mask].max()
        for sample, known in zip(samples, wanted, strict=True)
    ]
    for taught in (taught for record in records for taught in record.taught if taught):
        assert taught.top_logprobs is not None
        best = taught.top_logprobs[np.isfinite(taught.logprobs)]
        assert best.shape[1] == 4
        assert (np.diff(best, axis=1) <= 0).all()
    tell("programs scored by a teacher", len(records), "programs", ">= 4")
    worst = float(max(apart))
    tell("a teacher's log-probabilities apart from the trainer's", worst, "nat", f"<= {TOLERANCE:g}")
    assert worst <= TOLERANCE


async def test_a_job_learns_from_it_and_publishes_its_weights_to_it(tmp_path: Path):
    config = RuntimeConfig(directory=tmp_path, engines=(entry(),))
    job = RLJob(
        name="rl", env=Parity, model=Path(REAL["model"]), tasks=numbers(64), steps=3, groups_per_step=2,
        algorithm=GRPO(group_size=2, zero_spread="keep"), limits=Limits(turns=2, turn_tokens=12),
        save_every=10_000, max_staleness=0,
    )  # fmt: skip
    async with Runtime(config) as runtime:
        handle = await runtime.submit(job)
        steps = [event async for event in handle.events() if isinstance(event, StepTrained)]
        result = await handle.result()
    assert [step.version for step in steps] == [Version(0, number) for number in (1, 2, 3)]
    apart = [step.report.max_abs_dlogp for step in steps]
    tell("stood still for an update", max(step.pause_s for step in steps), "s")
    # The second and third step sampled with weights that were published to it.
    tell("largest difference of log-probabilities", max(a or 0 for a in apart), "nat", f"<= {TOLERANCE:g}")
    assert all(a is not None and a <= TOLERANCE for a in apart)
    assert result.ledger.closes
    assert result.ledger.outcomes["trained"] == 12
    tell("programs trained", result.ledger.outcomes["trained"], "programs", "== 12")
    with read_journal(tmp_path / "journal.db") as reader:
        for record in reader.trajectories(purpose=Purpose.TRAIN):
            validate(record)


async def test_programs_of_several_turns_end_and_find_their_kv(tmp_path: Path):
    ended: list[str] = []
    ground = Ground("job", Path(REAL["model"]), Version(0, 0), RuntimeConfig().engine, tmp_path, tmp_path)
    async with source_of(entry(), ground).open() as opened:
        assert opened.prepare_start is not None
        await opened.engine.capabilities()
        await opened.prepare_start("0.0")
        await opened.engine.commit_update(CommitRequest(version="0.0"))
        began_s = anyio.current_time()
        async with anyio.create_task_group() as group:
            for number in range(PROGRAMS):
                group.start_soon(_program, opened.engine, number, ended)
            while len(ended) < PROGRAMS:  # noqa: ASYNC110 - the programs say nothing else
                await anyio.sleep(0.05)
        took_s = anyio.current_time() - began_s
        load = await opened.engine.load()
    assert len(ended) == PROGRAMS
    tell("programs of several turns", len(ended), "programs", f"== {PROGRAMS}")
    tell("programs a minute", 60 * PROGRAMS / took_s, "1/min")
    tell("share of prompt tokens that were cached", load.cached_tokens / (
        load.cached_tokens + load.prefilled_tokens
    ), "share")  # fmt: skip


async def _program(engine: Engine, number: int, ended: list[str]) -> None:
    dice = random.Random(number)
    name, tokens = f"program-{number}", [dice.randrange(3, 60) for _ in range(64)]
    for turn in range(TURNS):
        request = GenerateRequest(
            request_id=f"{name}-{turn}", program_id=name, token_ids=tokens, max_new_tokens=TURN_TOKENS,
            sampling=Sampling(seed=number),
        )  # fmt: skip
        reply = await engine.generate(request)
        assert len(reply.token_ids) == TURN_TOKENS
        tokens = [*tokens, *reply.token_ids, *(dice.randrange(3, 60) for _ in range(RESULT_TOKENS))]
    await engine.release(ProgramId(name))
    ended.append(name)
