"""The scheduler against random histories, and its promises one by one."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sostenuto.scheduler.actions import (
    Action,
    CommitUpdate,
    Decode,
    Evict,
    Expire,
    Prepare,
    Refuse,
    StageUpdate,
    TurnAway,
)
from sostenuto.scheduler.events import (
    Answered,
    EngineJoined,
    EngineLost,
    Event,
    Finished,
    Prepared,
    PublicationBegun,
    Submitted,
    Tick,
    ToolReturned,
    TurnEnded,
    UpdateCommitted,
    UpdateStaged,
)
from sostenuto.scheduler.kv import Footprint
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId, ProgramId, Version

KV, SLOTS, TURN = 100, 3, 10
ENGINES = [EngineId("e0"), EngineId("e1")]


class SchedulerMachine(RuleBasedStateMachine):
    """A shell that obeys, on a clock that only moves forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(SchedulerSettings(live_programs=6, prepare_ahead=2))
        self.now = 0.0
        self.count = 0
        self.context: dict[ProgramId, int] = {}
        self.turn: dict[ProgramId, int] = {}
        self.over: set[ProgramId] = set()
        self.version = Version(0, 0)

    @initialize()
    def engines(self) -> None:
        for engine in ENGINES:
            self.feed(EngineJoined(engine, self.version, KV, SLOTS))

    def feed(self, event: Event) -> None:
        self.now += 1.0
        for action in self.scheduler.apply(event, self.now):
            self.obey(action)

    def obey(self, action: Action) -> None:
        match action:
            case Decode(program_id, _, turn):
                self.turn[program_id] = turn
            case StageUpdate(engine, version):
                self.feed(UpdateStaged(engine, version))
            case CommitUpdate(engine, version):
                self.feed(UpdateCommitted(engine, version, dropped_kv=True))
            case Refuse(program_id) | Expire(program_id):
                self.feed(Finished(program_id))
                self.over.add(program_id)
            case _:
                pass

    def of_phase(self, *phases: Phase) -> list[ProgramId]:
        return sorted(id_ for id_, phase in self.scheduler.snapshot().phases.items() if phase in phases)

    @rule(has_environment=st.booleans())
    def submit(self, *, has_environment: bool) -> None:
        self.count += 1
        program = ProgramId(f"p{self.count:03}")
        self.feed(Submitted(program, lease_s=1000.0, has_environment=has_environment))
        assert has_environment or self.scheduler.snapshot().phases[program] is Phase.PREPARING

    @rule(data=st.data(), tokens=st.integers(1, 40))
    def prepared(self, data: st.DataObject, tokens: int) -> None:
        if preparing := self.of_phase(Phase.PREPARING):
            program = data.draw(st.sampled_from(preparing))
            self.context[program] = tokens
            self.feed(Prepared(program, Footprint(tokens), TURN))

    @rule(data=st.data(), tokens=st.integers(1, TURN))
    def turn_ends(self, data: st.DataObject, tokens: int) -> None:
        if reasoning := self.of_phase(Phase.REASONING):
            program = data.draw(st.sampled_from(reasoning))
            self.context[program] += tokens
            self.feed(TurnEnded(program, self.turn[program], Footprint(self.context[program])))

    @rule(data=st.data(), tokens=st.integers(0, 20))
    def tool_returns(self, data: st.DataObject, tokens: int) -> None:
        if acting := self.of_phase(Phase.ACTING, Phase.PARKED):
            program = data.draw(st.sampled_from(acting))
            self.context[program] += tokens
            self.feed(ToolReturned(program, self.turn[program], Footprint(self.context[program]), TURN))

    @rule(data=st.data())
    def answer_and_finish(self, data: st.DataObject) -> None:
        if phases := self.of_phase(Phase.REASONING, Phase.ACTING, Phase.READY, Phase.PARKED, Phase.WAITING):
            program = data.draw(st.sampled_from(phases))
            self.feed(Answered(program))
            self.feed(Finished(program))

    @rule(data=st.data())
    def cancel_anywhere(self, data: st.DataObject) -> None:
        if known := self.of_phase(*Phase):
            self.feed(Finished(data.draw(st.sampled_from(known))))

    @rule(data=st.data())
    def late_event_changes_nothing(self, data: st.DataObject) -> None:
        if known := [p for p in self.of_phase(*Phase) if p in self.turn]:
            program = data.draw(st.sampled_from(known))
            before = self.scheduler.snapshot()
            self.feed(TurnEnded(program, self.turn[program] - 1, Footprint(1)))
            after = self.scheduler.snapshot()
            assert (after.phases, after.engines) == (before.phases, before.engines)

    @rule()
    def publish(self) -> None:
        if self.scheduler.gate.publishing is None:
            self.version = self.version.next()
            self.feed(PublicationBegun(self.version))

    @rule(engine=st.sampled_from(ENGINES))
    def engine_dies_and_returns(self, engine: EngineId) -> None:
        self.feed(EngineLost(engine))
        self.feed(EngineJoined(engine, self.version, KV, SLOTS))

    @rule(seconds=st.floats(0, 300))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @invariant()
    def reservations_stay_within_both_caps(self) -> None:
        snapshot = self.scheduler.snapshot()
        for reserved, decoding in snapshot.engines.values():
            assert reserved <= KV
            assert decoding <= SLOTS

    @invariant()
    def only_programs_that_hold_kv_are_reserved_for(self) -> None:
        snapshot = self.scheduler.snapshot()
        if not any(phase.holds_kv for phase in snapshot.phases.values()):
            assert all(reserved == 0 for reserved, _ in snapshot.engines.values())

    @invariant()
    def a_program_that_fits_an_idle_fleet_is_not_left_waiting(self) -> None:
        snapshot = self.scheduler.snapshot()
        idle = bool(snapshot.engines) and all(d == 0 for _, d in snapshot.engines.values())
        assert not (idle and any(phase.is_runnable for phase in snapshot.phases.values()))

    @precondition(lambda self: self.count > 0)
    @rule()
    def everything_comes_back(self) -> None:
        for program in self.of_phase(*Phase):
            self.feed(Finished(program))
        snapshot = self.scheduler.snapshot()
        assert snapshot.phases == {}
        assert all(engine == (0, 0) for engine in snapshot.engines.values())


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def scheduler_with(kv: int = 100, slots: int = 8, **limits: int) -> Scheduler:
    scheduler = Scheduler(SchedulerSettings(**limits))
    scheduler.apply(EngineJoined(ENGINES[0], Version(0, 0), kv, slots), 0.0)
    return scheduler


