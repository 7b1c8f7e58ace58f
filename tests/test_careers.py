"""A job over the deaths of its trainer: how often it is taken up, under which names, and when no more."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from fakes_training import Parity, numbers
from sostenuto.errors import ConfigError
from sostenuto.runtime.config import RuntimeConfig, TrainerProcessSettings
from sostenuto.runtime.jobs import careers
from sostenuto.runtime.jobs.careers import Careers
from sostenuto.runtime.jobs.events import JobEvent, JobStarted
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.past import Past
from sostenuto.runtime.jobs.workshop import Premises, Say
from sostenuto.runtime.journal import open_journal
from sostenuto.runtime.run_directory import RunDirectory
from sostenuto.trainer.client import TrainerLost
from sostenuto.types import Version

JOB = RLJob(env=Parity, model=".", tasks=numbers(4), steps=2)


@dataclass(frozen=True)
class _Premises:
    """What `Careers` itself needs of them."""

    config: RuntimeConfig
    new_version: Any = None


@dataclass
class Trainers:
    """In place of the recipe: its trainer dies so often, before or after the job has begun."""

    deaths: int
    begins: bool = True
    killed: bool = True
    lives: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])
    """The name that each had, and whether it went on from something."""
    versions: list[Version] = field(default_factory=list[Version])

    async def reinforce(self, job: RLJob, premises: Premises, say: Say, past: Past) -> str:
        self.lives.append((job.name, past.goes_on))
        if len(self.lives) > 1:
            self.versions.append(premises.new_version())
        if self.begins:
            say(JobStarted(job.name, "m", Version(0, 0), "none"))
        if len(self.lives) <= self.deaths:
            error = TrainerLost("it died")
            error.killed = self.killed
            raise error
        return "result"


@asynccontextmanager
async def opened(
    place: Path, monkeypatch: pytest.MonkeyPatch, trainers: Trainers, *, restarts: int = 2
) -> AsyncGenerator[Careers]:
    monkeypatch.setattr(careers, "reinforce", trainers.reinforce)
    monkeypatch.setattr(careers, "_FIRST_PAUSE_S", 0.0)
    config = RuntimeConfig(directory=place, trainer=TrainerProcessSettings(restarts=restarts))
    run, epochs = RunDirectory(place), iter(range(1, 100))
    run.checkpoints.mkdir()
    async with open_journal(run.journal) as journal:
        premises = cast("Premises", _Premises(config))
        yield Careers(premises, run, journal, lambda: next(epochs), lambda epoch: Version(epoch, 7))


def quiet(_: JobEvent) -> None: ...


async def test_each_life_has_a_name_and_an_epoch_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainers = Trainers(deaths=2)
    async with opened(tmp_path, monkeypatch, trainers) as subject:
        assert await subject.begin(JOB, quiet, given="job") == cast("Any", "result")
        assert await subject.knows("job")
        assert not await subject.knows("other")
    assert trainers.lives == [("job", False), ("job.1", True), ("job.2", True)]
    assert trainers.versions == [Version(1, 7), Version(2, 7)]


async def test_it_is_given_up_after_so_many_deaths_within_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainers = Trainers(deaths=9)
    async with opened(tmp_path, monkeypatch, trainers) as subject:
        with pytest.raises(TrainerLost, match="it died; it was started again 2 times, and is given up"):
            await subject.begin(JOB, quiet, given="job")
    assert len(trainers.lives) == 3


async def test_deaths_of_long_ago_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainers = Trainers(deaths=5)
    monkeypatch.setattr(careers, "_COUNTED_S", 0.0)
    async with opened(tmp_path, monkeypatch, trainers) as subject:
        await subject.begin(JOB, quiet, given="job")
    assert len(trainers.lives) == 6


@pytest.mark.parametrize(("killed", "lives"), [(True, 3), (False, 1)])
async def test_what_a_trainer_ends_with_before_the_job_has_begun_is_not_tried_again_unless_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool, lives: int
):
    trainers = Trainers(deaths=9, begins=False, killed=killed)
    async with opened(tmp_path, monkeypatch, trainers) as subject:
        with pytest.raises(TrainerLost, match="it died"):
            await subject.begin(JOB, quiet, given="job")
    assert len(trainers.lives) == lives


async def test_the_past_of_a_job_that_was_never_there_is_an_error_that_names_those_that_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with opened(tmp_path, monkeypatch, Trainers(deaths=0)) as subject:
        await subject.begin(JOB, quiet, given="job")
        with pytest.raises(ConfigError, match=r"has had no job 'jbo'; did you mean 'job'\?"):
            await subject.past(RLJob(env=Parity, model=".", tasks=numbers(4), steps=2, name="jbo"))
        past = await subject.past(JOB)
    assert (past.root, past.goes_on, past.checkpoint, past.groups) == ("job", True, None, ())
