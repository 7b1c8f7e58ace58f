"""Teachers of a job: those that are engines, and who wraps programs so that each has a teacher.

Invariants:
- A program is scored by the teacher that its task is assigned to, in the contexts that it made itself.
- What the teacher said is in the record before that is sealed.
- A teacher that cannot answer is the infrastructure's failure, of that program alone.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
from tokenizers import Tokenizer

from sostenuto.errors import ConfigError, EngineError, boundary
from sostenuto.records import Mask, Taught, Trajectory
from sostenuto.records import Sequence as Spans
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.wire import ScoreReply, ScoreRequest
from sostenuto.runtime.jobs.job import RLJob, local_folder
from sostenuto.runtime.jobs.teacher import Teacher, assigned
from sostenuto.runtime.jobs.workshop import Premises
from sostenuto.runtime.lone_engine import open_lone_engine
from sostenuto.runtime.program import History, ProgramSpec
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rollouts import Runner
from sostenuto.types import Outcome, OutcomeKind, Purpose

_TOGETHER = 32
"""Scores that one teacher is asked for at a time, where its entry says nothing."""


class Lessons:
    """The teachers of one job, at work."""

    def __init__(self, job: RLJob, engines: Mapping[str, Engine], histories: Mapping[str, History]) -> None:
        self._teachers = job.teachers
        self._histories = histories
        self._engines = engines
        self._top_logprobs = _most_asked(job)
        self._places = {
            teacher.name: anyio.CapacityLimiter(teacher.engine.concurrency or _TOGETHER)
            for teacher in self._teachers
        }

    def around(self, runner: Runner) -> Runner:
        """`runner`, with what the teachers say of each program that is to be trained."""
        return _Taught(runner, self) if self._teachers else runner

    async def teach(self, spec: ProgramSpec, trajectory: Trajectory) -> Trajectory:
        """The record with its teacher's name, and with what that said where it is an engine."""
        teacher = self._teacher_of(spec)
        engine = self._engines.get(teacher.name)
        named = replace(trajectory, teacher=teacher.name)
        if engine is None:
            return named
        try:
            async with self._places[teacher.name]:
                taught = [
                    await self._score(engine, teacher, sequence, spec.temperature)
                    for sequence in trajectory.sequences
                ]
        except EngineError as error:
            outcome = Outcome(OutcomeKind.FAILED, f"teacher {teacher.name}: {error}", error.blame)
            return replace(named, outcome=outcome)
        return replace(named, taught=tuple(taught))

    def _teacher_of(self, spec: ProgramSpec) -> Teacher:
        history = self._histories.get(spec.task_id)
        if history is not None and history.teacher:
            return next(teacher for teacher in self._teachers if teacher.name == history.teacher)
        task = spec.task if history is None else history.task
        return assigned(self._teachers, spec.environment.name, task)

    async def _score(
        self, engine: Engine, teacher: Teacher, sequence: Spans, temperature: float
    ) -> Taught | None:
        mask = np.concatenate([span.mask for span in sequence]) if sequence else np.zeros(0, np.bool_)
        trained = np.flatnonzero(mask)
        if not len(trained):
            return None
        start, end = int(trained[0]), int(trained[-1]) + 1
        ids = np.concatenate([span.token_ids for span in sequence])[:end]
        reply = await engine.score(
            ScoreRequest(
                token_ids=ids.tolist(), start=start, temperature=temperature, top_logprobs=self._top_logprobs
            )
        )
        with boundary(EngineError, f"what {teacher.name} said"):
            return _taught(reply, mask, start, end, self._top_logprobs)


class _Taught:
    """A Runner."""

    def __init__(self, runner: Runner, lessons: Lessons) -> None:
        self._runner = runner
        self._lessons = lessons

    async def run(self, spec: ProgramSpec) -> Trajectory:
        trajectory = await self._runner.run(spec)
        if trajectory.outcome is not None or spec.purpose is not Purpose.TRAIN:
            return trajectory
        return await self._lessons.teach(spec, trajectory)


