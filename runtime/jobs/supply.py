"""Groups of programs, kept in flight as far ahead of the trainer as staleness allows.

Invariants:
- A group is opened only when pacing has room for it, and never more than the job can still use.
- Every sealed program is trained, or dropped with a reason, and is in the ledger as such.
- What can never become a batch is an error, not an endless wait.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import TaskGroup
from pydantic import JsonValue

from sostenuto.envs.task import Draw
from sostenuto.errors import ConfigError, SostenutoError
from sostenuto.records import Trajectory
from sostenuto.runtime.jobs.events import Dropped, JobEvent, NoSignal, Quarantined, Stalled
from sostenuto.runtime.jobs.plan import Plan
from sostenuto.runtime.jobs.seeds import seed_of
from sostenuto.runtime.program import ProgramSpec
from sostenuto.runtime.rollouts import Rollouts
from sostenuto.trainer.buffer import Buffer, ReadyGroup, Taken
from sostenuto.trainer.buffer import Dropped as DroppedProgram
from sostenuto.trainer.pacing import Pacing
from sostenuto.types import GroupId, Outcome, OutcomeKind, ProgramId, Purpose, Version

TRAINED = Outcome(OutcomeKind.TRAINED)
_STALL_S = 30.0
_LOST_GROUPS = 24
"""So many groups in a row that came to nothing end the job."""


@dataclass(slots=True)
class _Lost:
    """Programs that failed since the last one that did not."""

    programs: int = 0
    reasons: deque[str] = field(default_factory=lambda: deque[str](maxlen=3))


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step takes."""

    groups: tuple[ReadyGroup, ...]
    skipped: tuple[ReadyGroup, ...]
    """Equal rewards, nothing to learn."""

    @property
    def members(self) -> list[Trajectory]:
        """Of all groups, the skipped ones included."""
        return [member for group in (*self.groups, *self.skipped) for member in group.members]


