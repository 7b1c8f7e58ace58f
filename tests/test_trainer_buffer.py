from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sostenuto.errors import Blame, RecordError
from sostenuto.records import Producer, Span, Trajectory, VersionSpan
from sostenuto.trainer.buffer import Buffer, Dropped
from sostenuto.trainer.lineage import Lineage
from sostenuto.types import GroupId, Outcome, OutcomeKind, ProgramId, Version
from trainer_world import V0, sampled, trajectory

FAILED = Outcome(OutcomeKind.FAILED, "sandbox died", Blame.INFRASTRUCTURE)
EMPTY = ((Span.fed(Producer.USER, [1]),),)


def opened(buffer: Buffer, group: str, *programs: str, started: Version = V0) -> Buffer:
    buffer.open(GroupId(group), [ProgramId(program) for program in programs], started)
    return buffer


def filled(versions: list[Version]) -> Buffer:
    """One ready group of two for each version."""
    buffer = Buffer()
    for index, version in enumerate(versions):
        opened(buffer, f"g{index}", f"a{index}", f"b{index}")
        for name, reward in (("a", 1.0), ("b", 0.0)):
            buffer.add(trajectory(f"{name}{index}", reward, group=f"g{index}", version=version))
    return buffer


def reasons(dropped: tuple[Dropped, ...]) -> list[tuple[str, str]]:
    return [(drop.program_id, drop.reason) for drop in dropped]


def test_a_group_is_ready_when_all_members_have_ended_in_whatever_order():
    buffer = opened(Buffer(), "g", "a", "b", "c")
    assert buffer.add(trajectory("c", 1.0)) == ()
    assert buffer.add(trajectory("a", 0.0)) == ()
    assert dict(buffer.waiting_for) == {"g": ("b",)}
    assert buffer.take(1, V0, 0).batch == ()
    buffer.add(trajectory("b", 0.0))
    (group,) = buffer.take(1, V0, 0).batch
    assert [member.program_id for member in group.members] == ["a", "b", "c"]
    assert repr(buffer) == "<Buffer open=0 ready=0>"


def test_members_that_failed_leave_a_group_of_the_rest():
    buffer = opened(Buffer(), "g", "a", "b", "c")
    buffer.add(trajectory("a", None, outcome=FAILED, sequences=()))
    buffer.add(trajectory("b", 0.0))
    assert buffer.add(trajectory("c", 1.0)) == ()
    (group,) = buffer.take(1, V0, 0).batch
    assert [member.program_id for member in group.members] == ["b", "c"]


def test_a_group_of_one_left_is_dropped_with_the_reason():
    buffer = opened(Buffer(), "g", "a", "b")
    buffer.add(trajectory("a", 1.0))
    dropped = buffer.add(trajectory("b", None, outcome=FAILED))
    assert dropped == (Dropped(ProgramId("a"), "group_too_small", "1 of 2 can be trained"),)
    assert buffer.open_groups == buffer.ready_groups == 0


def test_a_group_whose_members_all_failed_ends_without_dropping_anyone_twice():
    buffer = opened(Buffer(), "g", "a", "b")
    assert buffer.add(trajectory("a", None, outcome=FAILED)) == ()
    assert buffer.add(trajectory("b", None, outcome=FAILED)) == ()
    assert buffer.open_groups == 0


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (trajectory("a", float("nan")), "reward_not_finite"),
        (trajectory("a", None), "reward_missing"),
        (trajectory("a", 1.0, sequences=EMPTY), "nothing_to_train"),
        (trajectory("a", 1.0, sequences=()), "nothing_to_train"),
        (
            trajectory("a", 1.0, sequences=((Span.fed(Producer.USER, [1]), sampled([2], logprob=np.nan)),)),
            "invalid_record",
        ),
    ],
)
def test_a_member_that_cannot_be_trained_is_dropped_with_a_reason_and_votes_in_nothing(
    broken: Trajectory, reason: str
):
    buffer = opened(Buffer(), "g", "a", "b", "c")
    assert reasons(buffer.add(broken)) == [("a", reason)]
    buffer.add(trajectory("b", 1.0))
    assert buffer.add(trajectory("c", 0.0)) == ()
    (group,) = buffer.take(1, V0, 0).batch
    assert [member.program_id for member in group.members] == ["b", "c"]


