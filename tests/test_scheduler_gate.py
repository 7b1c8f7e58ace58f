from typing import Any, Literal

import pytest

from sostenuto.errors import ConfigError, InvalidTransition
from sostenuto.scheduler.actions import (
    Action,
    CommitUpdate,
    Interrupt,
    Opened,
    PublicationFailed,
    Quarantine,
    StageUpdate,
)
from sostenuto.scheduler.gate import Gate
from sostenuto.scheduler.update_terms import UpdateTerms
from sostenuto.types import EngineId, Version

A, B, C = EngineId("a"), EngineId("b"), EngineId("c")
V1, V2, V3 = Version(0, 1), Version(0, 2), Version(0, 3)


def fleet() -> Gate:
    gate = Gate()
    gate.join(A, V1)
    gate.join(B, V1)
    return gate


def test_a_version_opens_when_every_engine_serves_it():
    gate = fleet()
    assert gate.begin(V2) == [StageUpdate(A, V2), StageUpdate(B, V2)]
    assert gate.staged(A, V2) == []
    assert gate.staged(B, V2) == [CommitUpdate(A, V2), CommitUpdate(B, V2)]
    assert gate.committed(A, V2) == []
    assert gate.deployed == V1
    assert gate.committed(B, V2) == [Opened(V2)]
    assert gate.deployed == V2


def test_an_engine_that_fails_is_quarantined_and_the_others_go_on():
    gate = fleet()
    gate.begin(V2)
    gate.staged(A, V2)
    assert gate.failed(B, V2, "checksum of lm_head") == [
        Quarantine(B, "checksum of lm_head"),
        CommitUpdate(A, V2),
    ]
    assert gate.committed(A, V2) == [Opened(V2)]
    assert gate.may_start(A)
    assert not gate.may_start(B)


def test_a_quarantined_engine_returns_with_the_next_full_update():
    gate = fleet()
    gate.begin(V2)
    gate.failed(B, V2, "torn")
    gate.staged(A, V2)
    gate.committed(A, V2)
    gate.begin(V3)
    for engine in (A, B):
        gate.staged(engine, V3)
    assert not gate.may_start(B)
    for engine in (A, B):
        gate.committed(engine, V3)
    assert gate.may_start(B)
    assert gate.deployed == V3


def test_a_publication_without_an_engine_left_has_failed():
    gate = fleet()
    gate.begin(V2)
    gate.failed(A, V2, "gone")
    assert gate.failed(B, V2, "gone") == [Quarantine(B, "gone"), PublicationFailed(V2)]
    assert gate.deployed == V1


def test_versions_never_go_back():
    gate = fleet()
    for version in (V1, Version(0, 0)):
        with pytest.raises(InvalidTransition, match="not newer"):
            gate.begin(version)
    gate.begin(V2)
    with pytest.raises(InvalidTransition, match="while"):
        gate.begin(V3)


def test_a_new_epoch_is_newer_than_any_number_of_the_old_one():
    gate = Gate()
    gate.join(A, Version(0, 999))
    assert gate.begin(Version(1, 1000)) == [StageUpdate(A, Version(1, 1000))]


def test_late_reports_of_an_earlier_publication_change_nothing():
    gate = fleet()
    gate.begin(V2)
    assert gate.committed(A, V2) == []
    assert gate.staged(A, V3) == []
    assert gate.failed(A, V3, "late") == []
    assert gate.states()[A] == "staging"


def test_an_engine_that_leaves_during_a_publication_is_not_waited_for():
    gate = fleet()
    gate.begin(V2)
    gate.staged(A, V2)
    assert gate.leave(B) == [CommitUpdate(A, V2)]


def test_an_engine_that_joins_while_a_version_is_published_takes_part_in_that():
    gate = fleet()
    gate.begin(V2)
    gate.staged(A, V2)
    gate.leave(B)
    assert gate.join(B, V1) == [StageUpdate(B, V2)]
    gate.committed(A, V2)
    assert gate.deployed == V1
    assert gate.staged(B, V2) == [CommitUpdate(B, V2)]
    assert gate.committed(B, V2) == [Opened(V2)]


