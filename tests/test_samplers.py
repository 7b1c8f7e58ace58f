"""Samplers on virtual time: every group ends once, within the bound, and nothing waits for ever."""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sostenuto.errors import ConfigError, RecordError
from sostenuto.records import Producer, Span
from sostenuto.trainer.buffer import Buffer
from sostenuto.trainer.groups import ReadyGroup
from sostenuto.trainer.samplers import Fifo, InOrder, Standing, Windowed, open_sampler
from sostenuto.types import GroupId, ProgramId, Version
from trainer_world import V0, sampled, trajectory

NAMES = ("fifo", "in_order", "ready_first", "windowed:4", "windowed:9")


@dataclass
class Sampled:
    """Groups of two on `slots` places, and a trainer that takes `batch` of them a step."""

    name: str
    batch: int
    bound: int
    durations_s: Sequence[int]
    learn_s: int = 3
    slots: int = 6
    steps: int = 12
    now_s: float = 0.0
    deployed: int = 0
    learning: int = 0
    opened: int = 0
    running: dict[int, int] = field(default_factory=dict[int, int])
    """The version by group that has a slot."""
    queued: list[int] = field(default_factory=list[int])
    used: list[int] = field(default_factory=list[int])
    staleness: list[int] = field(default_factory=list[int])
    ends: Counter[str] = field(default_factory=Counter[str])
    aborted: set[int] = field(default_factory=set[int])
    overtakers: Counter[int] = field(default_factory=Counter[int])

    def run(self) -> "Sampled":
        self.buffer = Buffer(sampler=open_sampler(self.name))
        self.events: list[tuple[float, int, int]] = []
        self._act()
        while self.deployed < self.steps:
            assert self.events, f"{self.buffer!r}: nothing runs, and nothing is learnt"
            self.now_s, _, group = heapq.heappop(self.events)
            self._learnt() if group < 0 else self._finish(group)
            self._act()
        for drop in self.buffer.drain("over"):
            self.ends[drop.program_id] += 1
        return self

    @property
    def version(self) -> Version:
        return Version(0, self.deployed)

    def _act(self) -> None:
        if not self.learning and self.deployed < self.steps:
            self._learn()
        room = self.buffer.room(self.version, self.bound, per_version=self.batch, learning=self.learning)
        for _ in range(room):
            members = [ProgramId(f"{self.opened}.{m}") for m in "ab"]
            self.buffer.open(GroupId(str(self.opened)), members, self.version)
            self.queued.append(self.opened)
            self.opened += 1
        while self.queued and len(self.running) < self.slots:
            group = self.queued.pop(0)
            if group in self.aborted:
                continue
            self.running[group] = self.deployed
            ends_s = self.now_s + self.durations_s[group % len(self.durations_s)]
            heapq.heappush(self.events, (ends_s, group, group))

    def _finish(self, group: int) -> None:
        version = self.running.pop(group)
        if group in self.aborted:
            return
        for member, reward in (("a", 0.0), ("b", 1.0)):
            name = f"{group}.{member}"
            record = trajectory(name, reward, group=str(group), version=Version(0, version))
            assert self.buffer.add(record) == ()

    def _learn(self) -> None:
        taken = self.buffer.take(self.batch, self.version, self.bound)
        for drop in taken.dropped:
            self.ends[drop.program_id] += 1
        for group in taken.batch:
            self._use(group)
        if taken.batch:
            self.learning = len(taken.batch)
            for drop in self.buffer.evict(
                self.version, self.bound, per_version=self.batch, learning=self.learning
            ):
                self.ends[drop.program_id] += 1
            heapq.heappush(self.events, (self.now_s + self.learn_s, -1, -1))

    def _use(self, group: ReadyGroup) -> None:
        place = int(group.group_id)
        self.staleness.append(self.deployed - group.oldest_version.number)
        self.ends.update(member.program_id for member in group.members)
        self.used.append(place)
        running = set(self.running) - self.aborted
        self.overtakers.update(other for other in running if other < place)

    def _learnt(self) -> None:
        self.deployed, self.learning = self.deployed + 1, 0
        for gone in self.buffer.give_up(self.version, self.bound, per_version=self.batch, learning=0):
            self.aborted.add(int(gone.group_id))
            self.ends.update((*gone.running, *gone.ended))


