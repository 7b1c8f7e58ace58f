"""What a job will tell of itself: its steps as they end, and the result."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sostenuto.records import Trajectory
from sostenuto.runtime.jobs.alarms import Alarms, AlarmSettings
from sostenuto.runtime.jobs.batch import Batch
from sostenuto.runtime.jobs.events import Evaluated, JobResult, StepTrained, TimeSplit
from sostenuto.runtime.ledger import LedgerStatistics
from sostenuto.trainer.reports import StepReport
from sostenuto.types import Usage, Version


@dataclass(slots=True)
class StepClock:
    """When the parts of a step ended, on the loop's clock."""

    began_s: float
    taken_s: float = 0.0
    learnt_s: float = 0.0
    published_s: float = 0.0
    pause_s: float = 0.0

    def taken(self, now_s: float) -> None:
        self.taken_s = now_s

    def learnt(self, now_s: float) -> None:
        self.learnt_s = now_s

    def published(self, now_s: float) -> None:
        self.published_s = now_s


def step_trained(
    batch: Batch,
    report: StepReport,
    clock: StepClock,
    deployed: Version,
    version: Version,
    step: int,
    steps: int,
) -> StepTrained:
    """`deployed` is the version when the batch was taken, which staleness is against."""
    members = batch.members
    staleness = batch.staleness(deployed)
    return StepTrained(
        step=step,
        steps=steps,
        version=version,
        reward=_mean_reward(members),
        groups=len(batch.groups),
        skipped=len(batch.skipped),
        staleness_mean=float(np.mean(staleness)),
        staleness_max=max(staleness),
        report=report,
        usage=sum((member.usage for member in members), Usage()),
        wait_s=clock.taken_s - clock.began_s,
        learn_s=clock.learnt_s - clock.taken_s,
        publish_s=clock.published_s - clock.learnt_s,
        pause_s=clock.pause_s,
    )


def _mean_reward(members: list[Trajectory]) -> float:
    """Over those that have one; NaN when none has."""
    rewards = [member.reward for member in members if member.reward is not None]
    return float(np.mean(rewards)) if rewards else math.nan


@dataclass(frozen=True, slots=True)
class Told:
    """What a job has told so far, in short; who goes on from a checkpoint begins with it."""

    evaluations: tuple[Evaluated, ...] = ()
    rewards: tuple[float, ...] = ()
    """Of the steps."""
    time: TimeSplit = field(default_factory=TimeSplit)
    elapsed_s: float = 0.0


@dataclass(slots=True)
class Diary:
    """One job's; its recipe is the only writer."""

    began_s: float
    alarms: Alarms = field(default_factory=lambda: Alarms(AlarmSettings()))
    evaluations: list[Evaluated] = field(default_factory=list[Evaluated])
    rewards: list[float] = field(default_factory=list[float])
    time: TimeSplit = field(default_factory=TimeSplit)
    checkpoint: Path | None = None

    def step(self, told: StepTrained) -> None:
        self.rewards.append(told.reward)
        self.time += _time_of(told)

    def has_evaluated(self, step: int, temperature: float, environment: str) -> bool:
        looks = {(told.step, told.temperature, told.environment) for told in self.evaluations}
        return (step, temperature, environment) in looks

    def told(self, now_s: float) -> Told:
        return Told(tuple(self.evaluations), tuple(self.rewards), self.time, now_s - self.began_s)

    def go_on(self, told: Told, now_s: float) -> None:
        """Begin with what was told before the job was cut off."""
        self.evaluations, self.rewards = list(told.evaluations), list(told.rewards)
        self.time, self.began_s = told.time, now_s - told.elapsed_s

    def result(
        self,
        job: str,
        version: Version,
        ledger: LedgerStatistics,
        quarantined: tuple[str, ...],
        *,
        ended_s: float,
    ) -> JobResult:
        return JobResult(
            job=job,
            steps=len(self.rewards),
            version=version,
            evaluations=tuple(self.evaluations),
            rewards=tuple(self.rewards),
            time=self.time,
            ledger=ledger,
            elapsed_s=ended_s - self.began_s,
            checkpoint=self.checkpoint,
            quarantined=quarantined,
        )


def _time_of(step: StepTrained) -> TimeSplit:
    usage = step.usage
    return TimeSplit(
        decode_s=usage.decode_s,
        prefill_s=usage.prefill_s,
        tool_s=usage.tool_s,
        environment_s=usage.environment_s,
        queue_s=usage.queue_s,
        learn_s=step.learn_s,
        publish_s=step.publish_s,
        wait_s=step.wait_s,
    )
