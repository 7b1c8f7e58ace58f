"""Programs whose reward is given after they have ended.

Invariants:
- A program that waits for its reward holds no environment, no place and no KV; its group waits for it.
- It gets one reward, from whoever is first; when the deadline passes first, the infrastructure has failed it.
"""

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import anyio

from sostenuto.errors import Blame, ConfigError, EnvironmentFailure, ProgramError, boundary, lone_error
from sostenuto.records import Trajectory
from sostenuto.runtime.jobs.events import JobEvent, RewardAwaited
from sostenuto.runtime.jobs.finished import Finished, ask, finite
from sostenuto.runtime.jobs.rewarding import LateRewards, named
from sostenuto.runtime.program import ProgramSpec
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.runtime.rollouts import Runner
from sostenuto.types import Outcome, OutcomeKind, ProgramId


@dataclass(slots=True, eq=False)
class _Slot:
    """Of one program, from its start."""

    given: anyio.Event = field(default_factory=anyio.Event)
    value: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    waits: bool = False

    def give(self, value: float, metrics: Mapping[str, float]) -> None:
        if not self.given.is_set():
            self.value, self.metrics = value, dict(metrics)
            self.given.set()


class AwaitedRewards:
    """Of all programs of a runtime."""

    def __init__(self) -> None:
        self._slots: dict[ProgramId, _Slot] = {}

    @property
    def waiting(self) -> tuple[ProgramId, ...]:
        """Programs that have ended without one."""
        return tuple(id_ for id_, slot in self._slots.items() if slot.waits and not slot.given.is_set())

    def give(self, program_id: ProgramId, value: float, metrics: Mapping[str, float]) -> None:
        """Also of a program that has yet to end.  ConfigError for one that is none of these, or no reward."""
        for name, number in {"value": value, **metrics}.items():
            if not math.isfinite(number):
                raise ConfigError(f"reward of {program_id}: {name} is {number}; give a finite number")
        slot = self._slots.get(program_id)
        if slot is None:
            raise ConfigError(
                f"reward of {program_id}: no program of that id runs or waits for one; give it while it "
                "waits, or raise late_rewards.deadline_s"
            )
        if slot.given.is_set():
            raise ConfigError(f"reward of {program_id}: it has one already; give each program one")
        slot.give(value, metrics)

    @contextmanager
    def expecting(self, program_id: ProgramId) -> Generator[_Slot]:
        """For the time that a program runs and waits."""
        slot = self._slots[program_id] = _Slot()
        try:
            yield slot
        finally:
            del self._slots[program_id]

    def around(
        self, runner: Runner, rule: LateRewards | None, renderer: Renderer, say: Callable[[JobEvent], None]
    ) -> Runner:
        """`runner`, whose programs end with their rewards, however late those come."""
        return _Awaiting(runner, self, rule, renderer, say)


class _Awaiting:
    """A Runner."""

    def __init__(
        self,
        runner: Runner,
        awaited: AwaitedRewards,
        rule: LateRewards | None,
        renderer: Renderer,
        say: Callable[[JobEvent], None],
    ) -> None:
        self._runner = runner
        self._awaited = awaited
        self._rule = rule
        self._renderer = renderer
        self._say = say

    async def run(self, spec: ProgramSpec) -> Trajectory:
        with self._awaited.expecting(spec.id) as slot:
            trajectory = await self._runner.run(spec)
            if trajectory.outcome is not None or trajectory.reward is not None or trajectory.history:
                return trajectory
            if self._rule is None:
                return _failed(
                    trajectory,
                    f"the reward of {spec.environment.name} comes later, and the job has no late_rewards; "
                    "give it late_rewards with a deadline_s",
                    Blame.ENVIRONMENT,
                )
            slot.waits = True
            self._say(RewardAwaited(spec.id, spec.task_id, self._rule.deadline_s))
            return await self._rewarded(spec, trajectory, slot, self._rule)

    async def _rewarded(
        self, spec: ProgramSpec, trajectory: Trajectory, slot: _Slot, rule: LateRewards
    ) -> Trajectory:
        try:
            with anyio.move_on_after(rule.deadline_s), lone_error():
                async with anyio.create_task_group() as group:
                    if rule.ask is not None:
                        group.start_soon(self._ask, spec, trajectory, slot, rule)
                    await slot.given.wait()
                    group.cancel_scope.cancel()
        except ProgramError as error:
            return _failed(trajectory, str(error), error.blame)
        if not slot.given.is_set():
            late = f"no reward within {rule.deadline_s:g} s of its end"
            return _failed(trajectory, late, Blame.INFRASTRUCTURE)
        return replace(trajectory, reward=slot.value, metrics={**trajectory.metrics, **slot.metrics})

    async def _ask(self, spec: ProgramSpec, trajectory: Trajectory, slot: _Slot, rule: LateRewards) -> None:
        doing = f"late_rewards: ask of {spec.id}"
        assert rule.ask is not None
        with boundary(EnvironmentFailure, doing):
            told = await ask(named(rule.ask, doing), Finished(trajectory, spec.task, self._renderer))
            slot.give(finite(told, doing), {})


def _failed(trajectory: Trajectory, reason: str, blame: Blame) -> Trajectory:
    return replace(trajectory, outcome=Outcome(OutcomeKind.FAILED, reason, blame))