durations = st.lists(st.integers(1, 30), min_size=1, max_size=9)


@given(
    st.sampled_from(NAMES), st.integers(1, 4), st.integers(0, 3), durations,
    st.integers(0, 20), st.integers(1, 12),
)  # fmt: skip
def test_every_program_ends_once_within_the_bound_and_the_steps_come_to_an_end(
    name: str, batch: int, bound: int, durations_s: list[int], learn_s: int, slots: int
):
    run = Sampled(name, batch, bound, durations_s, learn_s, slots).run()
    assert max(run.staleness) <= bound
    assert len(run.used) == 12 * batch
    still_open = {str(member) for members in run.buffer.waiting_for.values() for member in members}
    everyone = {f"{group}.{member}" for group in range(run.opened) for member in "ab"}
    assert still_open == set()
    assert max(run.ends.values()) == 1
    never_ended = everyone - set(run.ends)
    assert {int(program[:-2]) for program in never_ended} <= set(run.running) | set(run.queued)


@given(st.integers(1, 4), st.integers(0, 3), durations, st.integers(1, 12))
def test_in_order_uses_groups_as_they_were_opened_and_drops_none(
    batch: int, bound: int, durations_s: list[int], slots: int
):
    run = Sampled("in_order", batch, bound, durations_s, slots=slots).run()
    assert run.used == list(range(12 * batch))
    assert not run.aborted


@given(st.integers(1, 4), st.integers(0, 3), durations)
def test_fifo_wastes_nothing(batch: int, bound: int, durations_s: list[int]):
    run = Sampled("fifo", batch, bound, durations_s, slots=64).run()
    used = {f"{group}.{member}" for group in run.used for member in "ab"}
    assert not run.aborted
    assert not {program for program in set(run.ends) - used if int(program[:-2]) < min(run.used)}


@given(st.integers(4, 9), st.integers(1, 3), durations)
def test_a_window_bounds_how_many_overtake(window: int, bound: int, durations_s: list[int]):
    run = Sampled(f"windowed:{window}", 3, bound, durations_s, slots=64).run()
    assert max(run.overtakers.values(), default=0) <= window - 1


def test_ready_first_never_waits_for_a_straggler_and_gives_it_up_when_it_is_too_old():
    slow = [500, 1, 1, 1, 1, 1, 1, 1]
    ready, fifo = (Sampled(name, 2, 1, slow, slots=64).run() for name in ("ready_first", "fifo"))
    assert ready.now_s < 100 < fifo.now_s
    assert 0 in ready.aborted
    assert 0 in fifo.used


def test_samplers_are_known_by_name():
    assert [open_sampler(name).name for name in NAMES] == list(NAMES)
    own = Fifo()
    assert open_sampler(own) is own
    for wrong in ("fifi", "windowed", "windowed:0", "windowed:x", "fifo:3"):
        with pytest.raises(ConfigError, match="sampler: "):
            open_sampler(wrong)
    with pytest.raises(ConfigError, match=r"a window of 3 holds no batch of 4 groups; give windowed:4"):
        Windowed(window=3).check(4)


def test_the_state_of_a_sampler_is_its_own():
    sampler = Windowed(window=5)
    sampler.load_state_dict({"sampler": "windowed:5", "selected": 7})
    assert sampler.state_dict() == {"sampler": "windowed:5", "selected": 7}
    with pytest.raises(ConfigError, match="the state is of 'fifo', not of 'windowed:5'"):
        sampler.load_state_dict(Fifo().state_dict())
    with pytest.raises(ConfigError, match="'selected' of its state is None"):
        sampler.load_state_dict({"sampler": "windowed:5"})


class Greedy(InOrder):
    """Chooses what it was not asked for."""

    def select(self, standing: Standing, groups: int) -> Sequence[ReadyGroup]:
        del groups
        return standing.ready


class Picky(Fifo):
    """Wants no group whose rewards are too good."""

    def evict(self, standing: Standing) -> dict[GroupId, str]:
        return {group.group_id: "too easy" for group in standing.ready if (group.members[0].reward or 0) > 1}