class GroupSupply:
    """Between the programs and the trainer of one job.  `generate` runs beside the one who takes."""

    def __init__(
        self,
        plan: Plan,
        rollouts: Rollouts,
        deployed: Callable[[], Version],
        say: Callable[[JobEvent], None],
    ) -> None:
        self._plan = plan
        self._rollouts = rollouts
        self._deployed = deployed
        self._say = say
        self._buffer = Buffer(
            zero_spread=plan.zero_spread, fewest=plan.fewest, needs_reward=plan.needs_reward
        )
        self._pacing = Pacing(plan.groups_per_step, plan.max_staleness)
        self._ordinal = 0
        self._learning = 0
        """Groups whose place is taken until the next version opens."""
        self._in_hand: dict[GroupId, ReadyGroup] = {}
        """Taken, and without an outcome yet."""
        self._used = 0
        """Groups that were taken, those that were skipped in a batch with others included."""
        self._broken: SostenutoError | None = None
        self._exhausted = False
        self._lost = _Lost()
        self._quarantined = set[str]()
        self._changed = anyio.Event()

    async def generate(self) -> None:
        """Open groups while there is room, until cancelled or out of tasks."""
        async with anyio.create_task_group() as group:
            while not self._exhausted:
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
                return Batch(taken.batch, taken.skipped)
            if taken.skipped:
                self._say(_no_signal(taken.skipped))
                self._notify()
                continue
            if self._is_over:
                raise TasksExhausted(
                    f"the tasks are used up after {self._ordinal} draws, {self._buffer.ready_groups} of "
                    f"{self._plan.groups_per_step} groups are ready for a batch; "
                    "give more tasks, more epochs or fewer steps"
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

    def trained(self, groups: Iterable[ReadyGroup], *, refused: str = "") -> None:
        """The groups' one outcome: trained, or dropped because the step was refused."""
        outcome = Outcome(OutcomeKind.DROPPED, "step_refused") if refused else TRAINED
        for group in groups:
            del self._in_hand[group.group_id]
            for member in group.members:
                self._rollouts.end(member.program_id, outcome)

    def dropped(self, group: ReadyGroup, reason: str, detail: str = "") -> None:
        """A group that was handed out is not learnt from, and leaves its place to another."""
        del self._in_hand[group.group_id]
        self._learning -= 1
        self._drop(group.drop(reason, detail))
        self._notify()

    @property
    def in_hand(self) -> tuple[ReadyGroup, ...]:
        """Groups that were handed out, and have no outcome yet."""
        return tuple(self._in_hand.values())

    def deployed(self) -> None:
        """A version is open that was learnt from all that has its outcome: there may be room now."""
        self._learning = len(self._in_hand)
        self._notify()

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
        self._notify()

    async def _wait(self) -> None:
        self._refuse_to_wait_for_ever()
        with anyio.move_on_after(_STALL_S) as waiting:
            await self._change()
        if waiting.cancelled_caught:
            self._say(Stalled(_STALL_S, tuple(self._waited_for())))

    # ---- generating ----

    def _room(self) -> int:
        """Groups that may start now, and that the rest of the job can still use."""
        open_groups, ready = self._buffer.open_groups, self._buffer.ready_groups
        room = self._pacing.room(open_groups=open_groups, ready_groups=ready, learning_groups=self._learning)
        if self._plan.groups is not None:
            room = min(room, self._plan.groups - self._used - open_groups - ready)
        return max(0, room)

    def _open_next(self, running: TaskGroup) -> None:
        draw = self._draw()
        if draw is None:
            self._exhausted = True
            self._notify()
            return
        group_id = GroupId(f"{self._plan.name}-{draw.ordinal:06d}")
        task = draw.payload()
        specs = [self._spec(draw, group_id, task, member) for member in range(self._plan.group_size)]
        self._buffer.open(group_id, [spec.id for spec in specs], self._deployed())
        for spec in specs:
            running.start_soon(self._run, spec)

    def _draw(self) -> Draw[Any] | None:
        """The next task that is not quarantined; None beyond the last one."""
        skipped = 0
        while True:
            try:
                draw = self._plan.source.at(self._ordinal)
            except IndexError:
                return None
            self._ordinal += 1
            if not self._rollouts.is_quarantined(draw.task_id):
                return draw
            skipped += 1
            if skipped > 1000:
                raise ConfigError(f"tasks: all are quarantined: {', '.join(self._rollouts.quarantined[:10])}")

    def _spec(
        self, draw: Draw[Any], group_id: GroupId, task: dict[str, JsonValue], member: int
    ) -> ProgramSpec:
        return ProgramSpec(
            id=ProgramId(f"{group_id}-{member}"),
            group_id=group_id,
            task_id=draw.task_id,
            purpose=Purpose.TRAIN,
            environment=self._plan.environment,
            task=task,
            limits=self._plan.limits,
            temperature=self._plan.temperature,
            seed=seed_of(self._plan.seed, draw.ordinal, member),
            environment_seed=seed_of(self._plan.seed, draw.ordinal),
            group_size=self._plan.group_size,
            routed_experts=self._plan.routed_experts,
            trainable_until=self._trainable_until(),
        )

    def _trainable_until(self) -> Version:
        """Of a program that begins to sample now."""
        deployed = self._deployed()
        return Version(deployed.epoch, deployed.number + self._plan.max_staleness)

    async def _run(self, spec: ProgramSpec) -> None:
        trajectory = await self._rollouts.run(spec)
        if self._rollouts.is_quarantined(spec.task_id) and spec.task_id not in self._quarantined:
            self._quarantined.add(spec.task_id)
            self._say(Quarantined(spec.task_id))
        self._count(trajectory)
        self._drop(self._buffer.add(trajectory))
        self._notify()

    # ---- what comes to nothing ----

    def _count(self, trajectory: Trajectory) -> None:
        if trajectory.outcome is None:
            self._lost = _Lost()
            return
        self._lost.programs += 1
        self._lost.reasons.append(str(trajectory.outcome))

    def _drop(self, dropped: tuple[DroppedProgram, ...]) -> None:
        for drop in dropped:
            self._rollouts.end(drop.program_id, Outcome(OutcomeKind.DROPPED, drop.reason))
        for reason in sorted({drop.reason for drop in dropped}):
            of_reason = [drop for drop in dropped if drop.reason == reason]
            self._say(Dropped(reason, len(of_reason), of_reason[0].detail))

    @property
    def _is_over(self) -> bool:
        """No group will come any more."""
        return self._exhausted and not self._buffer.open_groups

    def _refuse_to_wait_for_ever(self) -> None:
        in_a_row = _LOST_GROUPS * self._plan.group_size
        if self._lost.programs >= in_a_row:
            last = "; ".join(self._lost.reasons)
            raise NothingComes(f"{self._lost.programs} programs in a row failed, the last ones as: {last}")

    def _waited_for(self) -> list[str]:
        running = [str(member) for members in self._buffer.waiting_for.values() for member in members]
        if not running and self._learning:
            return [f"a publication: {self._learning} groups were handed out since the last one"]
        return running[:5]

    # ---- waiting ----

    def _notify(self) -> None:
        self._changed.set()

    async def _change(self) -> None:
        # Both sides wait on one event; whoever comes second finds a fresh one.
        event = self._changed
        await event.wait()
        if self._changed is event:
            self._changed = anyio.Event()


class NothingComes(SostenutoError):  # noqa: N818 - reads as the fact it states
    """Programs fail one after the other: there is nothing to learn from."""


def _no_signal(groups: tuple[ReadyGroup, ...]) -> NoSignal:
    rewards = [member.reward or 0.0 for group in groups for member in group.members]
    return NoSignal(len(groups), sum(rewards) / len(rewards))


class TasksExhausted(SostenutoError):  # noqa: N818 - reads as the fact it states
    """The source has no further task and what is here does not make a batch."""
