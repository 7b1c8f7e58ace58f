"""The members of groups while they run: those that fail or come too late are replaced, left out or recalled.

Invariants:
- Every program that is started ends in the ledger once; a recalled one as its recall says.
- A member that the infrastructure failed is started anew, so that a group is short of it only when that
  did not help either.
- A group waits no longer for its last members than the rule about stragglers says.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import anyio
from anyio.abc import TaskGroup
from pydantic import JsonValue

from sostenuto.errors import Blame, ProgramError
from sostenuto.records import Trajectory
from sostenuto.runtime.jobs.events import JobEvent, Replaced
from sostenuto.runtime.jobs.group_rewards import GroupJudge
from sostenuto.runtime.jobs.openings import Opening, Openings
from sostenuto.runtime.jobs.plan import Plan
from sostenuto.runtime.journal import GroupOpened
from sostenuto.runtime.program import ProgramSpec
from sostenuto.runtime.rollouts import Rollouts
from sostenuto.trainer.buffer import Buffer
from sostenuto.trainer.groups import Dropped
from sostenuto.types import GroupId, Outcome, OutcomeKind, ProgramId, Version

_STRAGGLER = "straggler"


class Members:
    """Of one job."""

    def __init__(
        self,
        plan: Plan,
        rollouts: Rollouts,
        buffer: Buffer,
        openings: Openings,
        *,
        ended: Callable[[Trajectory | None, tuple[Dropped, ...]], None],
        say: Callable[[JobEvent], None],
        judge: GroupJudge | None = None,
    ) -> None:
        """`ended` is told of every program that was run, unless it was recalled, and of whom that drops.

        `judge`: tells the rewards of a group when all of its members have ended.
        """
        self._plan = plan
        self._rollouts = rollouts
        self._buffer = buffer
        self._openings = openings
        self._ended = ended
        self._say = say
        self._judge = judge
        self._running: dict[ProgramId, tuple[ProgramSpec, anyio.CancelScope]] = {}
        self._times: Counter[str] = Counter()
        """How often a member was started anew, by its first id; of groups that are open."""
        self._minded: set[GroupId] = set()
        """Groups whose stragglers are waited for."""

    def start(self, opening: Opening, deployed: Version, running: TaskGroup) -> None:
        """Run all members of a group."""
        start = opening.start
        self._rollouts.opened(
            GroupOpened(opening.group_id, self._plan.root, start.ordinal, start.number, len(opening.specs))
        )
        self._buffer.open(opening.group_id, [spec.id for spec in opening.specs], deployed)
        for spec in opening.specs:
            running.start_soon(self._run, spec, running)

    def recall(self, programs: Iterable[ProgramId], outcome: Outcome) -> None:
        """End programs that run."""
        for program_id in programs:
            self._rollouts.recall(program_id, outcome)
            self._running[program_id][1].cancel()

    async def _run(self, spec: ProgramSpec, running: TaskGroup) -> None:
        while (trajectory := await self._ran(spec)) is not None:
            if not self._should_start_anew(trajectory):
                self._add(trajectory, running)
                return
            self._ended(trajectory, ())
            spec = self._replace(spec, f"failed: {trajectory.outcome}")

    async def _ran(self, spec: ProgramSpec) -> Trajectory | None:
        """Its record; None when it was recalled."""
        trajectory: Trajectory | None = None
        with anyio.CancelScope() as scope:
            self._running[spec.id] = spec, scope
            try:
                trajectory = await self._rollouts.run(spec)
            finally:
                del self._running[spec.id]
        return None if scope.cancel_called else trajectory

    def _add(self, trajectory: Trajectory, running: TaskGroup) -> None:
        self._ended(trajectory, self._buffer.add(trajectory))
        group_id = trajectory.group_id
        waiting = self._buffer.waiting_for.get(group_id)
        if not waiting:
            self._minded.discard(group_id)
            self._settle(group_id, running)
        elif self._is_to_be_minded(group_id, len(waiting)):
            self._minded.add(group_id)
            running.start_soon(self._mind_stragglers, group_id, running)

    def _settle(self, group_id: GroupId, running: TaskGroup) -> None:
        members = self._buffer.unsettled(group_id)
        if members and self._judge is not None:
            part, task = self._openings.part_of(group_id), self._openings.task_of(group_id)
            running.start_soon(self._judged, self._judge, members, part.name, task)

    async def _judged(
        self, judge: GroupJudge, members: tuple[Trajectory, ...], environment: str, task: dict[str, JsonValue]
    ) -> None:
        group_id = members[0].group_id
        try:
            settled = await judge.judge(members, environment, task)
        except ProgramError as error:
            self._come_to_nothing(group_id, members, Outcome(OutcomeKind.FAILED, str(error), error.blame))
            return
        # Meanwhile it may have been given up, or the job may be over.
        if self._buffer.unsettled(group_id):
            self._ended(None, self._buffer.settle(group_id, settled))

    def _come_to_nothing(self, group_id: GroupId, members: tuple[Trajectory, ...], outcome: Outcome) -> None:
        if not self._buffer.unsettled(group_id):
            return
        self._buffer.forget(group_id)
        for member in members:
            self._rollouts.end(member.program_id, outcome)
            self._ended(replace(member, outcome=outcome, reward=None), ())

    def _is_to_be_minded(self, group_id: GroupId, waiting: int) -> bool:
        has_rule = self._plan.stragglers is not None and group_id not in self._minded
        return has_rule and 2 * waiting <= self._openings.part_of(group_id).group_size

    def _should_start_anew(self, trajectory: Trajectory) -> bool:
        outcome = trajectory.outcome
        first = trajectory.program_id.partition("+")[0]
        return (
            outcome is not None
            and outcome.blame is Blame.INFRASTRUCTURE
            and self._times[first] < self._plan.refills
            and not self._rollouts.is_quarantined(trajectory.task_id)
            and not self._buffer.is_drained
        )

    def _replace(self, spec: ProgramSpec, reason: str) -> ProgramSpec:
        first = spec.id.partition("+")[0]
        self._times[first] += 1
        anew = self._openings.anew(spec, self._times[first])
        self._buffer.replace(spec.group_id, spec.id, anew.id)
        self._say(Replaced(spec.id, anew.id, reason))
        return anew

    async def _mind_stragglers(self, group_id: GroupId, running: TaskGroup) -> None:
        rule = self._plan.stragglers
        assert rule is not None
        await anyio.sleep(rule.after_s)
        late = self._late(group_id)
        if late and rule.then == "refill":
            specs = [self._running[program_id][0] for program_id in late]
            self.recall(late, Outcome(OutcomeKind.RECYCLED, _STRAGGLER))
            for spec in specs:
                running.start_soon(self._run, self._replace(spec, _STRAGGLER), running)
            await anyio.sleep(rule.after_s)
            late = self._late(group_id)
        if late:
            self.recall(late, Outcome(OutcomeKind.DROPPED, _STRAGGLER))
            self._ended(None, self._buffer.leave_out(group_id, late))
            self._settle(group_id, running)

    def _late(self, group_id: GroupId) -> tuple[ProgramId, ...]:
        return self._buffer.waiting_for.get(group_id, ())