def add_group(buffer: Buffer, name: str, rewards: Sequence[float]) -> None:
    members = [ProgramId(f"{name}.{index}") for index in range(len(rewards))]
    buffer.open(GroupId(name), members, V0)
    for member, reward in zip(members, rewards, strict=True):
        buffer.add(trajectory(member, reward, group=name))


@pytest.mark.parametrize("name", NAMES)
def test_what_every_batch_to_come_is_too_late_for_is_dropped_as_stale_and_leaves_its_place(name: str):
    buffer = Buffer(sampler=open_sampler(name))
    for group in "abc":
        add_group(buffer, group, [1.0, 0.0])
    taken = buffer.take(2, V0, 0)
    assert len(taken.batch) == 2
    assert taken.dropped == ()
    assert buffer.evict(V0, 1, per_version=2, learning=2) == ()
    before = buffer.room(V0, 0, per_version=2, learning=1)
    dropped = buffer.evict(V0, 0, per_version=2, learning=2)
    assert {(drop.program_id, drop.reason, drop.detail) for drop in dropped} == {
        (f"c.{member}", "stale", "staleness 1 when it could be used, bound 0") for member in (0, 1)
    }
    assert buffer.room(V0, 0, per_version=2, learning=1) == before + 1
    assert buffer.evict(V0, 0, per_version=2, learning=2) == ()


def test_a_sampler_of_ones_own_can_evict_and_is_refused_what_it_was_not_asked_for():
    picky = Buffer(sampler=Picky())
    add_group(picky, "g", [2.0, 0.0])
    add_group(picky, "h", [1.0, 0.0])
    taken = picky.take(1, V0, 0)
    assert [group.group_id for group in taken.batch] == ["h"]
    assert {(drop.program_id, drop.reason, drop.detail) for drop in taken.dropped} == {
        ("g.0", "evicted", "too easy"),
        ("g.1", "evicted", "too easy"),
    }
    greedy = Buffer(sampler=Greedy())
    add_group(greedy, "g", [2.0, 0.0])
    add_group(greedy, "h", [1.0, 0.0])
    with pytest.raises(RecordError, match="sampler 'in_order' chose 2 different groups"):
        greedy.take(1, V0, 0)


def test_a_program_that_forked_counts_once():
    """A rewritten history and a sub-agent are sequences of one record: one member, one vote."""
    fork = ((Span.fed(Producer.USER, [1]), sampled([2])), (Span.fed(Producer.USER, [3]), sampled([4, 5])))
    buffer = Buffer()
    buffer.open(GroupId("g"), [ProgramId("a"), ProgramId("b")], V0)
    buffer.add(trajectory("a", 1.0, sequences=fork))
    assert buffer.ready_groups == 0
    buffer.add(trajectory("b", 0.0))
    (group,) = buffer.take(1, V0, 0).batch
    assert [member.program_id for member in group.members] == ["a", "b"]


def test_a_member_in_the_place_of_another_completes_the_group():
    buffer = Buffer()
    buffer.open(GroupId("g"), [ProgramId("a"), ProgramId("b")], V0)
    buffer.add(trajectory("a", 1.0))
    buffer.replace(GroupId("g"), ProgramId("b"), ProgramId("b+1"))
    with pytest.raises(RecordError, match="does not expect it"):
        buffer.add(trajectory("b", 0.0))
    buffer.add(trajectory("b+1", 0.0))
    assert buffer.ready_groups == 1


def test_a_group_goes_on_without_those_who_come_too_late():
    buffer = Buffer()
    buffer.open(GroupId("g"), [ProgramId(name) for name in "abc"], V0)
    buffer.add(trajectory("a", 1.0))
    buffer.add(trajectory("c", 0.0))
    assert buffer.leave_out(GroupId("g"), [ProgramId("b")]) == ()
    (group,) = buffer.take(1, V0, 0).batch
    assert [member.program_id for member in group.members] == ["a", "c"]
    buffer.open(GroupId("h"), [ProgramId(name) for name in "de"], V0)
    buffer.add(replace(trajectory("d", 1.0), group_id=GroupId("h")))
    (drop,) = buffer.leave_out(GroupId("h"), [ProgramId("e")])
    assert drop.reason == "group_too_small"
