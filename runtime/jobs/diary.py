"""What a job will tell of itself: its steps as they end, and the result."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sostenuto.records import Trajectory
from sostenuto.runtime.jobs.alarms import Alarms, AlarmSettings
from sostenuto.runtime.jobs.events import Evaluated, JobResult, StepTrained, TimeSplit
from sostenuto.runtime.jobs.supply import Batch
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
    staleness = [member.staleness(deployed) for member in members]
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


@dataclass(slots=True)
class Diary:
    """One job's; its recipe is the only writer."""

    began_s: float
    alarms: Alarms = field(default_factory=lambda: Alarms(AlarmSettings()))
    evaluations: list[Evaluated] = field(default_factory=list[Evaluated])
    steps: list[StepTrained] = field(default_factory=list[StepTrained])
    checkpoint: Path | None = None

    def step(self, told: StepTrained) -> None:
        self.steps.append(told)

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
            steps=len(self.steps),
            version=version,
            evaluations=tuple(self.evaluations),
            rewards=tuple(step.reward for step in self.steps),
            time=self._time(),
            ledger=ledger,
            elapsed_s=ended_s - self.began_s,
            checkpoint=self.checkpoint,
            quarantined=quarantined,
        )

    def _time(self) -> TimeSplit:
        usage = sum((step.usage for step in self.steps), Usage())
        return TimeSplit(
            decode_s=usage.decode_s,
            prefill_s=usage.prefill_s,
            tool_s=usage.tool_s,
            environment_s=usage.environment_s,
            queue_s=usage.queue_s,
            learn_s=sum(step.learn_s for step in self.steps),
            publish_s=sum(step.publish_s for step in self.steps),
            wait_s=sum(step.wait_s for step in self.steps),
        )
