"""Groups of programs, kept in flight as far ahead of the trainer as staleness allows.

Invariants:
- A group is opened only when pacing has room for it, and never more than the job can still use.
- Every sealed program is trained, or dropped with a reason, and is in the ledger as such.
- What can never become a batch is an error, not an endless wait.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup
from pydantic import JsonValue

from sostenuto.errors import SostenutoError
from sostenuto.records import Trajectory
from sostenuto.runtime.jobs.batch import Batch
from sostenuto.runtime.jobs.events import Dropped, GivenUp, JobEvent, NoSignal, Quarantined
from sostenuto.runtime.jobs.group_rewards import GroupJudge
from sostenuto.runtime.jobs.losses import Losses
from sostenuto.runtime.jobs.members import Members
from sostenuto.runtime.jobs.openings import KeptGroup, Openings, Start
from sostenuto.runtime.jobs.plan import Plan
from sostenuto.runtime.jobs.sources import NAMED
from sostenuto.runtime.jobs.watchdog import Inspect, Watchdog
from sostenuto.runtime.rollouts import Rollouts
from sostenuto.trainer.buffer import Buffer, ReadyGroup, Taken
from sostenuto.trainer.buffer import Dropped as DroppedProgram
from sostenuto.trainer.lineage import Lineage
from sostenuto.trainer.samplers import Standing, open_sampler
from sostenuto.types import GroupId, Outcome, OutcomeKind, ProgramId, Version

TRAINED = Outcome(OutcomeKind.TRAINED)


class GroupSupply:
    """Between the programs and the trainer of one job.  `generate` runs beside the one who takes."""

    def __init__(
        self,
        plan: Plan,
        rollouts: Rollouts,
        deployed: Callable[[], Version],
        say: Callable[[JobEvent], None],
        judge: GroupJudge | None = None,
        inspect: Inspect | None = None,
    ) -> None:
        """`judge`: of groups that get their rewards together.  `inspect`: says what a late program does."""
        self._plan = plan
        self._rollouts = rollouts
        self._deployed = deployed
        self._say = say
        sampler = open_sampler(plan.sampler)
        sampler.check(plan.groups_per_step)
        self._buffer = Buffer(
            zero_spread=plan.zero_spread,
            fewest=plan.fewest,
            needs_reward=plan.needs_reward,
            settles=judge is not None,
            sampler=sampler,
        )
        self._openings = Openings(plan, rollouts.is_quarantined, self._trainable_until)
        self._members = Members(
            plan, rollouts, self._buffer, self._openings, ended=self._ended, say=say, judge=judge
        )
        self._judges = judge is not None
        self._learning = 0
        """Groups whose place is taken until the next version opens."""
        self._in_hand: dict[GroupId, ReadyGroup] = {}
        """Taken, and without an outcome yet."""
        self._used = 0
        """Groups that were taken, those that were skipped in a batch with others included."""
        self._broken: SostenutoError | None = None
        self._exhausted = self._waiting = False
        self._watchdog = Watchdog(
            plan.stalled_after_s, self._running, self._no_publication, inspect=inspect, say=say
        )
        self._losses = Losses(plan.group_size)
        self._quarantined = set[str]()
        self._changed = anyio.Event()

    async def generate(self) -> None:
        """Open groups while there is room, until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._watchdog.run)
            while True:
                for _ in range(self._room()):
                    self._open_next(group)
                await self._change()

    async def take(self) -> Batch:
        """The next batch with something to learn from; waits for it.  Raises when it can never come."""
        while True:
            taken = self._take(self._plan.groups_per_step)
            if taken.batch:
                # The whole batch raises the version by one, also where some of it is skipped.
                self._hand_out(taken, places=self._plan.groups_per_step)
                return Batch(taken.batch, taken.skipped, self.lineage)
            if taken.skipped:
                self._say(_no_signal(taken.skipped))
                self._notify()
                continue
            if self._is_over:
                raise TasksExhausted(
                    f"the tasks are used up after {self._openings.draws} draws, "
                    f"{self._buffer.ready_groups} of {self._plan.groups_per_step} groups are ready for a "
                    "batch; give more tasks, more epochs or fewer steps"
                )
            await self._wait()

    async def next_group(self) -> ReadyGroup | None:
        """The next group alone, of a plan that skips none; None when the tasks are used up."""
        while True:
            taken = self._take(1)
            if taken.batch:
                self._hand_out(taken, places=1)
                return taken.batch[0]
            if self._is_over:
                return None
            await self._wait()

    def trained(self, groups: Iterable[ReadyGroup], *, refused: str = "", step: int | None = None) -> None:
        """The groups' one outcome: trained, or dropped because the step was refused.

        `step`: of a job with checkpoints, which say up to which one their weights have learnt.
        """
        outcome = Outcome(OutcomeKind.DROPPED, "step_refused") if refused else TRAINED
        for group in groups:
            del self._in_hand[group.group_id]
            if step is not None:
                self._rollouts.trained(group.group_id, step)
            for member in group.members:
                self._rollouts.end(member.program_id, outcome)

    def dropped(self, group: ReadyGroup, reason: str, detail: str = "") -> None:
        """A group that was handed out is not learnt from, and leaves its place to another."""
        del self._in_hand[group.group_id]
        self._learning -= 1
        self._drop(group.drop(reason, detail))
        self._notify()

    @property
    def lineage(self) -> Lineage:
        """Of what is deployed."""
        return self._buffer.lineage

    @property
    def standing(self) -> Standing:
        """What is behind the groups that were handed out."""
        return self._buffer.standing(
            self._deployed(), self._plan.max_staleness, self._plan.groups_per_step, self._learning
        )

    def rewards_of(self, batch: Batch) -> dict[str, float]:
        """The mean of each environment's programs in a batch that have one."""
        of: dict[str, list[float]] = {}
        for member in batch.members:
            if member.reward is not None:
                of.setdefault(self._plan.part_of(member.task_id).name, []).append(member.reward)
        return {name: sum(rewards) / len(rewards) for name, rewards in of.items()}

    @property
    def in_hand(self) -> tuple[ReadyGroup, ...]:
        """Groups that were handed out, and have no outcome yet."""
        return tuple(self._in_hand.values())

    def deployed(self) -> None:
        """A version is open that was learnt from all that has its outcome: there may be room now."""
        self._learning = len(self._in_hand)
        self._openings.keep(self._unfinished)
        self._give_up()
        self._notify()

    def state_dict(self) -> dict[str, JsonValue]:
        """Where to go on: what was opened and has no outcome is sampled anew, before what was never drawn."""
        return {
            "curricula": {name: drawn.state_dict() for name, drawn in self._plan.curricula.items()},
            "used": self._used - len(self._in_hand),
            "tasks": self._openings.state_dict(self._unfinished),
            "sampler": self._buffer.sampler.state_dict(),
        }

    def go_on(self, state: Mapping[str, Any], lineage: Lineage, groups: Sequence[KeptGroup]) -> int:
        """`load_state_dict`, with finished groups; how many of them are kept, and not sampled again.

        What their programs came to is void.  Those whose weights are no ancestors, or that are too old, are
        dropped for that.
        """
        self._buffer.lineage, deployed = lineage, self._deployed()
        kept: dict[GroupId, Start] = {}
        for group in groups:
            for program_id in group.programs:
                self._rollouts.reopen(program_id)
            faults = self._restore(group, deployed)
            self._drop(faults)
            if not faults:
                kept[group.group_id] = group.start
        self.load_state_dict(state, kept)
        return len(kept)

    def _restore(self, group: KeptGroup, deployed: Version) -> tuple[DroppedProgram, ...]:
        # What was told of a group together is not in the records of its members.
        fault = group.fault or ("group_rewards" if self._judges else "")
        if fault:
            return tuple(DroppedProgram(program_id, fault) for program_id in group.programs)
        return self._buffer.restore(group.group_id, group.members, deployed, self._plan.max_staleness)

    def load_state_dict(self, state: Mapping[str, Any], there: Mapping[GroupId, Start] | None = None) -> None:
        """Before `generate`.  ConfigError for a state of another job."""
        self._used = int(state["used"])
        for name, curriculum in self._plan.curricula.items():
            if name in state.get("curricula", {}):
                curriculum.load_state_dict(state["curricula"][name])
        self._openings.load_state_dict(state["tasks"], there)
        self._buffer.sampler.load_state_dict(state["sampler"])

    def close(self, reason: str) -> None:
        """Drop what is here, what still arrives, and what was handed out and did not come to its end."""
        in_hand, self._in_hand = self._in_hand, {}
        self._drop(self._buffer.drain(reason))
        self._drop(tuple(drop for group in in_hand.values() for drop in group.drop(reason)))

    def broken(self, error: SostenutoError) -> None:
        """Nothing will come any more: whoever waits is told."""
        self._broken = error
        self._notify()

    # ---- handing out ----

    def _take(self, groups: int) -> Taken:
        if self._broken is not None:
            raise self._broken
        taken = self._buffer.take(
            groups,
            self._deployed(),
            self._plan.max_staleness,
            per_version=self._plan.groups_per_step,
            used=self._learning,
        )
        self._drop(taken.dropped)
        return taken

    def _hand_out(self, taken: Taken, *, places: int) -> None:
        self._learning += places
        self._used += places
        self._in_hand |= {group.group_id: group for group in taken.batch}
        # What is left and has become useless by this leaves its place to what is not.
        self._drop(
            self._buffer.evict(
                self._deployed(),
                self._plan.max_staleness,
                per_version=self._plan.groups_per_step,
                learning=self._learning,
            )
        )
        self._notify()

    async def _wait(self) -> None:
        self._losses.refuse_too_many()
        self._waiting = True
        try:
            await self._change()
        finally:
            self._waiting = False

    # ---- generating ----

    def _room(self) -> int:
        """Groups that may start now, and that the rest of the job can still use."""
        room = self._buffer.room(
            self._deployed(),
            self._plan.max_staleness,
            per_version=self._plan.groups_per_step,
            learning=self._learning,
        )
        if self._plan.groups is not None:
            here = self._buffer.open_groups + self._buffer.ready_groups
            room = min(room, self._plan.groups - self._used - here)
        return max(0, room)

    def _open_next(self, running: TaskGroup) -> None:
        opening = self._openings.next()
        if opening is not None:
            self._members.start(opening, self._deployed(), running)
        elif not self._exhausted:
            self._exhausted = True
            self._notify()

    def _trainable_until(self) -> Version:
        """Of a program that begins to sample now."""
        deployed = self._deployed()
        return Version(deployed.epoch, deployed.number + self._plan.max_staleness)

    @property
    def _unfinished(self) -> list[GroupId]:
        """Groups that were opened and have no outcome, in the order in which they were taken and opened."""
        return [*self._in_hand, *self._buffer.group_ids]

    def _ended(self, trajectory: Trajectory | None, dropped: tuple[DroppedProgram, ...]) -> None:
        if trajectory is not None:
            self._look_at(trajectory)
        elif self._judges:
            self._losses.clear()
        if trajectory is None or trajectory.group_id not in self._buffer.waiting_for:
            self._watchdog.completed()
        self._drop(dropped)
        self._notify()

    def _look_at(self, trajectory: Trajectory) -> None:
        task_id = trajectory.task_id
        if self._rollouts.is_quarantined(task_id) and task_id not in self._quarantined:
            self._quarantined.add(task_id)
            self._say(Quarantined(task_id))
        self._count(trajectory)
        part = self._plan.part_of(task_id)
        if part.curriculum is not None and trajectory.reward is not None:
            part.curriculum.observe(task_id.removeprefix(f"{part.name}{NAMED}"), trajectory.reward)

    def _give_up(self) -> None:
        """End the groups that the sampler gives up; their tasks are started anew, once."""
        aborted = self._buffer.give_up(
            self._deployed(),
            self._plan.max_staleness,
            per_version=self._plan.groups_per_step,
            learning=self._learning,
        )
        for group in aborted:
            again = self._openings.again(group.group_id)
            outcome = Outcome(OutcomeKind.RECYCLED if again else OutcomeKind.DROPPED, "stale")
            self._members.recall(group.running, outcome)
            for program_id in group.ended:
                self._rollouts.end(program_id, outcome)
            self._say(GivenUp(group.group_id, len(group.running) + len(group.ended), group.why, again=again))

    # ---- what comes to nothing ----

    def _count(self, trajectory: Trajectory) -> None:
        if trajectory.outcome is not None:
            self._losses.add(trajectory.outcome)
        elif not self._judges:
            # Where groups are judged, it is the judged one that shows that something comes.
            self._losses.clear()

    def _drop(self, dropped: tuple[DroppedProgram, ...]) -> None:
        for drop in dropped:
            self._rollouts.end(drop.program_id, Outcome(OutcomeKind.DROPPED, drop.reason))
        for reason in sorted({drop.reason for drop in dropped}):
            of_reason = [drop for drop in dropped if drop.reason == reason]
            self._say(Dropped(reason, len(of_reason), of_reason[0].detail))

    @property
    def _is_over(self) -> bool:
        """No group will come any more."""
        return self._exhausted and not self._buffer.open_groups and not self._openings.waits

    def _running(self) -> list[ProgramId]:
        return [member for members in self._buffer.waiting_for.values() for member in members]

    def _no_publication(self) -> str:
        if not (self._waiting and self._learning):
            return ""
        return f"a publication: {self._learning} groups were handed out since the last one"

    # ---- waiting ----

    def _notify(self) -> None:
        self._changed.set()

    async def _change(self) -> None:
        # Both sides wait on one event; whoever comes second finds a fresh one.
        event = self._changed
        await event.wait()
        if self._changed is event:
            self._changed = anyio.Event()


def _no_signal(groups: tuple[ReadyGroup, ...]) -> NoSignal:
    rewards = [member.reward or 0.0 for group in groups for member in group.members]
    return NoSignal(len(groups), sum(rewards) / len(rewards))


class TasksExhausted(SostenutoError):  # noqa: N818 - reads as the fact it states
    """The source has no further task and what is here does not make a batch."""