def started(scheduler: Scheduler, name: str, tokens: int, at: float = 0.0) -> list[Action]:
    program = ProgramId(name)
    scheduler.apply(Submitted(program, 1e6), at)
    return scheduler.apply(Prepared(program, Footprint(tokens), 10), at)


def decode(name: str, turn: int = 1) -> Decode:
    return Decode(ProgramId(name), ENGINES[0], turn)


def test_environments_are_prepared_in_order_and_only_so_many_ahead():
    scheduler = Scheduler(SchedulerSettings(prepare_ahead=2))
    actions = [scheduler.apply(Submitted(ProgramId(n), 10.0), 0.0) for n in "abc"]
    assert actions == [[Prepare(ProgramId("a"))], [Prepare(ProgramId("b"))], []]


def test_programs_without_an_environment_begin_at_once_and_leave_the_places_to_those_with_one():
    scheduler = Scheduler(SchedulerSettings(live_programs=1, prepare_ahead=1, queue_limit=1))
    bare = [Submitted(ProgramId(f"bare{n}"), 10.0, has_environment=False) for n in range(3)]
    housed = [Submitted(ProgramId(name), 10.0) for name in "abc"]
    assert [scheduler.apply(one, 0.0) for one in bare] == [[Prepare(one.program_id)] for one in bare]
    told = [scheduler.apply(one, 0.0) for one in housed]
    assert told == [[Prepare(ProgramId("a"))], [], [TurnAway(ProgramId("c"), 1.0)]]
    late = Submitted(ProgramId("late"), 10.0, has_environment=False)
    assert scheduler.apply(late, 0.0) == [Prepare(ProgramId("late"))]
    assert scheduler.apply(Finished(ProgramId("a")), 1.0) == [Prepare(ProgramId("b"))]