@pytest.mark.parametrize("reward", [0.0, float(np.float32(0.1))])
def test_a_group_without_a_signal_is_replaced_skipped_or_kept_as_configured(reward: float):
    programs = [f"p{index}" for index in range(8)]
    replacing = opened(Buffer(zero_spread="replace"), "g", *programs)
    skipping = opened(Buffer(zero_spread="skip"), "g", *programs)
    keeping = opened(Buffer(zero_spread="keep"), "g", *programs)
    dropped = [
        [drop.reason for program in programs for drop in buffer.add(trajectory(program, reward))]
        for buffer in (replacing, skipping, keeping)
    ]
    assert dropped == [["no_signal"] * 8, [], []]
    assert [b.ready_groups for b in (replacing, skipping, keeping)] == [0, 1, 1]
    taken = skipping.take(1, V0, 0)
    assert (taken.batch, len(taken.skipped), len(taken.dropped)) == ((), 1, 8)
    assert len(keeping.take(1, V0, 0).batch) == 1


def test_staleness_is_one_at_completion_and_two_when_taken_after_another_publication():
    """Starts under v3, continues under v4, waits while v5 is published."""
    spans = (
        Span.fed(Producer.USER, [1]),
        sampled([2], version=Version(0, 3)),
        sampled([3], version=Version(0, 4)),
    )
    record = trajectory("a", 1.0, sequences=(spans,))
    assert record.staleness(Version(0, 4)) == 1
    for bound, expected in ((2, []), (1, [("a", "stale"), ("b", "stale")])):
        buffer = opened(Buffer(), "g", "a", "b")
        buffer.add(record)
        buffer.add(trajectory("b", 0.0, version=Version(0, 4)))
        taken = buffer.take(1, Version(0, 5), bound)
        assert reasons(taken.dropped) == expected
        assert [group.group_id for group in taken.batch] == ([] if expected else ["g"])


def test_the_oldest_versions_are_used_first_and_a_batch_is_whole_or_none():
    buffer = filled([Version(0, 2), Version(0, 1), Version(0, 2)])
    assert [group.group_id for group in buffer.take(2, Version(0, 2), 1).batch] == ["g1", "g0"]
    assert buffer.take(2, Version(0, 2), 1).batch == ()
    assert buffer.ready_groups == 1


def test_a_group_at_its_last_chance_is_waited_for_instead_of_being_pushed_out():
    buffer = filled([Version(0, 1), Version(0, 1)])
    opened(buffer, "late", "c", "d", started=V0)
    assert buffer.take(2, Version(0, 1), 1).batch == ()
    for name, reward in (("c", 1.0), ("d", 0.0)):
        buffer.add(trajectory(name, reward, group="late", version=V0))
    assert [group.group_id for group in buffer.take(2, Version(0, 1), 1).batch] == ["late", "g0"]


def test_a_group_that_can_wait_for_the_next_version_is_not_waited_for():
    buffer = opened(filled([Version(0, 1)]), "young", "c", "d", started=Version(0, 1))
    assert len(buffer.take(1, Version(0, 1), 1).batch) == 1


def test_a_record_of_a_newer_version_is_dropped_as_another_lineage_not_taken_as_fresh():
    taken = filled([Version(0, 9)]).take(1, Version(0, 7), 4)
    assert reasons(taken.dropped) == [("a0", "lineage"), ("b0", "lineage")]


def test_after_a_crash_records_of_the_abandoned_lineage_are_dropped_and_ancestors_kept():
    """Versions 0.6 and 0.7 were lost; the run goes on as 1.8 from the weights of 0.5."""
    lineage = Lineage().went_on(Version(0, 5), Version(1, 8))
    buffer = Buffer(lineage=lineage)
    for index, number in enumerate([5, 6, 3]):
        opened(buffer, f"g{index}", f"a{index}", f"b{index}")
        for name, reward in (("a", 1.0), ("b", 0.0)):
            version = Version(0, number)
            buffer.add(trajectory(f"{name}{index}", reward, group=f"g{index}", version=version))
    taken = buffer.take(1, Version(1, 9), 2)
    assert [group.group_id for group in taken.batch] == ["g0"]
    assert reasons(taken.dropped) == [
        ("a1", "lineage"), ("b1", "lineage"), ("a2", "stale"), ("b2", "stale"),
    ]  # fmt: skip
    assert reasons(filled([Version(0, 5)]).take(1, Version(1, 8), 9).dropped)[0] == ("a0", "lineage")