@asynccontextmanager
async def open_lessons(
    job: RLJob, premises: Premises, histories: Mapping[str, History]
) -> AsyncGenerator[Lessons]:
    """Open the teachers that are engines; ConfigError or EngineError when one cannot teach this job."""
    async with AsyncExitStack() as stack:
        engines: dict[str, Engine] = {}
        for teacher in job.teachers:
            if teacher.place == "engine":
                engines[teacher.name] = await stack.enter_async_context(_engine_of(teacher, job, premises))
        yield Lessons(job, engines, histories)


@asynccontextmanager
async def _engine_of(teacher: Teacher, job: RLJob, premises: Premises) -> AsyncGenerator[Engine]:
    async with open_lone_engine(
        teacher_folder(teacher),
        teacher.engine,
        premises,
        job=job.name,
        name=f"teacher-{teacher.name}",
        tokens=job.limits.total_tokens,
    ) as engine:
        await _try(engine, teacher, job)
        yield engine


async def _try(engine: Engine, teacher: Teacher, job: RLJob) -> None:
    """Ask once for what every program will be asked for; EngineError when it cannot be told."""
    temperature, top = job.algorithm.temperature, _most_asked(job)
    request = ScoreRequest(token_ids=[0, 0], start=1, temperature=temperature, top_logprobs=top)
    with boundary(EngineError, f"teachers: {teacher.name}"):
        await engine.score(request)


def _most_asked(job: RLJob) -> int:
    """How many of a teacher's likeliest tokens a method of the job needs."""
    return max((a.teaching.top_k or 0 for a in job.algorithms if a.teaching is not None), default=0)


def check_tokenizers(student: Path, teachers: Sequence[Teacher]) -> None:
    """ConfigError for a teacher to whom the student's token ids mean something else, naming both."""
    if not teachers:
        return
    ours = _texts(ModelFolder.open(student))
    for teacher in teachers:
        folder = ModelFolder.open(teacher_folder(teacher))
        theirs = _texts(folder)
        if theirs == ours:
            continue
        differs = min(id_ for id_ in ours.keys() | theirs.keys() if ours.get(id_) != theirs.get(id_))
        raise ConfigError(
            f"teachers: {teacher.name}: its tokenizer, {folder.path / 'tokenizer.json'}, is another than the "
            f"student's, {student / 'tokenizer.json'}: token {differs} is {theirs.get(differs)!r} and "
            f"{ours.get(differs)!r}; give a teacher of the student's family"
        )


def models_beside(teachers: Sequence[Teacher]) -> dict[str, Path]:
    """Folders of the teachers that are loaded beside the policy, by name."""
    return {teacher.name: teacher_folder(teacher) for teacher in teachers if teacher.place == "trainer"}


def teacher_folder(teacher: Teacher) -> Path:
    """ConfigError when the model is not a folder on this machine."""
    return local_folder(teacher.model, f"teachers: {teacher.name}: model")


def _texts(folder: ModelFolder) -> dict[int, str]:
    vocabulary = Tokenizer.from_str(folder.tokenizer_json).get_vocab(with_added_tokens=True)
    return {id_: text for text, id_ in vocabulary.items()}


def _taught(reply: ScoreReply, mask: Mask, start: int, end: int, top_k: int) -> Taught:
    """(T,) of the whole sequence; EngineError for an answer that lacks a token."""
    if len(reply.logprobs) != end - start:
        raise EngineError(f"{end - start} tokens were asked for, {len(reply.logprobs)} were scored")
    logprobs = np.full(len(mask), np.nan, dtype=np.float32)
    logprobs[start:end] = reply.logprobs
    logprobs[~mask] = np.nan
    if not np.isfinite(logprobs[mask]).all():
        raise EngineError("a log-probability is not finite")
    if not top_k:
        return Taught(reply.version, logprobs)
    rows = reply.top_logprobs or []
    if len(rows) != end - start or any(len(row) < top_k for row in rows):
        raise EngineError(f"the {top_k} likeliest tokens of {end - start} positions were asked for")
    ids = np.zeros((len(mask), top_k), dtype=np.int32)
    top = np.full((len(mask), top_k), np.nan, dtype=np.float32)
    ids[start:end] = [[id_ for id_, _ in row[:top_k]] for row in rows]
    top[start:end] = [[logprob for _, logprob in row[:top_k]] for row in rows]
    return Taught(reply.version, logprobs, ids, top)
