"""Programs that not every version will do for, against the scheduler alone."""

from collections.abc import Iterable

import pytest

from sostenuto.errors import ConfigError
from sostenuto.scheduler.actions import Action, CommitUpdate, Decode, EndStale, Evict, Prepare, Unserved
from sostenuto.scheduler.events import (
    EngineJoined,
    Event,
    Finished,
    Interrupted,
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
from sostenuto.scheduler.program import Reason
from sostenuto.scheduler.requirements import ANY, Requirement
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.update_terms import UpdateTerms
from sostenuto.types import EngineId, ProgramId, Version

E0, E1 = EngineId("e0"), EngineId("e1")
V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)
P = ProgramId("p")
PROMPT = Footprint(10)
PINNED = Requirement(pinned=True)


class Desk:
    """Keeps what the scheduler said since it was last asked."""

    def __init__(self, *engines: EngineId, version: Version = V0) -> None:
        self.scheduler = Scheduler()
        self.now_s = 0.0
        for engine_id in engines:
            self.tell(EngineJoined(engine_id, version, kv_tokens=1000, concurrency=4))

    def tell(self, event: Event, after_s: float = 0.0) -> list[Action]:
        self.now_s += after_s
        return self.scheduler.apply(event, self.now_s)

    def submit(
        self, program: ProgramId, requires: Requirement = ANY, until: Version | None = None
    ) -> list[Action]:
        submitted = Submitted(program, 1e6, trainable_until=until, requires=requires, may_be_ended=True)
        assert self.tell(submitted) == [Prepare(program)]
        return self.tell(Prepared(program, PROMPT, 10))

    def acts(self, program: ProgramId, turn: int = 1) -> list[Action]:
        return self.tell(TurnEnded(program, turn, PROMPT, ("bash",)))

    def returns(self, program: ProgramId, turn: int = 1) -> list[Action]:
        return self.tell(ToolReturned(program, turn, PROMPT, 10))

    def publish(
        self, version: Version, terms: UpdateTerms | None = None, on: Iterable[EngineId] = (E0,)
    ) -> list[Action]:
        said = self.tell(PublicationBegun(version, terms or UpdateTerms()))
        for engine_id in on:
            said += self.tell(UpdateStaged(engine_id, version))
        for engine_id in on:
            said += self.tell(UpdateCommitted(engine_id, version, dropped_kv=True))
        return said

    def waits(self, program: ProgramId) -> Reason | None:
        return self.scheduler.snapshot().waits_for.get(program)

    def phase(self, program: ProgramId) -> Phase:
        return self.scheduler.snapshot().phases[program]


def test_what_requires_a_later_version_waits_for_it_and_stands_in_nobodys_way():
    desk = Desk(E0)
    for number in range(4):
        assert desk.submit(ProgramId(f"early{number}"), Requirement.at_least(V1)) == []
    assert desk.waits(ProgramId("early0")) is Reason.VERSION
    assert desk.submit(P) == [Decode(P, E0, 1)]
    said = desk.publish(V1)
    decoded = [action.program_id for action in said if isinstance(action, Decode)]
    assert decoded == ["early0", "early1", "early2"], "in their order, as many as there are slots"
    assert all(a.requires == Requirement.at_least(V1) for a in said if isinstance(a, Decode))
    assert desk.scheduler.waits_of(ProgramId("early0")) == {
        Reason.SANDBOX: 0.0,
        Reason.VERSION: 0.0,
        Reason.ORDER: 0.0,
    }


def test_what_requires_a_version_that_is_gone_is_told_so():
    desk = Desk(E0, version=V2)
    assert desk.submit(P, Requirement.exactly(V1)) == [Unserved(P, Requirement.exactly(V1), V2)]
    desk.tell(Finished(P))
    assert desk.scheduler.snapshot().phases == {}


def test_exactly_the_version_that_is_deployed_is_served_until_the_next_one():
    desk = Desk(E0)
    exact = Requirement.exactly(V0)
    assert desk.submit(P, exact) == [Decode(P, E0, 1, exact)]
    desk.acts(P)
    desk.publish(V1)
    assert desk.returns(P) == [Unserved(P, exact, V1)]


def test_what_waits_in_the_queue_when_its_version_goes_is_told_so():
    desk = Desk(E0)
    others = [ProgramId(f"other{n}") for n in range(4)]
    for other in others:
        desk.submit(other)
    assert desk.submit(P, Requirement.exactly(V0)) == []
    assert Unserved(P, Requirement.exactly(V0), V1) in desk.publish(V1)


def test_a_pinned_program_goes_on_where_its_version_still_is():
    desk = Desk(E0, E1)
    assert desk.submit(P, PINNED) == [Decode(P, E0, 1, Requirement.exactly(V0))]
    desk.acts(P)
    terms = UpdateTerms(quorum=1, acting="keep", running="continue")
    desk.publish(V1, terms, on=[E0])
    assert desk.scheduler.gate.deployed == V1
    # Its KV on e0 is of the version it is pinned to, and e0 is not any more.
    assert desk.returns(P)[-1] == Decode(P, E1, 2, Requirement.exactly(V0))
    fresh = ProgramId("fresh")
    assert desk.submit(fresh)[-1] == Decode(fresh, E0, 1), "e1 is behind, and serves nobody else"


def test_a_pin_of_the_policy_lasts_while_an_engine_has_the_version_and_is_then_released():
    desk = Desk(E1, E0)
    assert desk.submit(P) == [Decode(P, E1, 1)]
    desk.acts(P)
    desk.publish(V1, UpdateTerms(quorum=1, acting="pin"), on=[E0])
    assert desk.returns(P) == [Decode(P, E1, 2, Requirement.exactly(V0))]
    desk.acts(P, turn=2)
    desk.tell(UpdateStaged(E1, V1))
    desk.tell(UpdateCommitted(E1, V1, dropped_kv=True))
    assert desk.phase(P) is Phase.PARKED
    (decode,) = desk.returns(P, turn=2)
    assert isinstance(decode, Decode)
    assert decode.requires is ANY