def test_an_engine_that_joins_with_the_version_being_published_keeps_nobody_waiting():
    gate = fleet()
    gate.begin(V2)
    gate.leave(B)
    assert gate.join(B, V2) == []
    assert gate.staged(A, V2) == [CommitUpdate(A, V2)]
    assert gate.committed(A, V2) == [Opened(V2)]


def staged_by(gate: Gate, *engines: EngineId, version: Version = V2) -> list[Action]:
    return [action for engine in engines for action in gate.staged(engine, version)]


def test_nothing_starts_under_a_version_before_every_engine_has_swapped():
    gate = fleet()
    gate.begin(V2)
    staged_by(gate, A, B)
    assert not gate.may_start(A)
    gate.committed(A, V2)
    assert gate.version(A) == V2
    assert not gate.may_start(A)
    assert gate.states() == {A: "ready", B: "committing"}
    assert gate.committed(B, V2) == [Opened(V2)]
    assert gate.may_start(A)
    assert gate.may_start(B)


def trio(terms: UpdateTerms) -> Gate:
    gate = fleet()
    gate.join(C, V1)
    gate.begin(V2, terms, now_s=100.0)
    return gate


def idle(engine_id: EngineId) -> int:
    del engine_id
    return 0


def test_after_the_deadline_a_quorum_is_enough_and_who_is_late_starts_nothing_but_pinned():
    gate = trio(UpdateTerms(quorum=2, deadline_s=10))
    assert staged_by(gate, A, B) == []
    assert gate.wake_at_s() == 110.0
    assert gate.advance(109.0, idle) == []
    assert gate.advance(110.0, idle) == [CommitUpdate(A, V2), CommitUpdate(B, V2)]
    assert gate.may_start(C), "until the new version opens, it serves what is deployed"
    gate.committed(A, V2)
    assert gate.committed(B, V2) == [Opened(V2)]
    assert not gate.may_start(C)
    assert gate.may_start_pinned(C) == V1
    assert gate.may_start_pinned(A) is None
    assert gate.why_not(C) == "late: it still serves 0.1"
    assert gate.staged(C, V2) == [CommitUpdate(C, V2)]
    assert gate.may_start_pinned(C) is None
    assert gate.committed(C, V2) == []
    assert gate.may_start(C)


def test_a_late_engine_in_quarantine_starts_nothing_until_it_has_the_version():
    gate = trio(UpdateTerms(quorum=0.5, late="quarantine"))
    gate.advance(100.0, idle)
    gate.staged(A, V2)
    assert gate.staged(B, V2) == [CommitUpdate(A, V2), CommitUpdate(B, V2)]
    for engine in (A, B):
        gate.committed(engine, V2)
    assert gate.may_start_pinned(C) is None
    assert not gate.may_start(C)


def test_before_the_deadline_all_are_waited_for_and_too_few_are_never_a_quorum():
    gate = trio(UpdateTerms(quorum=2, deadline_s=10))
    gate.staged(A, V2)
    assert gate.advance(200.0, idle) == []
    assert gate.staged(B, V2) == [CommitUpdate(A, V2), CommitUpdate(B, V2)]
    gate = trio(UpdateTerms(quorum=2, deadline_s=10))
    assert staged_by(gate, A, B, C) == [CommitUpdate(e, V2) for e in (A, B, C)]


def test_when_the_quorum_fails_to_swap_the_late_ones_are_waited_for():
    gate = trio(UpdateTerms(quorum=1))
    assert gate.staged(A, V2) == [CommitUpdate(A, V2)]
    assert gate.failed(A, V2, "torn") == [Quarantine(A, "torn")]
    assert gate.deployed == V1
    assert gate.may_start(B)
    assert gate.staged(B, V2) == []
    assert gate.staged(C, V2) == [CommitUpdate(B, V2), CommitUpdate(C, V2)]


def test_a_late_engine_takes_in_the_next_version_and_its_old_reports_change_nothing():
    gate = trio(UpdateTerms(quorum=2))
    staged_by(gate, A, B)
    for engine in (A, B):
        gate.committed(engine, V2)
    assert StageUpdate(C, V3) in gate.begin(V3, UpdateTerms(quorum=2))
    assert gate.staged(C, V2) == []
    assert gate.failed(C, V2, "its file is gone") == []
    assert staged_by(gate, A, version=V3) == []
    assert gate.staged(C, V3) == [CommitUpdate(A, V3), CommitUpdate(C, V3)]