def test_a_program_without_an_environment_has_a_lease_from_the_beginning():
    scheduler = Scheduler()
    scheduler.apply(Submitted(ProgramId("bare"), 10.0, has_environment=False), 0.0)
    assert scheduler.apply(Tick(), 10.0) == [Expire(ProgramId("bare"))]


def test_nobody_waits_so_nothing_is_given_up():
    scheduler = scheduler_with(kv=100)
    started(scheduler, "a", 40)
    assert scheduler.apply(TurnEnded(ProgramId("a"), 1, Footprint(45)), 1.0) == []
    assert scheduler.apply(Tick(), 1e5) == []
    assert scheduler.snapshot().engines[ENGINES[0]] == (45, 0)


def test_the_longest_acting_gives_up_its_kv_and_only_as_many_as_needed():
    scheduler = scheduler_with(kv=100)
    for at, name in enumerate("abc"):
        started(scheduler, name, 20, at)
        scheduler.apply(TurnEnded(ProgramId(name), 1, Footprint(25)), at)
    assert started(scheduler, "d", 30) == [Evict(ProgramId("a"), ENGINES[0]), decode("d")]


def test_a_result_that_comes_after_the_kv_was_given_up_waits_like_the_others():
    scheduler = scheduler_with(kv=60)
    started(scheduler, "a", 40)
    scheduler.apply(TurnEnded(ProgramId("a"), 1, Footprint(45)), 1.0)
    assert started(scheduler, "b", 40, 2.0) == [Evict(ProgramId("a"), ENGINES[0]), decode("b")]
    assert scheduler.apply(ToolReturned(ProgramId("a"), 1, Footprint(48), 10), 3.0) == []
    assert scheduler.apply(Answered(ProgramId("b")), 4.0) == [decode("a", 2)]


def test_others_pass_a_program_that_does_not_fit_for_so_long_and_no_longer():
    scheduler = scheduler_with(kv=100, patience_s=300)
    started(scheduler, "a", 60)
    assert started(scheduler, "big", 80) == []
    assert started(scheduler, "small", 5, 299.0) == [decode("small")]
    assert scheduler.apply(Tick(), 300.0) == []
    assert started(scheduler, "tiny", 5, 301.0) == []
    assert scheduler.apply(Answered(ProgramId("small")), 302.0) == []
    assert scheduler.apply(Answered(ProgramId("a")), 303.0) == [decode("big")]


def test_decode_slots_are_a_cap_of_their_own():
    scheduler = scheduler_with(kv=1000, slots=2)
    assert [started(scheduler, n, 10) for n in "abc"] == [[decode("a")], [decode("b")], []]
    assert scheduler.apply(TurnEnded(ProgramId("a"), 1, Footprint(12)), 1.0) == [decode("c")]


def test_what_no_engine_can_ever_hold_is_refused_with_the_numbers():
    scheduler = scheduler_with(kv=100)
    assert started(scheduler, "huge", 95) == [Refuse(ProgramId("huge"), 105, 100)]


def test_a_program_that_outgrows_the_engine_is_refused_and_frees_its_kv():
    scheduler = scheduler_with(kv=100)
    started(scheduler, "a", 60)
    scheduler.apply(TurnEnded(ProgramId("a"), 1, Footprint(70)), 1.0)
    actions = scheduler.apply(ToolReturned(ProgramId("a"), 1, Footprint(95), 10), 2.0)
    assert actions == [Evict(ProgramId("a"), ENGINES[0]), Refuse(ProgramId("a"), 105, 100)]
    assert scheduler.snapshot().engines[ENGINES[0]] == (0, 0)


def test_a_silent_program_is_expired_once_and_news_of_it_renew_the_lease():
    scheduler = scheduler_with()
    scheduler.apply(Submitted(ProgramId("a"), lease_s=10.0), 0.0)
    assert scheduler.wake_at_s() == 10.0
    scheduler.apply(Prepared(ProgramId("a"), Footprint(5), 10), 6.0)
    assert scheduler.apply(Tick(), 10.0) == []
    assert scheduler.apply(Tick(), 16.0) == [Expire(ProgramId("a"))]
    assert scheduler.apply(Tick(), 99.0) == []


