"""Programs with their books kept: every one is submitted to ledger and journal, and ends in both.

What comes out is a sealed trajectory (TRAIN, waiting for the trainer), or one that has its outcome.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import anyio

from sostenuto.errors import Blame, ConfigError
from sostenuto.records import Trajectory
from sostenuto.runtime.journal import (
    GroupOpened,
    GroupTrained,
    Journal,
    ProgramEnded,
    ProgramReopened,
    ProgramSealed,
    ProgramSubmitted,
)
from sostenuto.runtime.ledger import Ledger
from sostenuto.runtime.program import ProgramSpec
from sostenuto.runtime.simulation.traces.recorder import TraceRecorder
from sostenuto.types import GroupId, Outcome, OutcomeKind, ProgramId, Purpose

JOB_FAILED = "job_failed"
EVALUATED = Outcome(OutcomeKind.EVALUATED)


class Runner(Protocol):
    """What drives programs: the dispatcher, or the runner of agents."""

    async def run(self, spec: ProgramSpec) -> Trajectory:
        """Its failure is the outcome of the record, not an exception."""
        ...


class Rollouts:
    """Runs programs of one job.  The only one who writes outcomes of programs that are not sealed."""

    def __init__(
        self,
        runner: Runner,
        ledger: Ledger,
        journal: Journal,
        *,
        quarantine_after: int = 3,
        trace: TraceRecorder | None = None,
    ) -> None:
        self._runner = runner
        self._ledger = ledger
        self._journal = journal
        self._quarantine_after = quarantine_after
        self._trace = trace
        self._infrastructure_failures: Counter[str] = Counter()
        self._recalled: dict[ProgramId, Outcome] = {}
        self.cancelled_by = "user"
        """Who is named when programs are cancelled."""

    def is_quarantined(self, task_id: str) -> bool:
        """Whether the task has failed for infrastructure reasons too often to be tried again."""
        return self._infrastructure_failures[task_id] >= self._quarantine_after

    @property
    def quarantined(self) -> list[str]:
        return sorted(task for task in self._infrastructure_failures if self.is_quarantined(task))

    @contextmanager
    def ended_by_errors(self) -> Generator[None]:
        """Programs that an error of the block cancels are cancelled by the failure of their job."""
        try:
            yield
        except Exception:
            self.cancelled_by = JOB_FAILED
            raise

    def recall(self, program_id: ProgramId, outcome: Outcome) -> None:
        """A program that runs ends as `outcome` now; whoever runs it cancels it after this."""
        self._recalled[program_id] = outcome

    def opened(self, group: GroupOpened) -> None:
        """A group is about to run."""
        self._journal.write(group)

    def trained(self, group_id: GroupId, step: int) -> None:
        """A group was learnt from in this step; its programs' outcomes are the caller's to enter."""
        self._journal.write(GroupTrained(group_id, step))

    def reopen(self, program_id: ProgramId) -> None:
        """What became of a program is void: it is sealed again."""
        self._ledger.reopen(program_id)
        self._journal.write(ProgramReopened(program_id))

    async def run(self, spec: ProgramSpec) -> Trajectory:
        """Run one program; however it ends, it is in the books before that goes on."""
        self._ledger.submit(spec.id)
        self._journal.write(ProgramSubmitted(spec.id, spec.group_id, spec.task_id, spec.purpose))
        try:
            trajectory = await self._runner.run(spec)
        except anyio.get_cancelled_exc_class():
            cancelled = Outcome(OutcomeKind.CANCELLED, self.cancelled_by)
            self.end(spec.id, self._recalled.pop(spec.id, cancelled))
            raise
        except BaseException as error:
            # No program's failure, such as a template that refuses every prompt: it ends the job.
            self.cancelled_by = JOB_FAILED
            reason = f"{type(error).__name__}: {error}"
            self.end(spec.id, Outcome(OutcomeKind.FAILED, reason, Blame.INFRASTRUCTURE))
            raise
        recalled = self._recalled.pop(spec.id, None)
        if recalled is not None and trajectory.outcome is None:
            trajectory = replace(trajectory, outcome=recalled)
        self._enter(trajectory)
        self._record(trajectory)
        return trajectory

    def end(self, program_id: ProgramId, outcome: Outcome, trajectory: Trajectory | None = None) -> None:
        """The program's one outcome."""
        self._ledger.end(program_id, outcome)
        self._journal.write(ProgramEnded(program_id, outcome, trajectory))

    def _enter(self, trajectory: Trajectory) -> None:
        outcome = trajectory.outcome
        if outcome is not None:
            if outcome.blame is Blame.INFRASTRUCTURE:
                self._infrastructure_failures[trajectory.task_id] += 1
            self.end(trajectory.program_id, outcome, trajectory)
        elif trajectory.purpose is Purpose.EVALUATE:
            self.end(trajectory.program_id, EVALUATED, trajectory)
        else:
            self._ledger.seal(trajectory.program_id)
            self._journal.write(ProgramSealed(trajectory))

    def _record(self, trajectory: Trajectory) -> None:
        if self._trace is None:
            return
        try:
            self._trace.record(trajectory)
        except OSError as error:
            raise ConfigError(
                f"trace: {error.filename}: {error.strerror}; free some of the disk, or leave it out"
            ) from error
