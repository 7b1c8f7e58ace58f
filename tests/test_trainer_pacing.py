import heapq
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sostenuto.errors import ConfigError
from sostenuto.trainer.buffer import Buffer
from sostenuto.trainer.pacing import Pacing
from sostenuto.types import GroupId, ProgramId, Version
from trainer_world import trajectory


@dataclass
class Run:
    """Rollouts on `slots` places, and a trainer, on virtual time."""

    pacing: Pacing
    slots: int
    rollout_s: float
    learn_s: float
    steps: int
    durations_s: tuple[int, ...] = (1,)
    """Multiples of `rollout_s`, in turn."""
    now_s: float = 0.0
    deployed: int = 0
    started: int = 0
    learning: int = 0
    queued: list[int] = field(default_factory=list[int])
    staleness: list[int] = field(default_factory=list[int])
    dropped: int = 0
    generating_while_learning: bool = False

    def __post_init__(self) -> None:
        self.buffer = Buffer()
        self.events: list[tuple[float, int, str, int]] = []
        self.running = 0

    def simulate(self) -> "Run":
        self._act()
        while self.deployed < self.steps:
            self.now_s, _, kind, group = heapq.heappop(self.events)
            if kind == "rollout":
                self._finish(group)
            else:
                self.deployed, self.learning = self.deployed + 1, 0
            self._act()
        return self

    def _act(self) -> None:
        self._learn()
        room = self.pacing.room(
            open_groups=self.buffer.open_groups,
            ready_groups=self.buffer.ready_groups,
            learning_groups=self.learning,
        )
        for _ in range(room):
            members = [ProgramId(f"{self.started}.{m}") for m in "ab"]
            self.buffer.open(GroupId(f"g{self.started}"), members, Version(0, self.deployed))
            self.queued.append(self.started)
            self.started += 1
        while self.queued and self.running < self.slots:
            self._start(self.queued.pop(0))

    def _start(self, group: int) -> None:
        self.running += 1
        self.generating_while_learning |= self.learning > 0
        self.versions = {**getattr(self, "versions", {}), group: Version(0, self.deployed)}
        ends_s = self.now_s + self.rollout_s * self.durations_s[group % len(self.durations_s)]
        heapq.heappush(self.events, (ends_s, len(self.versions), "rollout", group))

    def _finish(self, group: int) -> None:
        self.running -= 1
        for member, reward in (("a", 0.0), ("b", 1.0)):
            version = self.versions[group]
            self.buffer.add(trajectory(f"{group}.{member}", reward, group=f"g{group}", version=version))

    def _learn(self) -> None:
        if self.learning:
            return
        taken = self.buffer.take(
            self.pacing.groups_per_step, Version(0, self.deployed), self.pacing.max_staleness
        )
        self.dropped += len(taken.dropped)
        if taken.batch:
            self.learning = len(taken.batch)
            self.staleness += [self.deployed - group.oldest_version.number for group in taken.batch]
            heapq.heappush(self.events, (self.now_s + self.learn_s, -1, "learn", 0))


@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 12), st.integers(1, 40), st.integers(1, 40))
def test_with_equal_durations_nothing_is_dropped_for_staleness(
    groups: int, bound: int, slots: int, rollout_s: int, learn_s: int
):
    run = Run(Pacing(groups, bound), slots, float(rollout_s), float(learn_s), steps=12).simulate()
    assert run.dropped == 0
    assert max(run.staleness) <= bound


@given(st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(1, 30), min_size=1, max_size=9))
def test_with_any_durations_nothing_is_dropped_for_staleness(groups: int, bound: int, durations: list[int]):
    """Whoever is overtaken is waited for before it would be too old."""
    run = Run(Pacing(groups, bound), 64, 1.0, 2.0, steps=12, durations_s=tuple(durations)).simulate()
    assert run.dropped == 0
    assert max(run.staleness) <= bound


def test_the_bound_is_reached_when_learning_is_slow():
    run = Run(Pacing(2, 2), slots=8, rollout_s=1.0, learn_s=10.0, steps=12).simulate()
    assert max(run.staleness) == 2


def test_staleness_zero_is_synchronous_and_one_overlaps():
    synchronous = Run(Pacing(2, 0), slots=8, rollout_s=3.0, learn_s=3.0, steps=10).simulate()
    overlapped = Run(Pacing(2, 1), slots=8, rollout_s=3.0, learn_s=3.0, steps=10).simulate()
    assert not synchronous.generating_while_learning
    assert overlapped.generating_while_learning
    assert synchronous.now_s == 60.0
    assert overlapped.now_s < 40.0


def test_nonsense_is_refused():
    with pytest.raises(ConfigError, match="groups_per_step 0"):
        Pacing(0, 1)