def test_of_a_program_that_has_expired_nothing_else_is_said():
    scheduler = Scheduler()
    scheduler.apply(Submitted(ProgramId("a"), lease_s=10.0), 0.0)
    scheduler.apply(Prepared(ProgramId("a"), Footprint(50), 10), 0.0)
    too_small = EngineJoined(ENGINES[0], Version(0, 0), 20, 8)
    assert scheduler.apply(too_small, 10.0) == [Expire(ProgramId("a"))]
    assert scheduler.apply(EngineJoined(ENGINES[1], Version(0, 0), 100, 8), 11.0) == []


def test_kv_dropped_by_an_update_sends_acting_programs_to_wait_without_it():
    scheduler = scheduler_with()
    started(scheduler, "a", 40)
    scheduler.apply(TurnEnded(ProgramId("a"), 1, Footprint(45)), 1.0)
    v1 = Version(0, 1)
    scheduler.apply(PublicationBegun(v1), 2.0)
    scheduler.apply(UpdateStaged(ENGINES[0], v1), 3.0)
    scheduler.apply(UpdateCommitted(ENGINES[0], v1, dropped_kv=True), 4.0)
    assert scheduler.snapshot().phases == {"a": Phase.PARKED}
    assert scheduler.snapshot().engines[ENGINES[0]] == (0, 0)


@pytest.mark.parametrize("phase", ["reasoning", "acting"])
def test_programs_of_a_dead_engine_keep_their_place_in_the_order(phase: str):
    scheduler = scheduler_with()
    started(scheduler, "a", 40)
    if phase == "acting":
        scheduler.apply(TurnEnded(ProgramId("a"), 1, Footprint(45)), 1.0)
        scheduler.apply(ToolReturned(ProgramId("a"), 1, Footprint(45), 10), 1.0)
    scheduler.apply(EngineLost(ENGINES[0]), 2.0)
    assert scheduler.snapshot().phases == {"a": Phase.WAITING}
    actions = scheduler.apply(EngineJoined(ENGINES[1], Version(0, 0), 100, 8), 3.0)
    assert [type(a) for a in actions] == [Decode]


def test_of_several_tools_the_slowest_by_experience_is_waited_for():
    scheduler = scheduler_with(kv=100)
    for tool, took_s in (("look", 0.1), ("build", 300.0)):
        for call in range(20):
            name = f"{tool}{call}"
            started(scheduler, name, 5)
            scheduler.apply(TurnEnded(ProgramId(name), 1, Footprint(5), (tool,)), 0.0)
            scheduler.apply(ToolReturned(ProgramId(name), 1, Footprint(5), 1), took_s)
            scheduler.apply(Finished(ProgramId(name)), took_s)
    for name, tools in (("quick", ("look",)), ("slow", ("look", "build"))):
        started(scheduler, name, 20, 1000.0)
        scheduler.apply(TurnEnded(ProgramId(name), 1, Footprint(25), tools), 1000.0)
    assert started(scheduler, "next", 50, 1000.1)[0] == Evict(ProgramId("slow"), ENGINES[0])


def test_where_an_engine_overwrites_from_the_end_a_program_gives_up_no_more_than_is_lacking():
    scheduler = Scheduler()
    scheduler.apply(EngineJoined(ENGINES[0], Version(0, 0), 100, 8, gives_up_parts=True), 0.0)
    started(scheduler, "a", 60)
    scheduler.apply(TurnEnded(ProgramId("a"), 1, Footprint(64)), 0.0)
    assert started(scheduler, "b", 40, 1000.0) == [decode("b")]
    assert scheduler.snapshot().phases[ProgramId("a")] is Phase.ACTING
    assert scheduler.snapshot().engines[ENGINES[0]] == (100, 1)
    assert scheduler.apply(ToolReturned(ProgramId("a"), 1, Footprint(66), 10), 1001.0) == []
    assert scheduler.apply(Finished(ProgramId("b")), 1002.0) == [decode("a", 2)]
    assert scheduler.snapshot().engines[ENGINES[0]] == (76, 1)