def test_a_late_engine_that_swaps_when_the_next_version_begins_takes_that_in_afterwards():
    gate = trio(UpdateTerms(quorum=2))
    staged_by(gate, A, B)
    for engine in (A, B):
        gate.committed(engine, V2)
    gate.staged(C, V2)
    assert gate.begin(V3) == [StageUpdate(A, V3), StageUpdate(B, V3)]
    assert gate.committed(C, V2) == [StageUpdate(C, V3)]
    assert gate.version(C) == V2
    assert gate.may_start(C)


@pytest.mark.parametrize("running", ["finish", "abort"])
def test_the_swap_waits_for_what_runs_and_no_longer_than_it_may(running: Literal["finish", "abort"]):
    gate = fleet()
    gate.begin(V2, UpdateTerms(running=running, finish_within_s=30), now_s=5.0)
    runs = {A: 1, B: 2}
    interrupts = [Interrupt(A), Interrupt(B)] if running == "abort" else []
    assert staged_by(gate, A, B) == interrupts
    assert gate.advance(5.0, runs.__getitem__) == []
    assert not gate.may_start(A), "new ones are held back"
    runs[A] = 0
    assert gate.advance(6.0, runs.__getitem__) == [CommitUpdate(A, V2)]
    assert gate.wake_at_s() == 35.0
    assert gate.advance(35.0, runs.__getitem__) == [CommitUpdate(B, V2)]


def test_the_oldest_kv_is_counted_in_versions_that_have_opened():
    gate = Gate()
    gate.join(A, V1)
    oldest: list[Version | None] = []
    for number in (2, 5, 6, 9):
        version = Version(0, number)
        gate.begin(version, UpdateTerms(running="continue", acting="keep", max_kv_age=2))
        (commit,) = gate.staged(A, version)
        assert isinstance(commit, CommitUpdate)
        oldest.append(commit.oldest_kv)
        gate.committed(A, version)
    assert oldest == [None, V1, V2, Version(0, 5)]


def test_an_engine_that_does_not_tell_the_age_of_its_kv_drops_all_of_it_as_soon_as_some_may_be_too_old():
    gate = Gate()
    gate.join(A, V1, tells_kv_age=False)
    drops: list[bool] = []
    for number in range(2, 8):
        version = Version(0, number)
        gate.begin(version, UpdateTerms(running="continue", acting="keep", max_kv_age=2))
        (commit,) = gate.staged(A, version)
        assert isinstance(commit, CommitUpdate)
        assert commit.oldest_kv is None
        drops.append(commit.drops_kv)
        gate.committed(A, version, dropped_kv=commit.drops_kv)
    assert drops == [False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"quorum": 0}, "quorum is 0"),
        ({"quorum": 1.5}, "quorum is 1.5"),
        ({"deadline_s": 3.0}, "deadline_s without quorum"),
        ({"max_kv_age": 2}, "none is"),
        ({"max_kv_age": -1, "acting": "keep"}, "max_kv_age is -1"),
        ({"finish_within_s": -1.0}, "finish_within_s is -1"),
    ],
)
def test_terms_that_cannot_be_are_refused_by_field(wrong: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        UpdateTerms(**wrong)


def test_what_kv_outlives_the_next_change_follows_from_the_terms():
    gate = fleet()
    assert gate.kept_from() is None, "nobody has said what a change does"
    for version, terms, kept_from in (
        (V2, UpdateTerms(), Version(0, 3)),
        (V3, UpdateTerms(acting="keep"), None),
        (Version(0, 4), UpdateTerms(acting="keep", max_kv_age=2), V3),
    ):
        gate.begin(version, terms)
        staged_by(gate, A, B, version=version)
        for engine in (A, B):
            gate.committed(engine, version)
        assert gate.kept_from() == kept_from


def test_an_engine_with_a_newer_version_serves_when_nobody_else_does_and_not_before():
    gate = Gate()
    gate.join(A, V1)
    gate.join(B, V2)
    assert not gate.may_start(B)
    assert gate.deployed == V1
    gate.leave(B)
    gate.begin(V2)
    gate.failed(A, V2, "torn")
    gate.join(B, V2)
    assert gate.deployed == V2
    assert gate.may_start(B)