def test_without_a_late_engine_a_pin_of_the_policy_is_released_at_once():
    desk = Desk(E0)
    desk.submit(P)
    desk.acts(P)
    desk.publish(V1, UpdateTerms(acting="pin"))
    assert desk.returns(P) == [Decode(P, E0, 2)]


def test_programs_that_hold_kv_on_a_late_engine_go_elsewhere():
    desk = Desk(E1, E0)
    assert desk.submit(P) == [Decode(P, E1, 1)]
    desk.acts(P)
    desk.publish(V1, UpdateTerms(quorum=1), on=[E0])
    assert desk.returns(P)[-1] == Decode(P, E0, 2)


def test_an_interrupted_turn_goes_on_where_it_may_and_begins_anew_when_nothing_came_of_it():
    desk = Desk(E0)
    desk.submit(P, PINNED)
    desk.publish(V1, UpdateTerms(running="continue"))
    assert desk.tell(Interrupted(P, 1)) == [Decode(P, E0, 2, Requirement.exactly(V1))]
    assert desk.tell(Interrupted(P, 1)) == [], "of an earlier turn"
    assert desk.tell(Interrupted(P, 2, tokens=3)) == [Decode(P, E0, 3, Requirement.exactly(V1))]


def test_new_requests_are_held_back_until_what_runs_has_ended_under_the_old_weights():
    desk = Desk(E0)
    desk.submit(P)
    desk.tell(PublicationBegun(V1, UpdateTerms(running="finish", finish_within_s=100)))
    assert desk.tell(UpdateStaged(E0, V1)) == []
    other = ProgramId("other")
    assert desk.submit(other) == []
    assert desk.waits(other) is Reason.VERSION
    assert desk.acts(P) == [CommitUpdate(E0, V1)]
    assert desk.tell(UpdateCommitted(E0, V1, dropped_kv=True))[-1] == Decode(other, E0, 1)


def test_the_swap_does_not_wait_beyond_its_bound():
    desk = Desk(E0)
    desk.submit(P)
    desk.tell(PublicationBegun(V1, UpdateTerms(running="finish", finish_within_s=100)))
    desk.tell(UpdateStaged(E0, V1))
    assert desk.scheduler.wake_at_s() == 100.0
    assert desk.tell(Tick(), 99.0) == []
    assert desk.tell(Tick(), 1.0) == [CommitUpdate(E0, V1)]


def test_programs_too_stale_to_be_trained_are_ended_when_the_version_opens():
    desk = Desk(E0)
    acts, parked, fresh, first = (ProgramId(name) for name in ("acts", "parked", "fresh", "first"))
    for program in (acts, parked, first):
        desk.submit(program, until=V1)
    desk.acts(acts)
    desk.acts(parked)
    desk.publish(V1)
    assert desk.submit(fresh, until=V2)
    desk.acts(fresh)
    said = desk.publish(V2)
    assert [a for a in said if isinstance(a, EndStale)] == [EndStale(acts, V1, V2), EndStale(parked, V1, V2)]
    assert desk.returns(fresh), "one that began later can still be trained"
    for program in (acts, parked):
        assert not any(isinstance(action, Decode) for action in desk.tell(Finished(program)))


def test_terms_may_leave_stale_programs_alone():
    desk = Desk(E0)
    desk.submit(P, until=V0)
    desk.acts(P)
    said = desk.publish(V1, UpdateTerms(end_stale=False))
    assert not any(isinstance(action, EndStale) for action in said)


def test_requirements_are_read_and_wrong_ones_refused():
    assert Requirement.parse(">=0.7") == Requirement.at_least(Version(0, 7))
    assert Requirement.parse("==1.12") == Requirement.exactly(Version(1, 12))
    assert Requirement.parse("pinned") == PINNED
    for wrong in ("0.7", "<=0.7", ">=7", ""):
        with pytest.raises(ConfigError, match="requires: "):
            Requirement.parse(wrong)


@pytest.mark.parametrize(("max_kv_age", "gives_up"), [(None, "idle"), (1, "fading")])
def test_kv_that_the_next_version_takes_is_worth_the_chance_of_coming_back_before_that(
    max_kv_age: int | None, gives_up: str
):
    desk = Desk(E0)
    idle, fading, third = (ProgramId(name) for name in ("idle", "fading", "third"))
    large = Footprint(400)
    desk.submit(fading)
    desk.tell(TurnEnded(fading, 1, large, ("bash",)))
    desk.now_s = 50.0
    desk.tell(PublicationBegun(V1, UpdateTerms(running="continue", acting="keep", max_kv_age=max_kv_age)))
    desk.tell(UpdateStaged(E0, V1))
    desk.tell(UpdateCommitted(E0, V1, dropped_kv=False))
    desk.submit(idle)
    desk.tell(TurnEnded(idle, 1, large, ("bash",)))
    desk.now_s = 99.9
    desk.tell(ToolReturned(fading, 1, large, 10))
    desk.tell(TurnEnded(fading, 2, large, ("bash",)))
    # The next version is expected at 100 s.  Who has acted for longest is the least likely to be back soon,
    # and who has only begun has KV that will be gone by then.
    desk.now_s = 99.999
    desk.tell(Submitted(third, 1e6))
    said = desk.tell(Prepared(third, Footprint(300), 10))
    assert [action.program_id for action in said if isinstance(action, Evict)] == [gives_up]
