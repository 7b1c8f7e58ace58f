import pytest

from sostenuto.errors import InvalidTransition
from sostenuto.scheduler.actions import CommitUpdate, Opened, PublicationFailed, Quarantine, StageUpdate
from sostenuto.scheduler.gate import Gate
from sostenuto.types import EngineId, Version

A, B = EngineId("a"), EngineId("b")
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