def test_the_distance_between_versions_is_counted_in_steps_of_learning_over_every_death():
    """0.5 went on as 1.8; that died without a checkpoint, and 0.5 went on as 2.11; 2.13 went on as 3.20."""
    lineage = (
        Lineage()
        .went_on(Version(0, 5), Version(2, 11), twins=[Version(1, 8)])
        .went_on(Version(2, 13), Version(3, 20))
    )
    now = Version(3, 21)
    expected = {"3.21": 0, "3.20": 1, "2.13": 1, "2.11": 3, "1.8": 3, "0.5": 3, "0.3": 5}
    assert {text: lineage.distance(Version.parse(text), now) for text in expected} == expected
    for lost in (Version(3, 22), Version(2, 14), Version(1, 9), Version(0, 6)):
        assert lineage.distance(lost, now) is None


def test_a_group_that_was_ready_before_its_run_died_is_used_as_any_other():
    buffer = filled([Version(0, 4)])
    members = (trajectory("x", 1.0, group="kept"), trajectory("y", 0.0, group="kept"))
    assert reasons(buffer.restore(GroupId("kept"), members, Version(0, 1), 0)) == [
        ("x", "stale"),
        ("y", "stale"),
    ]
    assert reasons(buffer.restore(GroupId("kept"), members[:1], V0, 0)) == [("x", "group_too_small")]
    assert buffer.restore(GroupId("kept"), members, V0, 0) == ()
    with pytest.raises(RecordError, match="open already"):
        buffer.open(GroupId("kept"), [ProgramId("p"), ProgramId("q")], Version(0, 0))
    assert (buffer.ready_groups, buffer.group_ids) == (2, ("g0", "kept"))


def test_a_program_nobody_expects_or_that_ends_twice_is_refused():
    buffer = opened(Buffer(), "g", "a", "b")
    buffer.add(trajectory("a", 1.0))
    with pytest.raises(RecordError, match="ended twice"):
        buffer.add(trajectory("a", 1.0))
    with pytest.raises(RecordError, match="does not expect"):
        buffer.add(trajectory("x", 1.0))
    with pytest.raises(RecordError, match="open already"):
        opened(buffer, "g", "c", "d")
    with pytest.raises(RecordError, match="2 or more"):
        opened(buffer, "h", "c")


def test_a_drained_buffer_drops_what_it_holds_and_what_still_comes():
    buffer = opened(filled([V0]), "g", "c", "d", "e")
    buffer.add(trajectory("c", 1.0))
    buffer.add(trajectory("d", None, outcome=FAILED))
    assert reasons(buffer.drain("job_ended")) == [
        ("a0", "job_ended"),
        ("b0", "job_ended"),
        ("c", "job_ended"),
    ]
    assert reasons(buffer.add(trajectory("e", 1.0))) == [("e", "job_ended")]
    assert buffer.open_groups == buffer.ready_groups == 0


@given(st.data())
def test_every_program_leaves_exactly_once(data: st.DataObject):
    """Trained, dropped, or with the outcome that it brought: the sums close."""
    groups, size = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 4))
    buffer = Buffer()
    members = [(f"g{g}", f"p{g}.{m}") for g in range(groups) for m in range(size)]
    for g in range(groups):
        opened(buffer, f"g{g}", *(f"p{g}.{m}" for m in range(size)))
    left: list[str] = []
    for group, program in data.draw(st.permutations(members)):
        kind = data.draw(st.sampled_from(["0", "1", "nan", "failed", "empty", "old"]))
        record = trajectory(program, float(kind) if kind in {"0", "1", "nan"} else 1.0, group=group)
        record = replace(record, outcome=FAILED) if kind == "failed" else record
        record = replace(record, sequences=EMPTY) if kind == "empty" else record
        if kind == "old":
            record = trajectory(program, 0.5, group=group, version=Version(0, -3))
        left += [program] if record.outcome else []
        left += [drop.program_id for drop in buffer.add(record)]
        taken = buffer.take(1, V0, 1)
        left += [member.program_id for ready in taken.batch for member in ready.members]
        left += [drop.program_id for drop in taken.dropped]
    assert sorted(left) == sorted(program for _, program in members)
    assert buffer.drain("end") == ()


def test_versions_of_a_span_all_count_for_lineage():
    mixed = Span(
        Producer.POLICY, np.array([5, 6], np.int32), np.array([-1, -1], np.float32), np.ones(2, np.bool_),
        (VersionSpan(Version(0, 3), 0, 1), VersionSpan(Version(0, 9), 1, 2)),
    )  # fmt: skip
    buffer = opened(Buffer(), "g", "a", "b")
    buffer.add(trajectory("a", 1.0, sequences=((Span.fed(Producer.USER, [1]), mixed),)))
    buffer.add(trajectory("b", 0.0, version=Version(0, 3)))
    assert reasons(buffer.take(1, Version(0, 4), 3).dropped) == [("a", "lineage"), ("b", "lineage")]
